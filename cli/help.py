"""--help: what a command is for, with examples, and its keys as its YAML explains them."""

import re
from collections.abc import Iterator

from omegaconf import OmegaConf

from cli.compose import CONFIGS
from common.command import drop_output


def print_help(config_name: str) -> None:
    """Print what `help_of` has."""
    try:
        print(help_of(config_name), flush=True)
    except BrokenPipeError:
        drop_output()


def help_of(config_name: str) -> str:
    """What a command is for, examples, its groups, and its keys as configs/<config_name>.yaml explains them."""
    lines = (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8").splitlines()
    examples = [line.split() for line in _header(config_name).splitlines() if line.strip().startswith("python ")]
    example = examples[0][1]
    first, last = lines.index("") + 1, lines.index("hydra:")
    own_groups = {"train": _groups() - {"data", "tokenizer"}, "plan": set(), "prepare": {"data", "tokenizer"}}
    groups = [f"{group}: {', '.join(_members(group))}" for group in sorted(own_groups.get(config_name, set()))]
    parts = [
        _header(config_name),
        "\n".join(["Groups (GROUP=NAME):", *groups]) if groups else "",
        "\n".join(["Keys (KEY=VALUE):", *_folded(lines[first:last])]),
        f"All keys with their values: --cfg job. Tracebacks: --debug. In bash, completion with the Tab key:\n"
        f'  eval "$(python {example} -sc install=bash)"',
    ]
    return "\n\n".join(part for part in parts if part)


def _header(config_name: str) -> str:
    return str(OmegaConf.load(CONFIGS / f"{config_name}.yaml").hydra.help.header).rstrip()


def _groups() -> set[str]:
    return {str(path.parent.relative_to(CONFIGS)) for path in CONFIGS.glob("*/**/*.yaml")}


def _members(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _folded(lines: list[str]) -> Iterator[str]:
    """Lines of a YAML, with the keys of a section beside its name: runtime.device, .dtype."""
    section = ""
    for line in filter(None, [*lines, "end"]):
        inner = re.match(r"  (\w+):", line)
        if inner:
            section += f", .{inner[1]}"
            continue
        if section:
            yield section.replace(", ", "", 1)
        section = line.rstrip(":") if line.endswith(":") else ""
        if not section and line != "end":
            yield line
