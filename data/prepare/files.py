"""Finds the files that a path, a folder or a glob names, and leaves out what no source of text should read."""

import fnmatch
import glob
import os
import re
from collections.abc import Iterator

from common.settings import UserError
from data.prepare.archives import COMPRESSED

_FOLDERS = {  # by names in them
    ("manifest.json", "train-00000.bin"): "a dataset",
    ("config.json", "metrics.jsonl"): "a run",
    ("run.lock",): "a run",
    ("manifest.json", "state.json"): "a checkpoint",
    ("config.json", "model*.safetensors"): "a model",
    ("config.json", "pytorch_model*.bin"): "a model",
    ("dataset_info.json", "state.json"): "saved by datasets: use data=hf",
    ("dataset_dict.json",): "saved by datasets: use data=hf",
    ("multirun.yaml",): "a sweep",
    ("latest-run", "*run-*"): "runs of wandb",
    ("run-*.wandb",): "a run of wandb",
    ("pyvenv.cfg",): "a virtual environment",
}
_FILES = {  # by the ends of their names
    "tokenizer.json": "a tokenizer",
    ".tiktoken": "a tokenizer",
    ".parquet": "Parquet: use data=hf",
    ".arrow": "Arrow: use data=hf",
    ".csv": "CSV: use data=hf",
    ".tsv": "TSV: write it as CSV or JSON lines",
}
_TOKENIZER = re.compile(
    rb'\s*\{\s*"version"\s*:\s*"[^"]*"\s*,\s*"truncation"\s*:'
)  # how its .json begins


def matches(pattern: str, left_out: dict[str, str]) -> list[str]:
    """Return the files that a path, a folder or a glob names, sorted, and the folders there that cannot be read.

    A folder is all its files. As in glob, wildcards do not match hidden names. `left_out` gets what is not read: the
    path of a dataset, a run, a model, a file that only data=hf reads, or the command's own output, and what it is.

    Raises:
        UserError: the path is standard input, a pipe, a socket or a device.
    """
    if os.path.isfile(pattern):
        found = iter([pattern])
    elif os.path.isdir(pattern):
        found = _below(pattern, ["**"], left_out, set())
    elif os.path.exists(pattern) or pattern == "-":
        what = "standard input" if pattern == "-" else "a pipe, a socket or a device"
        raise UserError(f"data.path={pattern} is {what}: write its content to a file and give that")
    else:
        parts = [*filter(None, pattern.split("/"))] or [""]
        found = _below("/" if pattern.startswith("/") else "", parts, left_out, set())
    own = {os.path.realpath(f"/dev/fd/{number}"): "the output of this command" for number in (1, 2)}
    files = []
    for file in sorted(found):
        name = re.sub(rf"({'|'.join(COMPRESSED)})$", "", file.lower())
        kinds = (kind for end, kind in _FILES.items() if name.endswith(end))
        kind = next(kinds, own.get(os.path.realpath(file)))
        if kind := kind or ("a tokenizer" if _is_tokenizer(file) else None):
            left_out[file] = kind
        else:
            files.append(file)
    return files


def _is_tokenizer(file: str) -> bool:
    if not file.lower().endswith(".json") or not os.path.isfile(file):
        return False
    try:
        with open(file, "rb") as opened:
            return bool(_TOKENIZER.match(opened.read(200)))
    except OSError:  # whoever reads it counts it as unreadable
        return False


def _below(
    folder: str, parts: list[str], left_out: dict[str, str], seen: set[tuple[str, int]]
) -> Iterator[str]:
    """Yield what matches the parts of a glob in a folder. `seen`: real folders that were entered, as links may loop."""
    part, *rest = parts
    if (key := (os.path.realpath(folder), len(parts))) in seen:
        return
    seen.add(key)
    found = [part]
    try:
        if glob.has_magic(part):
            found = sorted(os.listdir(folder or "."))
        else:
            os.lstat(os.path.join(folder, part))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a zero byte
        return
    except OSError:
        yield folder or "."
        return
    kinds = (
        kind
        for names, kind in _FOLDERS.items()
        if all(fnmatch.filter(found, name) for name in names)
    )
    if kind := "a dataset in the making" if folder.endswith(".partial") else next(kinds, None):
        left_out[folder or "."] = kind
        return
    found = [
        name
        for name in found
        if fnmatch.fnmatchcase(name, part) and name.startswith(".") <= part.startswith(".")
    ]
    if part == "**" and rest:
        yield from _below(folder, rest, left_out, seen)
    for name in found:
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            if not rest:
                yield path
        elif part == "**":
            yield from _below(path, parts, left_out, seen)
        elif rest:
            yield from _below(path, rest, left_out, seen)


def some_of(items: list[str]) -> str:
    """Return the first of some items for a message, and how many others there are."""
    first, others = items[:4], len(items) - 4
    return ", ".join([*first, f"and {others} more"] if others > 0 else first)
