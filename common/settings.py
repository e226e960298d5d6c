"""Settings: frozen pydantic models that refuse unknown keys, and the one-line errors they raise."""

import difflib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from common.config_files import config_file
from common.memory import is_out_of_memory

JsonDict = dict[str, Any]
"""A JSON object, or a composed configuration."""


_LONGEST_MESSAGE = 1200


class UserError(ValueError):
    """A mistake that the user can fix.

    Its message is one line: what was given, what is allowed, what to do.
    """

    def __init__(self, message: object) -> None:
        text = escape_controls(str(message))
        half = _LONGEST_MESSAGE // 2
        is_long = len(text) > _LONGEST_MESSAGE
        super().__init__(f"{text[:half]} ... {text[-half:]}" if is_long else text)


def line_for(error: BaseException) -> str | None:
    """Return one line for an error that a user can mend, such as a lack of memory; None: a bug."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if is_out_of_memory(error):
        return "out of memory: use smaller batches, shorter texts or a smaller model"
    if "no kernel image is available" in str(error):
        return (
            "this torch has no kernels for this GPU: scripts/doctor.py says what to install; or "
            "use the CPU"
        )
    if isinstance(error, UserError | OSError):
        return " ".join(str(error).split())
    return None


def escape_controls(text: str, whitespace: str = "") -> str:
    """Return a text of an untrusted file or name as every terminal can show it.

    Control characters are escaped, also ends of lines, unless they are in `whitespace`.
    """
    hidden = {c for c in text if not c.isprintable() and c not in whitespace}
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in hidden})


def home_expanded(path: str) -> str:
    """Return a path with the home directory for its ~.

    Raises:
        ValueError: it has a control character, or is a URL.
    """
    # A Path keeps one of the two slashes in s3://.
    if re.search(r"[\x00-\x1f\x7f]|^\w+:/(?!/)", path):
        raise ValueError(
            "it has a control character, such as the end of a line, or names a server: give a "
            "plain path"
        )
    return os.path.expanduser(path)


PathText = Annotated[str, AfterValidator(home_expanded)]
"""A path that stays a text, because it may be a pattern, or a name elsewhere."""


class Settings(BaseModel):
    """Base of every configuration class, which is frozen and refuses unknown keys.

    The default values of a class with `defaults` are in that file of configs/ alone: "optim/adamw"
    is configs/optim/adamw.yaml, and "train:eval" is the section eval of configs/train.yaml. --help
    reads the same file, because importing the class can take seconds.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True
    )
    _file: ClassVar[str] = ""

    def __init_subclass__(cls, defaults: str = "") -> None:
        """`defaults`: the file of this class's default values."""
        cls._file = defaults or cls._file

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        """Refuse unknown keys, and add the default values of missing fields."""
        if not isinstance(raw, dict):
            return raw
        unknown = [str(key) for key in raw if key not in cls.model_fields]
        if unknown and cls.model_config["extra"] == "forbid":
            hint = suggest_name(unknown[0], cls.model_fields)
            raise PydanticCustomError(
                "unknown_key", "unknown key '{key}': {hint}", {"key": unknown[0], "hint": hint}
            )
        if raw.keys() >= cls.model_fields.keys():
            return raw  # an exported model has complete settings, and no files
        return cls.default_values() | raw

    @field_validator("*")
    @classmethod
    def _check(cls, value: Any) -> Any:
        """Expand ~ in paths and lists of paths; refuse integers of more than 63 bits."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("give less than 9223372036854775808")
        if isinstance(value, list) and value and isinstance(value[0], Path):
            return [Path(home_expanded(str(path))) for path in value]
        if isinstance(value, Path):
            return Path(home_expanded(str(value)))
        return value

    @classmethod
    def default_values(cls) -> JsonDict:
        """Return the values in the class's file, by field."""
        file, _, section = cls._file.partition(":")
        if not file:
            return {}
        values = config_file(file).values
        if section:
            values = values[section]
        return {key: value for key, value in values.items() if key in cls.model_fields}


def section(raw: Any, key: str) -> JsonDict:
    """Return a section of JSON of any origin; {} if there is none."""
    value = raw.get(key) if isinstance(raw, dict) else None
    return value if isinstance(value, dict) else {}


S = TypeVar("S", bound=Settings)


def decode(cls: type[S], raw: Any, shown: Callable[[Any], str] = repr) -> S:
    """Turn plain data (from Hydra, JSON or a checkpoint) into settings.

    Args:
        shown: writes a wrong value.

    Raises:
        UserError: one line that names the first wrong key, its value, and what is allowed there.
    """
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        raise UserError(_refusal(raw, error.errors(), shown)) from None


_SIMILAR = 0.75
"""Likeness, as difflib measures it, of names that differ by a typing error."""


def suggest_name(wrong: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Suggest valid names for a wrong one: those that begin or end alike, or one that is a typing
    error away. If there are none, list all.

    For example, runtime.dtype ends like dtype. `prefix` comes before a suggested name.
    """
    names = sorted(allowed)
    # "lr" ends "optim.lr" and "max_lr"; a typing error is found by likeness.
    end = re.compile(rf"(^|[._]){re.escape(wrong.rpartition('.')[2])}$")
    alike = []
    if wrong:
        alike = [name for name in names if end.search(name) or name.startswith(wrong)]
    close = alike[:4] or difflib.get_close_matches(wrong, names, n=1, cutoff=_SIMILAR)
    if close:
        return f"did you mean {' or '.join(repr(prefix + name) for name in close)}?"
    if len(names) > 30:
        return f"{len(names)} are allowed, such as {', '.join(names[:5])}"
    return f"allowed: {', '.join(names)}"


def find_differences(before: JsonDict, now: JsonDict) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted key: {"model.n_layer": (12, 24)}.

    A missing value is None. A section that is empty on one side is left out: its keys say so.
    """
    old = flatten(before)
    new = flatten(now)
    different = {}
    for key in sorted(old | new):
        values = (old.get(key), new.get(key))
        has_keys = {} in values and any(longer.startswith(f"{key}.") for longer in old | new)
        if values[0] != values[1] and not has_keys:
            different[key] = values
    return different


def flatten(tree: JsonDict, prefix: str = "") -> JsonDict:
    """{"a": {"b": 1}, "c": {}} -> {"a.b": 1, "c": {}}."""
    values: JsonDict = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            values |= flatten(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def _refusal(raw: Any, errors: list[Any], shown: Callable[[Any], str]) -> str:
    """Return pydantic's messages on the first wrong key, one for each type that it may have."""
    path = _path_in(raw, errors[0])
    key_errors = [error for error in errors if _path_in(raw, error) == path]
    messages = dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in key_errors)
    message = " or ".join(messages)
    if not path:
        return message
    wrong = errors[0]["input"]
    value = "" if isinstance(wrong, dict) else f"={shown(wrong)}"
    n_more = len(errors) - len(key_errors)
    more = f" (and {n_more} more)" if n_more else ""
    return f"config {path}{value}: {message}{more}"


def _path_in(value: Any, error: Any) -> str:
    """Return the dotted key of an error, without pydantic's names of union members."""
    path = []
    for i, part in enumerate(error["loc"]):
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        members = value if isinstance(value, dict) else {}
        is_missing = error["type"] == "missing" and i == len(error["loc"]) - 1
        if part in members or is_missing:
            path.append(str(part))
            value = members.get(part)
    return ".".join(path)


def variant_names(cls: Any) -> tuple[str, ...]:
    """Return the values of a union member's `name: Literal[...]`, which selects it."""
    if not (isinstance(cls, type) and issubclass(cls, Settings) and "name" in cls.model_fields):
        return ()
    return get_args(cls.model_fields["name"].annotation)
