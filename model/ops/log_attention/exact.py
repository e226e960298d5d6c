"""Finds doubtful sums of `chunked.py`, and recomputes tiles in log space.

A tile is the queries and keys of one chunk in one head. Log space is exact for any range of
numbers, but slow: it processes one token at a time. Every exponential is relative to the sum that
contains it, so no exponent is above 0. Such tiles are rare, so this code is simple rather than
fast.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.custom import CHUNK, in_chunks, running_sum, split
from model.ops.log_attention.exponentials import CERTAIN, Inputs, finite

_LARGEST = 2**24  # elements of a temporary

_counters: dict[tuple[str, torch.device], Tensor] = {}


def recomputed_tiles(which: str, device: torch.device) -> Tensor:
    """The tiles of "forward" or "backward" passes that this process computed in log space on a
    device: (1,).

    Kernels count on their device without synchronisation; reading the number synchronises.
    """
    if (which, device) not in _counters:
        # The counter may be created in inference mode and used in training.
        with torch.inference_mode(False):
            _counters[which, device] = torch.zeros(1, dtype=torch.int64, device=device)
    return _counters[which, device]


class Certificate:
    """Finds doubtful sums: too small, or not finite. A sum without terms is 0, and certain."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._n_seen = 0
        # The last token with a term in a column's sum, and the last reset: -1 in the state, -2
        # nowhere.
        has_term = (inputs.log_s != -torch.inf).any(2, keepdim=True)
        self._last_term = torch.where(has_term, -1, -2)  # (B, H, 1, E)
        self._last_reset = torch.full_like(self._last_term[..., :1], -1)  # (B, H, 1, 1)

    def too_small(self, sums: Tensor, start: int) -> Tensor:
        """Return which chunks (n, B, H) have a doubtful sum: so small that terms that matter may
        have become 0.

        Args:
            sums: (n, B, H, C, E), the sum over the keys of each query.
            start: position of the first query.
        """
        small = _doubtful(sums)
        if small is None:
            return sums.new_zeros(sums.shape[:3], dtype=torch.bool)
        n, _, _, C, _ = sums.shape
        stop = min(start + n * C, self._inputs.k.shape[2])
        has_term = self._read(stop)[:, :, start - stop :]
        small &= split(has_term, C, 0)  # the last chunk may be padded
        return small.flatten(3).any(-1)

    def lost_heads(self, M: Tensor) -> Tensor:
        """Return which heads (B, H) have a doubtful entry in M after all tokens (B, H, d_k, E)."""
        small = _doubtful(M)
        if small is None:
            return M.new_zeros(M.shape[:2], dtype=torch.bool)
        has_key, has_value = self._not_masked(slice(None))
        has_term = self._inputs.log_s != -torch.inf  # (B, H, d_k, E), in the state
        if self._inputs.log_f is not None:
            n_keys = has_key.shape[2]
            self._read(n_keys)
            token = torch.arange(n_keys, device=M.device).unsqueeze(1)
            has_key = has_key & (token >= self._last_reset)
            has_term = has_term & (self._last_reset < 0)
        has_term = has_term | (has_key.to(M.dtype).mT @ has_value.to(M.dtype) > 0)
        return (small & has_term).flatten(2).any(-1)

    def _not_masked(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Which keys (B, H, t, d_k) and values (B, H, t, E) are not -inf."""
        has_key = self._inputs.k[:, :, tokens] != -torch.inf
        has_value = self._inputs.log_v[:, :, tokens] != -torch.inf  # NaN is a term
        return has_key, pad(has_value, (0, 1), value=True)

    def _read(self, stop: int) -> Tensor:
        """For each new token up to `stop`: has this column had a term since the last reset? (B, H,
        t, E)."""
        tokens = slice(self._n_seen, stop)
        has_key, has_value = self._not_masked(tokens)
        token = torch.arange(self._n_seen, stop, device=has_key.device).unsqueeze(1)
        has_term = has_value & has_key.any(-1, keepdim=True)
        last_term = torch.where(has_term, token, self._last_term).cummax(2).values
        last_reset = self._last_reset
        if self._inputs.log_f is not None:
            is_reset = self._inputs.log_f[:, :, tokens] == -torch.inf
            last_reset = torch.where(is_reset, token, last_reset).cummax(2).values
        if self._n_seen < stop:
            self._last_term = last_term[:, :, -1:]
            self._last_reset = last_reset[:, :, -1:]
            self._n_seen = stop
        return last_term >= last_reset


def _doubtful(sums: Tensor) -> Tensor | None:
    """Which sums are below CERTAIN, infinite or NaN; None if no sum is."""
    certain = CERTAIN[sums.dtype]
    if sums.amin() >= certain and sums.amax() < torch.inf:
        return None
    return ~((sums >= certain) & (sums < torch.inf))


# From here on, inputs are those of G heads in float64: q (G, T, d_k), ..., log_s (G, d_k, E).


class _Tiles(NamedTuple):
    """Tokens in tiles (G, N, C, .)."""

    q: Tensor
    k: Tensor
    log_v: Tensor
    """With the normalizer's column."""
    log_f: Tensor

    def at(self, g: Tensor, n: Tensor | int) -> "_Tiles":
        """Select tiles: (P, C, .)."""
        return _Tiles._make(x[g, n] for x in self)


def _tiles_of(inputs: Inputs) -> _Tiles:
    """Cut tokens into tiles. The last is padded so that it changes nothing: keys and values with
    -inf, others with 0."""
    C = min(CHUNK, inputs.k.shape[1])
    log_f = inputs.log_f
    if log_f is None:
        log_f = torch.zeros_like(inputs.k[..., :1])
    return _Tiles(
        in_chunks(inputs.q, C, 0.0),
        in_chunks(inputs.k, C, -torch.inf),
        in_chunks(pad(inputs.log_v, (0, 1)), C, -torch.inf),
        in_chunks(log_f, C, 0.0),
    )


def forward(inputs: Inputs, doubtful: Tensor, log_y: Tensor) -> tuple[Tensor, Tensor]:
    """Return log_y (G, T, E - 1) with doubtful tiles (G, N) recomputed, and the last state."""
    tiles = _tiles_of(inputs)
    states = _states(tiles, inputs.log_s)
    log_y_tiles = in_chunks(log_y, tiles.k.shape[2], 0.0).clone()
    for g, n in _some_at_a_time(doubtful, states):
        log_S, _ = _log_sums(tiles.at(g, n), states[g, n])
        mean = log_S[..., :-1] - log_S[..., -1:]  # the last column is the normalizer
        log_y_tiles[g, n] = mean.to(log_y.dtype)
    return _sequence(log_y_tiles, log_y.shape[1]), states[:, -1]


def backward(inputs: Inputs, g_log_S: Tensor, g_log_s: Tensor) -> Inputs:
    """Return gradients, given those of the log-sums (G, T, E) and of the last state (G, d_k, E)."""
    T = inputs.k.shape[1]
    tiles = _tiles_of(inputs)
    states = _states(tiles, inputs.log_s)
    G, N, C, _ = tiles.k.shape
    g_log_S = in_chunks(g_log_S, C, 0.0)
    gradients = _Tiles._make(torch.empty_like(x) for x in tiles)
    all_heads = torch.ones(G, dtype=torch.bool, device=g_log_s.device)
    for n in reversed(range(N)):
        g_before = torch.empty_like(g_log_s)
        for (heads,) in _some_at_a_time(all_heads, states):
            tile_gradients, g_before[heads] = _gradients(
                tiles.at(heads, n), states[heads, n], g_log_S[heads, n], g_log_s[heads]
            )
            for gradient, tile_gradient in zip(gradients, tile_gradients, strict=True):
                gradient[heads, n] = tile_gradient
        g_log_s = g_before
    g_q = _sequence(gradients.q, T)
    g_k = _sequence(gradients.k, T)
    g_v = _sequence(gradients.log_v, T)[..., :-1]
    return Inputs(g_q, g_k, g_v, _sequence(gradients.log_f, T), g_log_s)


def _some_at_a_time(mask: Tensor, states: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield indices of True entries, as many at a time as memory allows for their states."""
    size = max(1, _LARGEST // (CHUNK * states[0, 0].numel()))
    for indices in mask.nonzero().split(size):
        yield indices.unbind(1)


def _sequence(tiles: Tensor, T: int) -> Tensor:
    """Undo `in_chunks`."""
    return tiles.flatten(1, 2)[:, :T]


def _states(tiles: _Tiles, log_s: Tensor) -> Tensor:
    """Return log_s before each chunk and after the last, (G, N + 1, d_k, E)."""
    _, k, log_v, log_f = tiles
    _, N, C, d_k = k.shape
    size = max(1, _LARGEST // (C * d_k * log_v.shape[-1]))  # heads at a time
    # Sum of log_f from each token to its chunk's end, (G, N, C, 1). A key loses what follows it.
    log_decay = running_sum(log_f.flip(2), 2).flip(2)
    k = k + pad(log_decay[:, :, 1:], (0, 0, 0, 1))
    states = [log_s]
    for n in range(N):
        sums = []
        for k_n, v_n in zip(k[:, n].split(size), log_v[:, n].split(size), strict=True):
            sums.append(torch.logsumexp(k_n.unsqueeze(-1) + v_n.unsqueeze(-2), dim=1))
        states.append(
            torch.logaddexp(states[-1] + log_decay[:, n, 0].unsqueeze(-1), torch.cat(sums))
        )
    return torch.stack(states, 1)


def _log_sums(tiles: _Tiles, log_s: Tensor) -> tuple[Tensor, Tensor]:
    """log_S (P, C, E) of P tiles, and the state after each of their tokens (C, P, d_k, E).

    log_s (P, d_k, E) is the state before each tile.
    """
    log_S = []
    states = []
    for q, k, log_v, log_f in zip(*(x.unbind(1) for x in tiles), strict=True):
        term = k.unsqueeze(-1) + log_v.unsqueeze(-2)
        log_s = torch.logaddexp(log_s + log_f.unsqueeze(-1), term)
        log_S.append(torch.logsumexp(q.unsqueeze(-1) + log_s, dim=1))
        states.append(log_s)
    return torch.stack(log_S, 1), torch.stack(states)


def _gradients(tiles: _Tiles, log_s: Tensor, g_log_S: Tensor, g: Tensor) -> tuple[_Tiles, Tensor]:
    """Return gradients of the tiles and of log_s, given those of log_S (P, C, E) and of the last
    state, g (P, d_k, E)."""
    q, k, log_v, log_f = tiles
    log_S, after = _log_sums(tiles, log_s)
    states = [log_s, *after]
    gradients = []
    for t in reversed(range(q.shape[1])):
        state = after[t]  # (P, d_k, E)
        weight = _share(q[:, t].unsqueeze(-1) + state, log_S[:, t].unsqueeze(-2))
        g_read = g_log_S[:, t].unsqueeze(-2) * weight
        g = g + g_read
        g_term = g * _share(k[:, t].unsqueeze(-1) + log_v[:, t].unsqueeze(-2), state)
        g = g * _share(states[t] + log_f[:, t].unsqueeze(-1), state)
        g_f = g.sum(-1).sum(-1, keepdim=True)
        gradients.append(_Tiles(g_read.sum(-1), g_term.sum(-1), g_term.sum(-2), g_f))
    gradients.reverse()
    return _Tiles._make(torch.stack(x, 1) for x in zip(*gradients, strict=True)), g


def _share(term: Tensor, log_sum: Tensor) -> Tensor:
    """exp(term - log_sum) for a term of a log-sum, between 0 and 1; 0 for an empty sum."""
    return (term - finite(log_sum)).exp_()
