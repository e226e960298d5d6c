"""Batches of states: combine the rows of several states, or select rows of one.

A state is None, or a tuple (named or not) of states, of tensors whose first dimension is the batch, and of tuples with
an int for each row. A mechanism whose state has this form needs no batching code.
"""

from collections.abc import Sequence
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


def _cat_tensors(tensors: Sequence[Tensor]) -> Tensor:
    if len({x.shape[1:] for x in tensors}) > 1:
        longest = max(x.shape[2] for x in tensors)
        tensors = [pad(x, (0, 0) * (x.dim() - 3) + (longest - x.shape[2], 0)) for x in tensors]
    return torch.cat(list(tensors))


def _per_row(state: tuple[Any, ...]) -> bool:
    return all(isinstance(n, int) for n in state)


def _like(state: Any, parts: Any) -> Any:
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
