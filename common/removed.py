"""Removed keys and names: stored configurations may have them, and users may still type them."""

from collections.abc import Collection
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A removed key."""

    off: Any
    """The value with which it did nothing, which is ignored. Any other value is refused."""
    instead: str
    """What to do now."""


KEYS: dict[str, Removed] = {
    "model.attention.norm": Removed(False, "leave it out, or use model.attention.qk_norm=true"),
    "batch_doublings": Removed([], "the batch has one size now: leave batch_doublings out"),
    "data.carry_state": Removed(
        False, "sequences start without a state now: leave data.carry_state out"
    ),
    "dedup": Removed(
        "none", "drop equal documents before preparing; equal texts always fall into one split"
    ),
}
"""By the end of their dotted key."""

VALUES: dict[str, dict[str, str]] = {
    "model.attention.decay": dict.fromkeys(("feature", "fixed"), "use model.attention.decay=head"),
    "runtime.on_nonfinite": {"rollback": "write runtime.on_nonfinite=halt or skip"},
}
"""Values that keys no longer take, by the end of the key, with what to do now."""

_SIZES = ("1m", "10m", "40m", "125m", "350m", "1b")
FILES: dict[str, dict[str, str]] = {
    "model": {
        **{f"log_gpt2_{size}": f"write model=flagship_{size}" for size in _SIZES},
        **{f"gpt_{size}": f"write model=softmax_{size}" for size in _SIZES},
        **{f"log_gpt_{size}": f"write model=heinsen_{size}" for size in ("1m", "125m")},
        "log_gpt2_hybrid_125m": "write model=flagship_hybrid_125m",
        "log_gpt_mlp_124m": "write model=heinsen_125m model/block=mlp model.n_layer=12",
    },
    "data": dict.fromkeys(
        ("mqar", "induction", "selective_copy", "passkey"),
        "write texts of your own to a file of JSON lines, and prepare it with data=jsonl",
    ),
}
"""Names of files in configs/, by their group, with what to do now."""


def removed_key(key: str) -> Removed | None:
    """Return what a dotted key was, or None if it was not removed."""
    return next((was for name, was in KEYS.items() if f".{key}".endswith(f".{name}")), None)


def without_removed(
    given: dict[str, Any], fields: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a section without the removed keys that did nothing, and what to do for each "key=value" that is refused.

    `fields`: the keys that the section has now.
    """
    keys = {name.rpartition(".")[2]: was for name, was in KEYS.items()}
    values = {name.rpartition(".")[2]: was for name, was in VALUES.items()}
    gone = {key: keys[key] for key in given if key in keys and key not in fields}
    refused = {
        f"{key}={given[key]}": was.instead for key, was in gone.items() if given[key] != was.off
    }
    for key, value in given.items():
        if isinstance(value, str) and value in values.get(key, {}):
            refused[f"{key}={value}"] = values[key][value]
    return {key: value for key, value in given.items() if key not in gone}, refused
