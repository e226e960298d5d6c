"""Finds doubtful sums of `chunked.py`, and recomputes tiles in log space if float64 is not enough.

A tile is a chunk of tokens in one head. Log space is exact for any range of numbers, but slow: it processes one token
at a time. Every exponential is relative to the sum that contains it, so no exponent is above 0. Such tiles are rare in
float64, so this code is simple rather than fast.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.custom import in_chunks, running_sum
from model.ops.log_attention.chunks import CHUNK, split
from model.ops.log_attention.exponentials import CERTAIN, Inputs, finite

_LARGEST = 2**24  # elements of a temporary


_counters: dict[tuple[str, torch.device], Tensor] = {}


def recomputed_tiles(which: str, device: torch.device) -> Tensor:
    """The tiles of "forward" or "backward" passes that this process computed again on a device, with more range: (1,).

    Kernels count on their device without synchronisation; reading the number synchronises.
    """
    if (which, device) not in _counters:
        with torch.inference_mode(
            False
        ):  # the counter may be created in inference mode and used in training
            _counters[which, device] = torch.zeros(1, dtype=torch.int64, device=device)
    return _counters[which, device]


class Certificate:
    """Finds doubtful sums, which are too small or not finite. A sum without terms is 0 and not doubtful."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._seen = 0
        # The last token with a term in a column's sum, and the last reset: -1 in the state, -2 nowhere.
        self._term = torch.where(
            (inputs.log_s != -torch.inf).any(2, keepdim=True), -1, -2
        )  # (B, H, 1, E)
        self._reset = torch.full_like(self._term[..., :1], -1)  # (B, H, 1, 1)

    def too_small(self, sums: Tensor, start: int | None) -> Tensor:
        """Return which chunks (n, B, H) have a doubtful sum: so small that terms that matter may have become 0.

        Args:
            sums: (n, B, H, C, E), the sum over the keys of each query.
            start: position of the first query; None if every query attends to all tokens.
        """
        small = _doubtful(sums)
        if small is None:
            return sums.new_zeros(sums.shape[:3], dtype=torch.bool)
        n, _, _, C, _ = sums.shape
        S = self._inputs.k.shape[2]
        if start is None:
            self._see(S)
            small &= self._term >= self._reset
        else:
            stop = min(start + n * C, S)
            small &= split(
                self._see(stop)[:, :, start - stop :], C, 0
            )  # the last chunk may be padded
        return small.flatten(3).any(-1)

    def lost_heads(self, M: Tensor) -> Tensor:
        """Return which heads (B, H) have a doubtful entry in M after all tokens (B, H, d_k, E)."""
        small = _doubtful(M)
        if small is None:
            return M.new_zeros(M.shape[:2], dtype=torch.bool)
        has_key, has_value = self._alive(slice(None))
        in_state = self._inputs.log_s != -torch.inf  # (B, H, d_k, E)
        if self._inputs.log_f is not None:
            self._see(has_key.shape[2])
            has_key = has_key & (
                torch.arange(has_key.shape[2], device=M.device).unsqueeze(1) >= self._reset
            )
            in_state = in_state & (self._reset < 0)
        some = (has_key.to(M.dtype).mT @ has_value.to(M.dtype) > 0) | in_state
        return (small & some).flatten(2).any(-1)

    def _alive(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Which keys (B, H, t, d_k) and values (B, H, t, E) are not -inf."""
        k, log_v = self._inputs.k[:, :, tokens], self._inputs.log_v[:, :, tokens]
        return k != -torch.inf, pad(log_v != -torch.inf, (0, 1), value=True)  # NaN is a term

    def _see(self, stop: int) -> Tensor:
        """Whether columns have a term since the last reset, for the tokens not seen so far, to `stop`: (B, H, t, E)."""
        tokens = slice(self._seen, stop)
        has_key, has_value = self._alive(tokens)
        token = torch.arange(self._seen, stop, device=has_key.device).unsqueeze(1)
        term = (
            torch.where(has_value & has_key.any(-1, keepdim=True), token, self._term)
            .cummax(2)
            .values
        )
        reset = self._reset
        if self._inputs.log_f is not None:
            resets = self._inputs.log_f[:, :, tokens] == -torch.inf
            reset = torch.where(resets, token, reset).cummax(2).values
        if self._seen < stop:
            self._term, self._reset, self._seen = term[:, :, -1:], reset[:, :, -1:], stop
        return term >= reset


def _doubtful(sums: Tensor) -> Tensor | None:
    """Which sums are below CERTAIN, infinite or NaN; None if no sum is."""
    certain = CERTAIN[sums.dtype]
    if sums.amin() >= certain and sums.amax() < torch.inf:
        return None
    return ~((sums >= certain) & (sums < torch.inf))


def forward(inputs: Inputs, doubtful: Tensor, log_y: Tensor) -> tuple[Tensor, Tensor]:
    """Return log_y (G, T, E - 1) with doubtful chunks (G, N) recomputed exactly, and the last state (G, d_k, E).

    G counts through the batch and the heads of the inputs.
    """
    (q, k, log_v, log_f), states = _tiles_and_states(inputs)
    tiles = in_chunks(log_y, k.shape[2], 0.0).clone()
    for g, n in _groups(doubtful, states):
        log_S, _ = _log_sums(q[g, n], k[g, n], log_v[g, n], log_f[g, n], states[g, n])
        tiles[g, n] = log_S[..., :-1] - log_S[..., -1:]  # the last column is the normalizer
    return _sequence(tiles, log_y.shape[1]), states[:, -1]


def backward(inputs: Inputs, g_log_S: Tensor, g_log_s: Tensor) -> Inputs:
    """Return gradients for whole heads, from those of the log-sums (G, T, E) and of the last state (G, d_k, E)."""
    T = inputs.k.shape[2]
    tiles, states = _tiles_and_states(inputs)
    k = tiles[1]
    g_log_S, parts, g = (
        in_chunks(g_log_S, k.shape[2], 0.0),
        [torch.empty_like(x) for x in tiles],
        g_log_s,
    )
    gradients: list[Any]
    for n in reversed(range(k.shape[1])):
        g_before = torch.empty_like(g)
        for (h,) in _groups(torch.ones(len(g), dtype=torch.bool, device=g.device), states):
            q_n, k_n, v_n, f_n = (x[h, n] for x in tiles)
            *gradients, g_before[h] = _gradients(
                q_n, k_n, v_n, f_n, states[h, n], g_log_S[h, n], g[h]
            )
            for whole, part in zip(parts, gradients, strict=True):
                whole[h, n] = part
        g = g_before
    return Inputs._make((*(_sequence(x, T) for x in parts), g))


def _tiles_and_states(inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys, values with the normalizer's column, and gates in tiles (G, N, C, .), and `_states`.

    The last tile is padded so that it changes nothing: with 0 for queries and gates, -inf for keys and values.
    """
    C = min(CHUNK, inputs.k.shape[2])
    log_f = torch.zeros_like(inputs.k[..., :1]) if inputs.log_f is None else inputs.log_f
    tensors = inputs.q, inputs.k, pad(inputs.log_v, (0, 1)), log_f, inputs.log_s
    *tokens, log_s = (x.flatten(0, 1).to(inputs.log_s.dtype) for x in tensors)
    tiles = [
        in_chunks(x, C, fill)
        for x, fill in zip(tokens, (0.0, -torch.inf, -torch.inf, 0.0), strict=True)
    ]
    _, k, log_v, log_f = tiles
    return tiles, _states(k, log_v, log_f, log_s)


def _groups(wanted: Tensor, states: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield indices of the True entries, in groups whose latent sums fit into memory."""
    size = max(1, _LARGEST // (CHUNK * states[0, 0].numel()))
    for part in wanted.nonzero().split(size):
        yield part.unbind(1)


def _sequence(tiles: Tensor, T: int) -> Tensor:
    """Undo `in_chunks`."""
    return tiles.flatten(1, 2)[:, :T]


def _states(k: Tensor, log_v: Tensor, log_f: Tensor, log_s: Tensor) -> Tensor:
    """Return log_s before each chunk and after the last, (G, N + 1, d_k, E).

    Args:
        k: (G, N, C, d_k).
        log_v: (G, N, C, E).
        log_f: (G, N, C, 1).
        log_s: (G, d_k, E), before the first chunk.
    """
    _, N, C, d_k = k.shape
    before = [log_s]
    heads = max(1, _LARGEST // (C * d_k * log_v.shape[-1]))
    kept = running_sum(log_f.flip(2), 2).flip(
        2
    )  # (G, N, C, .): of what was there before a token, at the chunk's end
    k = k + pad(kept[:, :, 1:], (0, 0, 0, 1))
    for n in range(N):
        parts = [
            torch.logsumexp(k_n.unsqueeze(-1) + v_n.unsqueeze(-2), dim=1)
            for k_n, v_n in zip(k[:, n].split(heads), log_v[:, n].split(heads), strict=True)
        ]
        before.append(torch.logaddexp(before[-1] + kept[:, n, 0].unsqueeze(-1), torch.cat(parts)))
    return torch.stack(before, 1)


def _log_sums(
    q: Tensor, k: Tensor, log_v: Tensor, log_f: Tensor, log_s: Tensor
) -> tuple[Tensor, Tensor]:
    """log_S (P, C, E) of P tiles, and the state after each of their tokens (C, P, d_k, E).

    q (P, C, d_k), k (P, C, d_k), log_v (P, C, E), log_f (P, C, 1), and the state before each tile, log_s (P, d_k, E).
    """
    log_S, after = [], []
    for q_t, k_t, v_t, f_t in zip(*(x.unbind(1) for x in (q, k, log_v, log_f)), strict=True):
        log_s = torch.logaddexp(log_s + f_t.unsqueeze(-1), k_t.unsqueeze(-1) + v_t.unsqueeze(-2))
        log_S.append(torch.logsumexp(q_t.unsqueeze(-1) + log_s, dim=1))
        after.append(log_s)
    return torch.stack(log_S, 1), torch.stack(after)


def _gradients(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    log_f: Tensor,
    log_s: Tensor,
    g_log_S: Tensor,
    g_after: Tensor,
) -> Inputs:
    """Backward of `_log_sums`, from the gradients of log_S (P, C, E) and of the last state (P, d_k, E)."""
    log_S, after = _log_sums(q, k, log_v, log_f, log_s)
    g, g_q, g_k, g_v, g_f = g_after, [], [], [], []
    for t in reversed(range(q.shape[1])):
        s = after[t]  # (P, d_k, E)
        read = g_log_S[:, t].unsqueeze(-2) * _share(
            q[:, t].unsqueeze(-1) + s, log_S[:, t].unsqueeze(-2)
        )
        g = g + read
        written = g * _share(k[:, t].unsqueeze(-1) + log_v[:, t].unsqueeze(-2), s)
        g_q.append(read.sum(-1))
        g_k.append(written.sum(-1))
        g_v.append(written.sum(-2))
        g = g * _share((after[t - 1] if t else log_s) + log_f[:, t].unsqueeze(-1), s)
        g_f.append(g.sum(-1))
    of_q, of_k, of_v, of_f = (torch.stack(x[::-1], 1) for x in (g_q, g_k, g_v, g_f))
    return Inputs(of_q, of_k, of_v, of_f.sum(-1, keepdim=True), g)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole) for a term of a log-sum, between 0 and 1; 0 for an empty sum."""
    return (part - finite(whole)).exp_()
