"""Settings: frozen pydantic models that refuse unknown keys, and the one-line errors they raise."""

import difflib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from common.removed import removed_key, without_removed

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class UserError(ValueError):
    """A mistake that the user can fix. Commands print one line: what was given, what is allowed, what to do."""

    def __init__(self, message: object) -> None:
        super().__init__(_presentable(str(message)))


_LONGEST_MESSAGE = 1200


def _presentable(text: str) -> str:
    """Make a message safe for a terminal: it can quote untrusted files and names."""
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE // 2]} ... {text[-_LONGEST_MESSAGE // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Settings(BaseModel):
    """Base of every configuration class: frozen, without unknown keys, each field with its docstring.

    The default values of a class with `defaults` are in that file of configs/, and nowhere else: "optim/adamw" is
    configs/optim/adamw.yaml, and "train:eval" is the section eval of configs/train.yaml. A command reads the same file
    for its --help, so it can answer without importing the class, which can take seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    _files: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, defaults: str = "") -> None:
        """`defaults`: the file of this class's default values; the base class keeps its own file."""
        cls._files = (*cls._files, defaults) if defaults else cls._files

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Refuse unknown keys, and add the default values of the fields that are not given."""
        if not isinstance(given, dict):
            return given
        if cls.model_config["extra"] == "forbid":
            given, refused = without_removed(given, cls.model_fields)
            for setting, instead in refused.items():
                raise PydanticCustomError("removed", "{instead}", {"setting": setting, "instead": instead})
        for key in given:
            if key not in cls.model_fields and cls.model_config["extra"] == "forbid":
                hint = {"key": str(key), "hint": nearest(str(key), cls.model_fields)}
                raise PydanticCustomError("unknown_key", "{hint}", hint)
        missing = cls.model_fields.keys() - given.keys()
        if not missing:  # exported models bring complete settings, and no files
            return given
        return {key: value for key, value in cls.default_values().items() if key in missing} | given

    @classmethod
    def default_values(cls) -> dict[str, Any]:
        """Return the values in the class's files, by field."""
        values = {key: value for file in cls._files for key, value in _defaults(file).items()}
        return {key: value for key, value in values.items() if key in cls.model_fields}


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    """Return the values in a file of configs/, or in a section of it, without those that a user must give."""
    file, _, section = name.partition(":")
    values = yaml.safe_load((CONFIGS / f"{file}.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in (values[section] if section else values).items() if value != "???"}


def values_of(group: str, name: str) -> dict[str, Any]:
    """Return the values of a file in a group of configs/, and of those that it is based on; {} if there is no file."""
    if not (name.isidentifier() and (CONFIGS / group / f"{name}.yaml").exists()):
        return {}
    values = dict(_defaults(f"{group}/{name}"))
    bases = [base for base in values.pop("defaults", []) if str(base).isidentifier() and base != "_self_"]
    return {key: value for base in bases for key, value in values_of(group, base).items()} | values


S = TypeVar("S", bound=Settings)


def decode(cls: type[S], raw: Any) -> S:
    """Turn plain data (from Hydra, JSON or a checkpoint) into settings.

    Raises:
        UserError: one line that names the first wrong key, its value, and what is allowed there.
    """
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise UserError(_one_line(raw, error)) from None


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Suggest a valid name: the closest one, or if none is close, those of its section (the first five of many)."""
    names, (section, _, last) = sorted(allowed), given.lower().rpartition(".")
    beside = [name for name in names if name.rpartition(".")[0] == section] or names
    same = [name for name in names if name.rpartition(".")[2] == last]  # "dtype" is runtime.dtype
    begun = [name for name in names if re.search(rf"(^|[._]){re.escape(last)}", name)]  # "lr" is in optim.max_lr
    longer = [name for name in names if name.startswith(given)]  # "gpt2" is gpt2_124m
    for close in (same, longer, _alike(last, beside), begun, _alike(last, names)):
        if last and 0 < len(close) <= 4:
            return f"did you mean {' or '.join(map(repr, close))}?"
    few = len(beside) <= _MOST_NAMES
    return f"allowed: {', '.join(beside)}" if few else f"{len(beside)} are allowed, such as {', '.join(beside[:5])}"


_MOST_NAMES = 20


def _alike(last: str, names: list[str]) -> list[str]:
    """Return the name whose last part is most like a text, if one is."""
    by_last = {name.rpartition(".")[2]: name for name in names}
    return [by_last[each] for each in difflib.get_close_matches(last, by_last, n=1)]


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted key: {"model.n_layer": (12, 24)}. A missing value is None."""
    old, new = flat(before), flat(now)
    old = {
        key: value for key, value in old.items() if key in new or (was := removed_key(key)) is None or was.off != value
    }
    different = {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}
    empty = [key for key, values in different.items() if {} in values]
    filled = {key for key in empty if any(other.startswith(f"{key}.") for other in different)}  # its parts say so
    return {key: values for key, values in different.items() if key not in filled}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}, "c": {}} -> {"a.b": 1, "c": {}}."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _one_line(raw: Any, error: ValidationError) -> str:
    first, *others = error.errors()
    keys = _path_in(raw, first["loc"], first["type"] == "missing")
    path = ".".join(keys)
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "unknown_key":
        return f"unknown config key '{'.'.join([*keys, first['ctx']['key']])}': {first['msg']}{more}"
    if first["type"] == "removed":
        return f"config {'.'.join([*keys, first['ctx']['setting']])} was removed: {first['msg']}{more}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        return f"config {'.'.join(keys[:-1])} has too few values: it needs {first['loc'][-1] + 1} or more{more}"
    if first["type"] == "missing":
        return f"config key '{path}' is missing: give it a value, as in {path}=...{more}"
    if first["type"] == "union_tag_not_found":
        return f"config key '{path}.name' is missing: give it a value{more}"
    if first["type"] == "union_tag_invalid":
        tag, tags = first["ctx"]["tag"], first["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f"config {path}.name={tag!r} does not exist: {nearest(tag, tags)}{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("list_type", "tuple_type"):
        message = f"give several values in brackets, such as [{first['input']},...]"
    if first["type"] in ("model_type", "model_attributes_type"):
        message = f"it has keys of its own: write {path}.KEY=VALUE (--help shows them)"
    given = "" if isinstance(first["input"], dict) else f"={first['input']!r}"
    return f"config {path}{given}: {message}{more}" if path else f"{message}{more}"


def _path_in(raw: Any, loc: tuple[int | str, ...], missing: bool) -> list[str]:
    """Return the keys of `loc` that the user wrote, or left out, without pydantic's names of union members."""
    path = []
    for i, part in enumerate(loc):
        inside: Any = raw if isinstance(raw, dict) else dict(enumerate(raw)) if isinstance(raw, list | tuple) else {}
        if part in inside:
            path.append(str(part))
            raw = inside[part]
        elif missing and i == len(loc) - 1:
            path.append(str(part))
    return path


def variant_names(cls: Any) -> tuple[str, ...]:
    """Return the values of a union member's `name: Literal[...]`, which selects it."""
    field = cls.model_fields.get("name") if isinstance(cls, type) and issubclass(cls, Settings) else None
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
