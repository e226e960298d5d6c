"""States as values: rows of several put into one batch, and rows taken out of one.

A state is None, or a tuple (named or not) of states, of tensors with the batch first, and of tuples of ints with one
for each row. That is all there is to know of it here: a mechanism's own state needs no code for batches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.attention.cache import Room


def cat_states(states: Sequence[Any]) -> Any:
    """One state with the rows of all, in order: of texts that need not be of the same length.

    Tensors of different lengths, (B, H, S, D) with S a cache's columns, get zeros in front: caches end together.

    Raises:
        ValueError: no states, or not all of the same kind.
    """
    if not states:
        raise ValueError("no states to put together: give one at least")
    first = states[0]
    if all(state is None or isinstance(state, Room) for state in states):
        return None  # room belongs to one buffer, and these rows get one of their own
    if len({type(state) for state in states}) > 1:
        raise ValueError(f"states of different kinds: {', '.join(type(state).__name__ for state in states)}")
    if isinstance(first, Tensor):
        return _cat_tensors(states)
    if _per_row(first):
        return tuple(n for state in states for n in state)
    parts = (cat_states(parts) for parts in zip(*states, strict=True))
    return _like(first, parts)


def select_rows(state: Any, rows: Sequence[int]) -> Any:
    """A state with these rows, in this order; a row may come again."""
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
