"""Settings: frozen pydantic models that refuse unknown keys, and the one-line errors they raise."""

import difflib
import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from common.memory import out_of_memory
from common.removed import removed_key, without_removed

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

JsonDict = dict[str, Any]
"""A JSON object, or a composed configuration."""


class UserError(ValueError):
    """A mistake that the user can fix. Commands print one line: what was given, what is allowed, what to do.

    key: the dotted key of a setting whose value is not allowed; "" for other mistakes.
    """

    def __init__(self, message: object, key: str = "") -> None:
        super().__init__(_presentable(str(message)))
        self.key = key


def line_for(error: BaseException) -> str | None:
    """Return one line for an error that a user can mend: a mistake, a file, a lack of memory. None: a bug."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if out_of_memory(error):
        return "out of memory: use smaller batches, shorter texts or a smaller model"
    if str(error).startswith("Symlink loop"):  # of Path.resolve, before Python 3.13
        return f"{error}: these links lead to no file or folder"
    if "no kernel image is available" in str(error):
        return "this torch has no kernels for this GPU: scripts/doctor.py says what to install; or use the CPU"
    return " ".join(str(error).split()) if isinstance(error, UserError | OSError) else None


_LONGEST_MESSAGE = 1200


def _presentable(text: str) -> str:
    """Make a message safe for a terminal: it can quote untrusted files and names."""
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE // 2]} ... {text[-_LONGEST_MESSAGE // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def home_expanded(path: str) -> str:
    """Return a path with the home directory for its ~.

    Raises:
        ValueError: it has a control character, or is a URL.
    """
    if re.search(r"[\x00-\x1f\x7f]|^\w+:/(?!/)", path):  # a Path has one slash of the two in s3://
        raise ValueError(
            "it has a control character, such as the end of a line, or names a server: give a plain path"
        )
    return os.path.expanduser(path)


PathText = Annotated[str, AfterValidator(home_expanded)]
"""A path that stays a text, because it may be a pattern, or a name elsewhere."""


class Settings(BaseModel):
    """Base of every configuration class: frozen, without unknown keys, each field with its docstring.

    The default values of a class with `defaults` are in that file of configs/, and nowhere else: "optim/adamw" is
    configs/optim/adamw.yaml, and "train:eval" is the section eval of configs/train.yaml. A command reads the same file
    for its --help, so it can answer without importing the class, which can take seconds.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True
    )
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
                raise PydanticCustomError(
                    "removed", "{instead}", {"setting": setting, "instead": instead}
                )
            if unknown := [str(key) for key in given if key not in cls.model_fields]:
                hint = {"key": unknown[0], "hint": nearest(unknown[0], cls.model_fields)}
                raise PydanticCustomError("unknown_key", "{hint}", hint)
        for key, value in given.items():
            if isinstance(value, bool) and re.search(
                r"\b(int|float)\b", str(cls.model_fields.get(key))
            ):
                given = given | {key: str(value).lower()}  # pydantic reads true as 1
        missing = cls.model_fields.keys() - given.keys()
        if not missing:  # exported models bring complete settings, and no files
            return given
        return {key: value for key, value in cls.default_values().items() if key in missing} | given

    @field_validator("*")
    @classmethod
    def _check(cls, value: Any) -> Any:
        """Read paths as a shell does, also those in a list; refuse integers of more than 63 bits."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("give less than 9223372036854775808")
        if isinstance(value, list) and value and isinstance(value[0], Path):
            return [Path(home_expanded(str(path))) for path in value]
        return Path(home_expanded(str(value))) if isinstance(value, Path) else value

    @classmethod
    def default_values(cls) -> JsonDict:
        """Return the values in the class's files, by field."""
        values = {key: value for file in cls._files for key, value in _defaults(file).items()}
        return {key: value for key, value in values.items() if key in cls.model_fields}


@functools.cache
def _defaults(name: str) -> JsonDict:
    """Return the values in a file of configs/, or in a section of it, without those that a user must give."""
    file, _, section = name.partition(":")
    values = yaml.safe_load((CONFIGS / f"{file}.yaml").read_text(encoding="utf-8"))
    return {
        key: value
        for key, value in (values[section] if section else values).items()
        if value != "???"
    }


def values_of(group: str, name: str) -> JsonDict:
    """Return the values of a file in a group of configs/, and of those that it is based on; {} if there is no file."""
    if not (name.isidentifier() and (CONFIGS / group / f"{name}.yaml").exists()):
        return {}
    values = dict(_defaults(f"{group}/{name}"))
    found: JsonDict = {}
    for base in values.pop("defaults", []):
        if str(base).isidentifier() and base != "_self_":
            found |= values_of(group, base)
    return found | values


S = TypeVar("S", bound=Settings)


def decode(cls: type[S], raw: Any) -> S:
    """Turn plain data (from Hydra, JSON or a checkpoint) into settings.

    Raises:
        UserError: one line that names the first wrong key, its value, and what is allowed there.
    """
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise _refusal(raw, error.errors()) from None


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Suggest a valid name: the closest one, or if none is close, those of its section (the first five of many)."""
    names, (section, _, last) = sorted(allowed), given.lower().rpartition(".")
    beside = [name for name in names if name.rpartition(".")[0] == section] or names
    same = [name for name in names if name.rpartition(".")[2] == last]  # "dtype" is runtime.dtype
    begun = [
        name for name in names if re.search(rf"(^|[._]){re.escape(last)}", name)
    ]  # "lr" is in optim.max_lr
    longer = [name for name in names if name.startswith(given)]  # "gpt2" is gpt2_124m
    for close in (same, longer, _alike(last, beside), begun, _alike(last, names)):
        if last and 0 < len(close) <= 4:
            return f"did you mean {' or '.join(map(repr, close))}?"
    if len(beside) > 20:
        return f"{len(beside)} are allowed, such as {', '.join(beside[:5])}"
    return f"allowed: {', '.join(beside)}"


def _alike(last: str, names: list[str]) -> list[str]:
    """Return the name whose last part is most like a text, if one is."""
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}  # the first of equal ones
    return [by_last[each] for each in difflib.get_close_matches(last, by_last, n=1)]


def differences(before: JsonDict, now: JsonDict) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted key: {"model.n_layer": (12, 24)}. A missing value is None."""
    old, new = flat(before), flat(now)
    for key in old.keys() - new.keys():
        was = removed_key(key)
        if was is not None and was.off == old[key]:
            del old[key]
    different = {
        key: (old.get(key), new.get(key))
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
    }
    empty = [key for key, values in different.items() if {} in values]
    filled = {
        key for key in empty if any(other.startswith(f"{key}.") for other in different)
    }  # its parts say so
    return {key: values for key, values in different.items() if key not in filled}


def flat(tree: JsonDict, prefix: str = "") -> JsonDict:
    """{"a": {"b": 1}, "c": {}} -> {"a.b": 1, "c": {}}."""
    found: JsonDict = {}
    for key, value in tree.items():
        found |= (
            flat(value, f"{prefix}{key}.")
            if isinstance(value, dict) and value
            else {f"{prefix}{key}": value}
        )
    return found


_SENTENCES = {
    "missing": "config key '{path}' is missing: give it a value, as in {path}=...",
    "model": "config {path}{given}: it has keys of its own: give values to them, as in {path}.KEY",
    "removed": "config {within}{setting} was removed: {instead}",
    "union_tag_invalid": "config {path}.name={tag!r} does not exist: {nearest}",
    "union_tag_not_found": "config key '{path}.name' is missing: give it a value",
    "unknown_key": "unknown config key '{within}{key}': {hint}",
    "value_error": "config {path}{given}: {error}",
}
"""What is said of an error of pydantic's, by its type or the first word of that; of others, what a value may be."""

_ALLOWED = {
    "bool": "true or false",
    "dict": "pairs in braces, such as {{a: 1, b: 2}}",
    "finite": "a finite number",
    "float": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "list": "several values in brackets, such as [{input},...]",
    "literal": "{expected}",
    "path": "a path",
    "string": "a text",
    "string_too_short": "a text of {min_length} or more characters",
    "too_long": "at most {max_length} values",
    "too_short": "{min_length} or more values",
    "tuple": "several values in brackets, such as [{input},...]",
}
"""What a value may be, by the type of an error or the first word of that."""


def _refusal(raw: Any, errors: list[Any]) -> UserError:
    """Return the error for a user. Of a key that takes one thing or another, the innermost wrong value is named."""
    paths = [_path_in(raw, error["loc"], error["type"] == "missing") for error in errors]
    within = [path for path in paths if path[: len(paths[0])] == paths[0]]
    keys = max(within, key=len)
    here = [error for error, path in zip(errors, paths, strict=True) if path == keys]
    more = f" (and {len(errors) - len(here)} more)" if len(errors) > len(here) else ""
    is_known = here[0]["type"] not in ("unknown_key", "removed")
    return UserError(_sentence(keys, here) + more, ".".join(keys) if is_known else "")


def _sentence(keys: list[str], errors: list[Any]) -> str:
    first, path = errors[0], ".".join(keys)
    kind, names = first["type"], first.get("ctx", {})
    if kind == "missing" and isinstance(first["loc"][-1], int):
        return f"config {'.'.join(keys[:-1])} has too few values: it needs {first['loc'][-1] + 1} or more"
    if not path and kind in ("value_error", "model_type"):
        return str(names.get("error", "it must be an object with keys"))
    if kind == "union_tag_invalid":
        names = names | {
            "nearest": nearest(names["tag"], names["expected_tags"].replace("'", "").split(", "))
        }
    allowed = " or ".join(dict.fromkeys(map(_allowed, errors)))
    given = "" if isinstance(first["input"], dict) else f"={_as_typed(first['input'])}"
    general = _SENTENCES.get(kind.partition("_")[0], "config {path}{given}: give {allowed}")
    sentence = _SENTENCES.get(kind, general)
    return sentence.format(
        path=path, within=f"{path}." if path else "", given=given, allowed=allowed, **names
    )


def _allowed(error: Any) -> str:
    kind = error["type"]
    text = _ALLOWED.get(kind) or _ALLOWED.get(kind.partition("_")[0], "another value")
    return text.format(input=_as_typed(error["input"]), **error.get("ctx", {}))


def _as_typed(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def _path_in(raw: Any, loc: tuple[int | str, ...], missing: bool) -> list[str]:
    """Return the keys of `loc` that the user wrote, or left out, without pydantic's names of union members."""
    path = []
    for i, part in enumerate(loc):
        inside: Any = dict(enumerate(raw)) if isinstance(raw, list | tuple) else raw
        inside = inside if isinstance(inside, dict) else {}
        if part in inside or (missing and i == len(loc) - 1):
            path.append(str(part))
            raw = inside.get(part)
    return path


def variant_names(cls: Any) -> tuple[str, ...]:
    """Return the values of a union member's `name: Literal[...]`, which selects it."""
    if not (isinstance(cls, type) and issubclass(cls, Settings) and "name" in cls.model_fields):
        return ()
    return get_args(cls.model_fields["name"].annotation)
