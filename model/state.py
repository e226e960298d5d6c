"""States as trees: combine the rows of several, select rows of one, name their tensors, or tell their size.

A state is None, or a tuple (named or not) of states, of tensors whose first dimension is the batch, and of tuples with
an int for each row. A mechanism whose state has this form needs no batching code.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from model.attention.base import Attention
from model.attention.cache import KVCache, Room, SparseCache
from model.ops.sparse_attention.patterns import Pattern, needed_keys


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


def select_rows(state: Any, rows: Sequence[int] | slice) -> Any:
    """Return a state with these rows, in this order. Rows can be repeated; those of a slice are views."""
    if isinstance(state, Tensor):
        return state[rows if isinstance(rows, slice) else torch.tensor(rows, device=state.device)]
    if state is None or isinstance(state, Room):
        return None
    if _per_row(state):
        return state[rows] if isinstance(rows, slice) else tuple(state[row] for row in rows)
    return _like(state, (select_rows(part, rows) for part in state))


class StateTensor(NamedTuple):
    """A tensor of a state, or the ints of its rows."""

    value: Tensor
    """Ints are int64 (B,)."""
    cache: str | None
    """The name of the cache of which this has columns, (B, H, S, D) or (B, 1, S); None: its shape never changes."""


def tensors_of(state: Any, name: str = "", cache: str | None = None) -> Iterator[tuple[str, StateTensor]]:
    """Yield the tensors and counts of a state, named by their paths in it, such as layers.0.log_s."""
    if isinstance(state, Tensor):
        yield name, StateTensor(state, cache)
    elif isinstance(state, tuple) and state and _per_row(state):
        yield name, StateTensor(torch.tensor(state), None)
    elif isinstance(state, tuple):
        cache = name if isinstance(state, KVCache | SparseCache) else None
        for key, part in zip(getattr(state, "_fields", range(len(state))), state, strict=True):
            yield from tensors_of(part, f"{name}.{key}" if name else str(key), cache)


def restored(like: Any, tensors: Mapping[str, Tensor], name: str = "") -> Any:
    """The state whose tensors have these names and values; `like` has its form."""
    if isinstance(like, Tensor):
        return tensors[name]
    if not isinstance(like, tuple):
        return None
    if like and _per_row(like):
        return tuple(tensors[name].tolist())
    keys = getattr(like, "_fields", range(len(like)))
    return _like(
        like,
        (restored(part, tensors, f"{name}.{key}" if name else str(key)) for key, part in zip(keys, like, strict=True)),
    )


def stretched(gpt: nn.Module, state: Any, n: int) -> Any:
    """A GPT's state as after n tokens read at once. Keys and values share memory until a token is appended."""
    mechanisms = [module for module in gpt.modules() if isinstance(module, Attention)]
    layers = (
        _stretched(layer, n, (group.patterns for group in getattr(mechanism, "groups", [])))
        for layer, mechanism in zip(state.layers, mechanisms, strict=True)
    )
    position = state.position
    if isinstance(position, Tensor) and not position.is_floating_point():  # counts of tokens
        position = torch.full_like(position, n)
    return state._replace(position=_stretched(position, n, iter(())), layers=tuple(layers))


def _stretched(state: Any, n: int, patterns: Iterator[list[Pattern]]) -> Any:
    """The same for a part of a state; `patterns` are those of its sparse caches, in order."""
    if isinstance(state, KVCache):
        return KVCache(repeated_columns(state.k, n), repeated_columns(state.v, n), (n,) * len(state.lengths))
    if isinstance(state, SparseCache):
        j = torch.arange(n, device=state.k.device)
        kept = j[needed_keys(next(patterns), j, torch.tensor(n, device=j.device))]
        place = (1 + kept).to(torch.int32).expand(len(state.lengths), 1, -1)
        k, v = (repeated_columns(x, len(kept)) for x in (state.k, state.v))
        return SparseCache(k, v, place, (n,) * len(state.lengths))
    if not isinstance(state, tuple):
        return n if isinstance(state, int) else state  # a count of tokens; anything else is None or has a constant size
    return _like(state, (_stretched(part, n, patterns) for part in state))


def repeated_columns(x: Tensor, n: int) -> Tensor:
    """A view: (B, H, S, D) -> (B, H, n, D), all equal to the last column, or 0 if there is none."""
    last = x[:, :, -1:] if x.shape[2] else x.new_zeros(*x.shape[:2], 1, x.shape[3])
    return last.expand(-1, -1, n, -1)


def state_bytes(state: Any) -> int:
    """Bytes of all tensors of a state, excluding token counts and a cache's spare capacity."""
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(map(state_bytes, state)) if isinstance(state, tuple) else 0


def _cat_tensors(tensors: Sequence[Tensor]) -> Tensor:
    if len({x.shape[1:] for x in tensors}) > 1:
        longest = max(x.shape[2] for x in tensors)
        tensors = [pad(x, (0, 0) * (x.dim() - 3) + (longest - x.shape[2], 0)) for x in tensors]
    return torch.cat(list(tensors))


def _per_row(state: tuple[Any, ...]) -> bool:
    return all(isinstance(n, int) for n in state)


def _like(state: Any, parts: Any) -> Any:
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
