"""States as trees: combine the rows of several, select rows of one, name their tensors, or tell
their size.

A state is a tree of tuples. Its leaves are tensors whose first dimension is the batch, tuples with
an int for each row, None, and what is not part of the value. A mechanism whose state has this form
needs no batching code.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import (
    KeyPath,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
)


def _is_per_row(x: Any) -> bool:
    return type(x) is tuple and all(isinstance(n, int) for n in x)


def cat_states(states: Sequence[Any]) -> Any:
    """Combine the rows of all states, in order. Their texts can have different lengths.

    Cache tensors (B, H, S, D) with different S get zeros in front, because all rows of a cache end
    together.
    """
    return tree_map(_cat, *states, is_leaf=_is_per_row)


def _cat(*leaves: Any) -> Any:
    if all(isinstance(x, Tensor) for x in leaves):
        if len({x.shape[1:] for x in leaves}) == 1:
            return torch.cat(leaves)
        longest = max(x.shape[2] for x in leaves)
        padded = []
        for x in leaves:
            padded.append(pad(x, (0, 0) * (x.dim() - 3) + (longest - x.shape[2], 0)))
        return torch.cat(padded)
    if all(isinstance(x, tuple) for x in leaves):
        return sum(leaves, ())
    return None  # a buffer is not part of the value: the combined rows get a new one


def select_rows(state: Any, rows: Sequence[int]) -> Any:
    """Return a state with these rows, in this order. Rows can be repeated."""

    def select(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[torch.tensor(rows, device=x.device)]
        if isinstance(x, tuple):
            return tuple(x[row] for row in rows)
        return None

    return tree_map(select, state, is_leaf=_is_per_row)


def _name(path: KeyPath) -> str:
    return ".".join(str(getattr(key, "name", None) or getattr(key, "idx", None)) for key in path)


def name_tensors(state: Any) -> dict[str, Tensor]:
    """The tensors of a state, and the ints of its rows as int64 (B,), named by their paths in it,
    such as layers.0."""
    tensors = {}
    for path, x in tree_flatten_with_path(state, is_leaf=_is_per_row)[0]:
        if isinstance(x, Tensor):
            tensors[_name(path)] = x
        elif isinstance(x, tuple) and x:
            tensors[_name(path)] = torch.tensor(x)
    return tensors


def restore_state(like: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a state of the structure of `like` with `tensors`, by name."""

    def value(path: KeyPath, x: Any) -> Any:
        if isinstance(x, Tensor):
            return tensors[_name(path)]
        if isinstance(x, tuple):
            return tuple(tensors[_name(path)].tolist())
        return None

    return tree_map_with_path(value, like, is_leaf=_is_per_row)


def state_bytes(state: Any) -> int:
    """Bytes of all tensors of a state, excluding token counts and a cache's spare capacity."""
    return sum(x.nbytes for x in tree_leaves(state) if isinstance(x, Tensor))
