"""Finds the files that a path, a folder or a glob names, without what no source of text reads."""

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
}
_FILES = {  # by the ends of their names
    "tokenizer.json": "a tokenizer",
    ".tiktoken": "a tokenizer",
    ".parquet": "Parquet: use data=hf",
    ".arrow": "Arrow: use data=hf",
    ".csv": "CSV: use data=hf",
    ".tsv": "TSV: write it as CSV or JSON lines",
}


def matches(pattern: str, left_out: dict[str, str]) -> list[str]:
    """Return the files that a path, a folder or a glob names, sorted.

    A folder is all its files. A folder that cannot be read is returned itself. As in glob,
    wildcards do not match hidden names. `left_out` gets the path of what is not read, and what it
    is: a dataset, a run, a model, a file that only data=hf reads, or the command's own output.

    Raises:
        UserError: the path is standard input, a pipe, a socket or a device.
    """
    if os.path.isfile(pattern):
        paths = iter([pattern])
    elif os.path.isdir(pattern):
        paths = _below(pattern, ["**"], left_out, set())
    elif os.path.exists(pattern) or pattern == "-":
        what = "standard input" if pattern == "-" else "a pipe, a socket or a device"
        raise UserError(f"data.path={pattern} is {what}: write its content to a file and give that")
    else:
        names = [*filter(None, pattern.split("/"))] or [""]
        paths = _below("/" if pattern.startswith("/") else "", names, left_out, set())
    outputs = {os.path.realpath("/dev/fd/1"), os.path.realpath("/dev/fd/2")}
    files = []
    for path in sorted(paths):
        kind = _kind_of_file(path)
        if os.path.realpath(path) in outputs:
            kind = "the output of this command"
        if kind is None:
            files.append(path)
        else:
            left_out[path] = kind
    return files


def _kind_of_file(path: str) -> str | None:
    """Return what a file is that no source of text reads, by its name; else None."""
    name = re.sub(rf"({'|'.join(COMPRESSED)})$", "", path.lower())
    return next((kind for end, kind in _FILES.items() if name.endswith(end)), None)


def _kind_of_folder(folder: str, names: list[str]) -> str | None:
    """Return what a folder is that no source of text reads, by names in it; else None."""
    if folder.endswith(".partial"):
        return "a dataset in the making"
    for patterns, kind in _FOLDERS.items():
        if all(fnmatch.filter(names, pattern) for pattern in patterns):
            return kind
    return None


def _below(
    folder: str, patterns: list[str], left_out: dict[str, str], entered: set[tuple[str, int]]
) -> Iterator[str]:
    """Yield what matches a glob in a folder.

    Args:
        patterns: the names between the slashes of the glob.
        entered: real folders that were entered, and the patterns left there, as links may loop.
    """
    pattern, *rest = patterns
    key = (os.path.realpath(folder), len(patterns))
    if key in entered:
        return
    entered.add(key)
    names = [pattern]
    try:
        if glob.has_magic(pattern):
            names = sorted(os.listdir(folder or "."))
        else:
            os.lstat(os.path.join(folder, pattern))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a zero byte
        return
    except OSError:
        yield folder or "."
        return
    kind = _kind_of_folder(folder, names)
    if kind is not None:
        left_out[folder or "."] = kind
        return
    if pattern == "**" and rest:
        yield from _below(folder, rest, left_out, entered)
    for name in names:
        is_hidden = name.startswith(".") and not pattern.startswith(".")
        if is_hidden or not fnmatch.fnmatchcase(name, pattern):
            continue
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            if not rest:
                yield path
        elif pattern == "**":
            yield from _below(path, patterns, left_out, entered)
        elif rest:
            yield from _below(path, rest, left_out, entered)


def some_of(items: list[str]) -> str:
    """Return the first of some items for a message, and how many more there are."""
    n_more = len(items) - 4
    if n_more > 0:
        items = [*items[:4], f"and {n_more} more"]
    return ", ".join(items)
