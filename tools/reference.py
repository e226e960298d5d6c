"""Writes docs/configuration.md: every key of the commands that Hydra composes, from the settings and from configs/.

python -m tools.reference
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

import yaml

from cli import compose, to_dict
from cli.options import groups_of
from common.settings import CONFIGS, Settings, variant_names

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
COMMANDS = {
    "train": ("train.py", "trainer.config:TrainConfig"),
    "eval": ("eval.py", "inference.evaluate:EvaluateConfig"),
    "sample": ("sample.py", "inference.sample:SampleConfig"),
    "prepare": ("scripts/prepare_data.py", "data.prepare.dataset:PrepareConfig"),
    "plan": ("scripts/plan.py", "tools.plan.plan:PlanConfig"),
    "serve": ("scripts/serve.py", "inference.server.config:ServeConfig"),
    "lm_eval": ("scripts/lm_eval.py", "inference.harness:HarnessConfig"),
}
"""Each configuration's command, and the class of its settings."""
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_HEAD = """# Configuration

Every key of every command with its type, its default and its meaning. A key is set by `KEY=VALUE`, such as
`optim.max_lr=1e-3`, and a group's member by `GROUP=NAME`, such as `model/attention=softmax`; its keys then have its
defaults. A model's file in configs/model says which attention, block and position it has. Parts that several commands
share are described once. Other scripts list their keys with `--help`.

`python -m tools.reference` writes this page from the settings themselves.
"""


def reference() -> str:
    """Return the page, in Markdown."""
    lines, shown = [_HEAD], set[type[Settings]]()
    for root, (command, settings) in COMMANDS.items():
        cls: type[Settings] = resolve_name(settings)
        defaults = to_dict(compose(root, []), complete=False)
        lines += [f"\n## {command}\n", *_groups(root), *_tables(cls, "", defaults, shown)]
    return "\n".join(lines) + "\n"


def _groups(root: str) -> Iterator[str]:
    """Yield the table of a command's groups; plan.py's are those of train.py."""
    if root == "plan" or not (groups := groups_of(root)):
        return
    chosen = {
        group: name
        for one in yaml.safe_load((CONFIGS / f"{root}.yaml").read_text(encoding="utf-8"))["defaults"]
        if isinstance(one, dict)
        for group, name in one.items()
    }
    yield from ("| group | default | members |", "|---|---|---|")
    for group, names in groups.items():
        default = chosen.get(group) or ("the model's" if group.startswith("model/") else "none")
        yield f"| `{group}` | {default} | {', '.join(names)} |"
    yield ""


def _tables(cls: type[Settings], prefix: str, defaults: Mapping[str, Any], shown: set[type[Settings]]) -> Iterator[str]:
    """Yield the table of a class's own keys, then the tables of its parts that have not been shown."""
    parts = {key: parts for key, field in cls.model_fields.items() if (parts := _parts(field.annotation))}
    schema = cls.model_json_schema()["properties"]
    if keys := [key for key in schema if key not in parts and key != "name"]:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for key in keys:
        default = f"`{json.dumps(value).strip(chr(34))}`" if (value := defaults.get(key, "???")) != "???" else ""
        text = " ".join(schema[key]["description"].split())
        yield (
            "| "
            + " | ".join(c.replace("|", "\\|") for c in (f"`{prefix}{key}`", _type(schema[key]), default, text))
            + " |"
        )
    for key, members in parts.items():
        for member in (member for member in members if member not in shown):
            shown.add(member)
            group = f"{prefix}{key}"
            names = [f"`{group.replace('.', '/')}={name}`" for name in variant_names(member)]
            given = defaults.get(key) or {}
            chosen = given if given.get("name") in (None, *variant_names(member)) else member.default_values()
            doc = " ".join((member.__doc__ or "").split())
            yield f"\n### {' or '.join(names) or f'`{group}`'}\n\n{doc}\n"
            yield from _tables(member, f"{group}.", chosen, shown)


def _parts(annotation: Any) -> list[type[Settings]]:
    """Return the classes of settings that a field's value may have, without those of a list's items."""
    found = [annotation, *get_args(annotation)]
    return [cls for cls in found if isinstance(cls, type) and issubclass(cls, Settings)]


def _type(schema: Mapping[str, Any]) -> str:
    """Return a field's type in words: "integer, 1 to 1,024, or null"."""
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(_type(item) for item in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema or "discriminator" in schema:
        return "settings"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    limits = [f"{words} {limit:,}" for key, words in _LIMITS.items() if abs(limit := schema.get(key, 10**6)) < 10**6]
    return ", ".join([schema.get("format", schema.get("type", "any")), *limits])


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
