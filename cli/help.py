"""--help: what a command does, with examples, and its keys as its YAML file explains them."""

import re
from collections.abc import Iterator
from textwrap import fill

from cli.compose import CONFIGS


def help_of(config_name: str) -> str:
    """Return the text of --help, which comes from configs/<config_name>.yaml: its first comment, groups and keys."""
    comment, _, rest = (CONFIGS / f"{config_name}.yaml").read_text(encoding="utf-8").partition("\n\n")
    header = re.sub("^# ?", "", comment, flags=re.MULTILINE)
    script = re.findall(r"^ *python (\S+)", header, re.MULTILINE)[0]
    keys = re.sub(r"^defaults:\n( .*\n)*", "", rest).split("\n")
    for file, section in re.findall(r"^  - (\w+)@(\w+)$", rest, re.MULTILINE):
        of_file = (CONFIGS / f"{file}.yaml").read_text(encoding="utf-8").split("\n")[1:]
        keys += [f"{section}:", *(f"  {line}" for line in of_file if line)]
    parts = [
        header,
        "\n".join(["Groups (GROUP=NAME):", *_groups(config_name)]) if config_name in ("train", "prepare") else "",
        "\n".join(["Keys (KEY=VALUE, SECTION.KEY=VALUE):", *filter(None, keys)]),
        f"All keys with their values: --cfg job. Tracebacks: --debug. In bash, completion with the Tab key:\n"
        f'  eval "$(python {script} -sc install=bash)"',
    ]
    return "\n\n".join(filter(None, parts))


def _groups(config_name: str) -> Iterator[str]:
    for folder in sorted({path.parent for path in CONFIGS.glob("*/**/*.yaml")}):
        group = str(folder.relative_to(CONFIGS))
        if (group in ("data", "tokenizer")) == (config_name == "prepare"):
            names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
            yield fill(f"{group}: {names}", 120, subsequent_indent="  ", break_on_hyphens=False)
