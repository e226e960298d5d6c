"""Batches of states: combine the rows of several states, or select rows of one.

A state is None, or a tuple (named or not) of states, of tensors whose first dimension is the batch, and of tuples with
an int for each row. A mechanism whose state has this form needs no batching code.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.attention.cache import Room


def cat_states(states: Sequence[Any]) -> Any:
    """Combine the rows of all states, in order. Their texts can have different lengths.

    Cache tensors (B, H, S, D) with different S get zeros in front, because all rows of a cache end together.

    Raises:
        ValueError: there are no states, or they are of different kinds.
    """
    if not states:
        raise ValueError("no states to combine: pass at least one")
    first = states[0]
    if all(state is None or isinstance(state, Room) for state in states):
        return None  # the combined rows get a new buffer
    if len({type(state) for state in states}) > 1:
        raise ValueError(f"states of different kinds: {', '.join(type(state).__name__ for state in states)}")
    if isinstance(first, Tensor):
        return _cat_tensors(states)
    if _per_row(first):
        return tuple(n for state in states for n in state)
    parts = (cat_states(parts) for parts in zip(*states, strict=True))
    return _like(first, parts)


def select_rows(state: Any, rows: Sequence[int]) -> Any:
    """Return a state with these rows, in this order. Rows can be repeated."""
    if isinstance(state, Tensor):
        return state[torch.tensor(rows, device=state.device)]
    if state is None or isinstance(state, Room):
        return None
    if _per_row(state):
        return tuple(state[row] for row in rows)
    return _like(state, (select_rows(part, rows) for part in state))


def state_tensors(state: Any, name: str = "state") -> dict[str, Tensor]:
    """Return all values of a state by name, such as "state.layers.0.log_s"; integers for each row are int64 (B,)."""
    if isinstance(state, Tensor):
        return {name: state}
    if state is None or isinstance(state, Room):
        return {}
    if _per_row(state):
        return {name: torch.tensor(state)}
    return {key: value for part, inner in _named(state, name) for key, value in state_tensors(part, inner).items()}


def with_tensors(state: Any, tensors: Mapping[str, Tensor], name: str = "state") -> Any:
    """Return a state like this one, on the same device, with other values: as `state_tensors` names them."""
    if isinstance(state, Tensor):
        return tensors[name].to(state.device)
    if state is None or isinstance(state, Room):
        return None
    if _per_row(state):
        return tuple(tensors[name].tolist())
    return _like(state, (with_tensors(part, tensors, inner) for part, inner in _named(state, name)))


def _named(state: tuple[Any, ...], name: str) -> Iterator[tuple[Any, str]]:
    """The parts of a state, and their names."""
    fields = getattr(state, "_fields", range(len(state)))
    return ((part, f"{name}.{field}") for part, field in zip(state, fields, strict=True))


def _cat_tensors(tensors: Sequence[Tensor]) -> Tensor:
    if len({x.shape[1:] for x in tensors}) > 1:
        longest = max(x.shape[2] for x in tensors)
        tensors = [pad(x, (0, 0) * (x.dim() - 3) + (longest - x.shape[2], 0)) for x in tensors]
    return torch.cat(list(tensors))


def _per_row(state: tuple[Any, ...]) -> bool:
    return all(isinstance(n, int) for n in state)


def _like(state: Any, parts: Any) -> Any:
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
