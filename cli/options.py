"""Options as users type them: values as Hydra reads them, and one-line answers where something else is meant."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.command_line import in_hydras_grammar, refuse_flag, source_for
from common.removed import FILES, removed_key
from common.settings import CONFIGS, UserError, nearest

DEFAULTS = re.compile(r"^defaults:\n( .*\n)*", re.MULTILINE)
"""Hydra's list of the files that a file of configs/ is based on."""
_OF_DATA = ("data", "tokenizer")
_ABSENT = {
    "batch_size": "the size of a batch is batch_tokens, in tokens: sequences x seq_len",
    "do_sample": "temperature=0 takes the most likely token, and every other temperature samples",
    "dropout": "dropout is not supported; optim.weight_decay regularises",
    **dict.fromkeys(
        ("epochs", "num_epochs"), "a run's length is max_steps, in steps of batch_tokens tokens"
    ),
    "fsdp": "write runtime.strategy=fsdp",
    **dict.fromkeys(("log_interval", "log_every"), "every step is logged"),
    "min_lr": "the last learning rate is schedule.end, as a fraction of optim.max_lr",
    "project": "write tracker=wandb tracker.wandb.project=...",
    "wandb_log": "write tracker=wandb",
}
_SYNONYMS = {
    "average": "ema",
    "batch_tokens": "grad_accum_steps gradient_accumulation_steps total_batch_size",
    "checkpoint": "run_dir",
    "checkpoint.every": "save_every save_interval save_steps",
    "eval.batches": "eval_iters",
    "eval.every": "eval_every eval_interval eval_steps",
    "max_new_tokens": "max_length max_tokens",
    "max_steps": "lr_decay_iters max_iters max_tokens num_iterations",
    "micro_batch": "batch_size device_batch_size",
    "model.n_embd": "d_model hidden_size",
    "model.n_layer": "depth",
    "model.n_vocab": "vocab_size",
    "num_samples": "n num_return_sequences",
    "optim.max_lr": "learning_rate",
    "out_dir": "dataset_dir",
    "prompt": "start",
    "run_dir": "output_dir",
    "runtime.dtype": "precision",
    "seq_len": "block_size context_length max_seq_len",
}
"""Keys, and what others call them."""
_TEXTS = re.compile(
    r"\w+_(dir|field|files?|from|in|name|out|path)|"
    "checkpoint|csv|device|folder|hf|host|nanogpt|out|path|project|prompt|revision|split|stop|subset|text"
)
"""The last parts of keys whose values are texts, even if they look like numbers."""


def is_text(option: str) -> bool:
    """Whether the value of KEY=VALUE is a text."""
    return bool(_TEXTS.fullmatch(option.partition("=")[0].rpartition(".")[2]))


def groups_of(config_name: str) -> dict[str, list[str]]:
    """Return the names in every group that a command takes: {"schedule": ["constant", "cosine", ...]}."""
    if config_name not in ("train", "plan", "prepare"):
        return {}
    folders = sorted({path.parent for path in CONFIGS.glob("*/**/*.yaml")})
    groups = {
        str(path.relative_to(CONFIGS)): sorted(file.stem for file in path.glob("*.yaml"))
        for path in folders
    }
    return {
        group: names
        for group, names in groups.items()
        if (group in _OF_DATA) == (config_name == "prepare")
    }


def value_at(tree: Any, *keys: str) -> Any:
    """Return what nested dicts have at these keys; None where they have nothing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def takes_one_name(key: str) -> bool:
    """Whether an option chooses one file of a group; of trackers, a run may have several."""
    return key != "tracker" and bool(re.fullmatch(r"\w+(/\w+)*", key)) and (CONFIGS / key).is_dir()


def refuse_misplaced(option: str, config_name: str, in_sweep: bool, phrase: str) -> None:
    """Raise UserError, which shows the right spelling, for options that are written differently here.

    phrase: a word that is not KEY=VALUE, with those beside it, and KEY=VALUE on their left.
    """
    key, equals, value = option.partition("=")
    groups = groups_of(config_name)
    member_of = {name: group for group, names in reversed(groups.items()) for name in names}
    by_last = {group.rpartition("/")[2]: group for group in groups}
    if "experiment" in groups and key in (
        "--config-name",
        "-cn",
        "--config",
    ):  # other programs with Hydra have these
        raise UserError(f"{option}: write {member_of.get(value, 'experiment')}={value or '...'}")
    refuse_flag(option)
    if re.match(r"[+~]*hydra[./]", key) and not in_sweep:
        raise UserError(f"{option} is for sweeps: add -m")
    if key in member_of and key not in by_last:
        raise UserError(f"{option}: write {member_of[key]}={key}")
    if not (equals and re.fullmatch(r"\+*\w[\w-]*([./]\w[\w-]*)*", key)) and not option.startswith(
        "~"
    ):
        remedy = _as_option(option, config_name)
        text, _, words = phrase.partition("=")
        if words and is_text(text) and not equals:
            remedy = f'quote the {text} if it has spaces: {text}="{words}"'
        raise UserError(f"{option}: options are KEY=VALUE here, without spaces around =: {remedy}")
    if key in _OF_DATA and config_name != "prepare":
        raise UserError(
            f"'{key}' is for scripts/prepare_data.py: give {config_name} its dataset, or a run of it"
        )
    if key in by_last and key not in groups:
        raise UserError(f"{option}: write {by_last[key]}={value}")
    if (
        key == "data"
        and value not in groups.get(key, [])
        and (Path(value).exists() or set(value) & set("/.*"))
    ):
        raise UserError(f"{option} names a file: write data={source_for(value)} data.path={value}")
    if (
        key == "tokenizer"
        and value not in groups.get(key, [])
        and value.endswith((".json", ".tiktoken"))
    ):
        kind = "hf" if value.endswith(".json") else "gpt2"
        raise UserError(f"{option} names a file: write tokenizer={kind} tokenizer.path={value}")
    group = key.removesuffix(".name").replace(".", "/")
    if group in groups and "." in key and not value.startswith("{"):
        raise UserError(f"{option} sets a value, not a group: write {group}={value}")
    if (
        config_name in ("train", "plan")
        and key in ("checkpoint", "resume")
        and (Path(value).exists() or "/" in value)
    ):
        raise UserError(f"{option}: a run continues where its files are: write run_dir={value}")
    if in_sweep and re.fullmatch(r"-?\d+,0\d+", value):
        raise UserError(
            f"{option} is two numbers: write {key}={value.replace(',', '.')} for a decimal number"
        )
    if takes_one_name(key) and value.startswith("["):
        raise UserError(
            f"{option}: {key} takes one name; -m {key}={value[1:-1]} makes a run with each"
        )
    if instead := FILES.get(key, {}).get(value):
        raise UserError(f"{option} was removed: {instead}")
    if key in groups and re.fullmatch(r"true|false|null|[\d.]+", value):
        raise UserError(f"{option} does not exist: {nearest(value, groups[key])}")


def _as_option(word: str, config_name: str) -> str:
    keys = explained(CONFIGS / f"{config_name}.yaml")
    paths = [key for key in keys if re.search(r"(checkpoint|dir|folders?|out)$", key)]
    key = {"train": "run_dir", "plan": "run_dir", "prepare": "data.path"}.get(
        config_name, *paths[:1]
    )
    return f"write {key}={word}" if key and word and Path(word).exists() else "see --help"


def meant(key: str, keys: list[str], groups: dict[str, list[str]]) -> str:
    """Say what a user means by a key that is not among a command's `keys`."""
    parts = key.split(".")
    last = parts[-1]
    for i in range(1, len(parts)):
        group, inside = "/".join(parts[:i]), ".".join(parts[i:])
        names = [
            name
            for name in groups.get(group, [])
            if inside in explained(CONFIGS / group / f"{name}.yaml")
        ]
        if names:
            return f"it is a key of {' or '.join(f'{group}={name}' for name in names)}, which must be given, too"
    if "/" in key:
        return nearest(key, groups)
    if (above := key.rpartition(".")[0]) in keys and not any(
        other.startswith(f"{above}.") for other in keys
    ):
        return f"{above} has no keys: write {above}=..., as --cfg job explains"
    if (was := removed_key(key)) is not None:
        return f"it was removed: {was.instead}"
    if last in _ABSENT and (last != "batch_size" or "batch_tokens" in keys):
        return _ABSENT[last]
    synonym = next(
        (name for name, others in _SYNONYMS.items() if last in others.split() and name in keys),
        None,
    )
    return f"did you mean '{synonym}'?" if synonym else nearest(key, keys)


def explained(path: Path) -> dict[str, str]:
    """Return the comment of every dotted key in a file of configs/. Files of its defaults list are included."""
    text = path.read_text(encoding="utf-8")
    comments: dict[str, str] = {}
    defaults = DEFAULTS.search(text)
    for file, section in re.findall(
        r"^  - (/?\w+)(?:@(\w+))?$", defaults[0] if defaults else "", re.MULTILINE
    ):
        if file != "_self_":
            included = (
                CONFIGS / f"{file[1:]}.yaml" if file[0] == "/" else path.with_name(f"{file}.yaml")
            )
            prefix = "" if section in ("", "_here_") else f"{section}."
            comments |= {f"{prefix}{key}": comment for key, comment in explained(included).items()}
    for line, key in with_keys(DEFAULTS.sub("", text)):
        if key:
            comments.setdefault(key, line.partition(" # ")[2])
    if "name" in comments:
        comments["name"] = text.removeprefix("# ").partition("\n")[0]
    return comments


def with_keys(text: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a YAML file, each with the dotted key that it starts, or ""."""
    above: list[str] = []
    for line in text.split("\n"):
        if found := re.match(r"((?:  )*)(\w+):", line):
            above = [*above[: len(found[1]) // 2], found[2]]
        yield line, ".".join(above) if found else ""


def bare_keys(option: str) -> str:
    """Turn KEY={"Pile-CC": 2} (JSON) into KEY={Pile-CC: 2}, as Hydra's grammar has no quotes around keys."""
    key, _, value = option.partition("=")
    try:
        mapping = json.loads(value) if value.startswith("{") else None
    except ValueError:
        return option
    if not mapping:
        return option
    members = (
        re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", name) + ": " + json.dumps(mapping[name])
        for name in mapping
    )
    return f"{key}={{{', '.join(members)}}}"


def as_text(option: str) -> str:
    """Quote the value of an option that Hydra's grammar cannot read, such as checkpoint=runs/sweep/seed=1.

    Raises:
        UserError: the value begins with a bracket or a quote, so it is no text, or the key is not valid.
    """
    key, _, value = option.partition("=")
    if re.match("['\"[{(]", value) or not re.fullmatch(r"[+~]{0,2}[\w./@-]+", key):
        what = f"cannot read the option {option}: write KEY=VALUE, close brackets and quotes"
        raise UserError(f"{what}, and write a text as 'KEY=\"...\"'")
    return f"{key}={in_hydras_grammar(value)}"
