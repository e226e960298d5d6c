"""Detects sums that `chunked.py` cannot be certain of, and recomputes tiles in log space where float64 is not enough.

Such tiles are rare in float64, so the code that recomputes them is simple rather than fast.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.ops.log_attention import exact
from model.ops.log_attention.chunks import CHUNK, join, split
from model.ops.log_attention.exponentials import Inputs
from model.ops.log_attention.frames import CERTAIN


class _Fallback:
    """Counts the tiles (chunks of at most 64 tokens in one head) that this process computed by the exact form.

    Kernels count on their device without synchronisation; reading a total here synchronises.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[str, torch.device], Tensor] = {}

    def counter(self, which: str, device: torch.device) -> Tensor:
        """Return the counter (1,) of "forward" or "backward" tiles on a device."""
        if (which, device) not in self._counters:
            with torch.inference_mode(False):  # the counter may be created in inference mode and used in training
                self._counters[which, device] = torch.zeros(1, dtype=torch.int64, device=device)
        return self._counters[which, device]

    def _total(self, which: str) -> int:
        return sum(int(tiles) for (name, _), tiles in self._counters.items() if name == which)

    @property
    def forward_tiles(self) -> int:
        """Tiles of forward passes."""
        return self._total("forward")

    @property
    def backward_tiles(self) -> int:
        """Tiles of backward passes."""
        return self._total("backward")


Fallback = _Fallback()


class Call(NamedTuple):
    """The arguments of `chunked.py`, with the batch and the heads in one dimension, G = B H."""

    q: Tensor
    """(G, T, d_k)."""
    k: Tensor
    """(G, S, d_k)."""
    log_v: Tensor
    """(G, S, E)."""
    log_s: Tensor
    """(G, d_k, E)."""
    causal: bool

    def tiles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (padded with 0), keys and values (padded with -inf), each (G, N, C, .)."""
        C = min(CHUNK, self.k.shape[1])
        return _tiles(self.q, C, 0.0), _tiles(self.k, C, -torch.inf), _tiles(self.log_v, C, -torch.inf)


def call_of(inputs: Inputs, causal: bool) -> Call:
    """Flatten heads to one dimension, and append the normalizer's column to log_v."""
    q, k, log_v, log_s = (x.flatten(0, 1).to(inputs.log_s.dtype) for x in inputs)
    return Call(q, k, pad(log_v, (0, 1)), log_s, causal)


class Certificate:
    """Tells which sums are doubtful: too small or not finite. A sum without terms is 0, and certain."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._first = torch.where((inputs.log_s != -torch.inf).any(2, keepdim=True), 0, inputs.k.shape[2])
        self._seen = 0

    def too_small(self, sums: Tensor, start: int | None) -> Tensor:
        """Return which chunks (n, B, H) have a doubtful sum, given sums (n, B, H, C, E) over tokens up to each query.

        `start` is the position of the first query, or None if every query attends to all tokens.
        """
        small = _doubtful(sums)
        if small is None:
            return sums.new_zeros(sums.shape[:3], dtype=torch.bool)
        n, _, _, C, _ = sums.shape
        S = self._inputs.k.shape[2]
        if start is None:
            small &= self._first_term(S) < S
        else:
            query = torch.arange(start, start + n * C, device=sums.device).view(n, 1, 1, C, 1)
            small &= (self._first_term(min(start + n * C, S)) <= query) & (query < S)  # the last chunk may be padded
        return small.flatten(3).any(-1)

    def lost_heads(self, M: Tensor) -> Tensor:
        """Return which heads (B, H) have a doubtful entry in M after all tokens (B, H, d_k, E)."""
        small = _doubtful(M)
        if small is None:
            return M.new_zeros(M.shape[:2], dtype=torch.bool)
        has_key, has_value = (x.to(M.dtype) for x in self._alive(slice(None)))
        some = (has_key.mT @ has_value > 0) | (self._inputs.log_s != -torch.inf)  # (B, H, d_k, E)
        return (small & some).flatten(2).any(-1)

    def _alive(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Which keys (B, H, t, d_k) and values (B, H, t, E) are not -inf."""
        k, log_v = self._inputs.k[:, :, tokens], self._inputs.log_v[:, :, tokens]
        return k != -torch.inf, pad(log_v != -torch.inf, (0, 1), value=True)  # NaN is a term

    def _first_term(self, stop: int) -> Tensor:
        """Return the first token with a term in a column's sum, (B, H, 1, E); S if there is none before `stop`."""
        if self._seen < stop:
            has_key, has_value = self._alive(slice(self._seen, stop))
            some = has_value & has_key.any(-1, keepdim=True)  # (B, H, t, E)
            first = some.to(torch.uint8).argmax(2, keepdim=True).add_(self._seen)
            self._first = torch.where(some.any(2, keepdim=True), torch.minimum(self._first, first), self._first)
            self._seen = stop
        return self._first


def _doubtful(sums: Tensor) -> Tensor | None:
    """Which of the sums are not between CERTAIN and infinity, NaN among them; None if all are."""
    certain = CERTAIN[sums.dtype]
    if sums.amin() >= certain and sums.amax() < torch.inf:
        return None
    return ~((sums >= certain) & (sums < torch.inf))


def count(which: str, doubtful: Tensor, T: int, causal: bool) -> None:
    """Count the tiles of a "forward" or "backward" pass over T queries: chunks (N, B, H), or all T as one."""
    if doubtful.any():
        Fallback.counter(which, doubtful.device).add_(doubtful.sum() * (1 if causal else -(-T // CHUNK)))


def forward(call: Call, doubtful: Tensor, log_y: Tensor) -> tuple[Tensor, Tensor]:
    """Return log_y (G, T, E - 1) with doubtful chunks (G, N) recomputed exactly, and the last state (G, d_k, E)."""
    q, k, log_v = call.tiles()
    states = exact.states(k, log_v, call.log_s)  # (G, N + 1, d_k, E)
    if call.causal:
        chunks = _tiles(log_y, q.shape[2], 0.0).clone()
        for g, n in _groups(doubtful, states):
            log_S, _ = exact.causal_log_sums(q[g, n], k[g, n], log_v[g, n], states[g, n])
            chunks[g, n] = _normalized(log_S)
        log_y = _sequence(chunks, log_y.shape[1])
    elif doubtful.any():
        g = doubtful[:, 0]
        log_y[g] = _normalized(exact.full_log_sums(call.q[g], states[g, -1]))
    return log_y, states[:, -1]


def backward(call: Call, g_log_S: Tensor, g_log_s: Tensor) -> tuple[Tensor, ...]:
    """Return gradients of q, k, log_v, log_s from those of the log-sums (G, T, E) and the last state (G, d_k, E)."""
    q, k, log_v = call.tiles()
    states = exact.states(k, log_v, call.log_s)  # (G, N + 1, d_k, E)
    if not call.causal:
        return exact.full_gradients(*call[:4], states[:, -1], g_log_S, g_log_s)
    *tiles, g_first = _causal_backward(q, k, log_v, _tiles(g_log_S, q.shape[2], 0.0), states, g_log_s)
    return *(_sequence(x, g_log_S.shape[1]) for x in tiles), g_first


def _normalized(log_S: Tensor) -> Tensor:
    """log_y of the log-sums, whose last column is the normalizer's."""
    return log_S[..., :-1] - log_S[..., -1:]


def _causal_backward(
    q: Tensor, k: Tensor, log_v: Tensor, g_log_S: Tensor, states: Tensor, g: Tensor
) -> exact.Gradients:
    """Gradients of q, k and log_v in chunks (F, N, C, .), and of the first state, from that of the last (F, d_k, E)."""
    g_q, g_k, g_v = (torch.empty_like(x) for x in (q, k, log_v))
    for n in reversed(range(q.shape[1])):
        g_before = torch.empty_like(g)
        for (f,) in _groups(torch.ones_like(g[:, 0, 0], dtype=torch.bool), states):
            tile = q[f, n], k[f, n], log_v[f, n], states[f, n]
            g_q[f, n], g_k[f, n], g_v[f, n], g_before[f] = exact.causal_gradients(*tile, g_log_S[f, n], g[f])
        g = g_before
    return exact.Gradients(g_q, g_k, g_v, g)


def _groups(wanted: Tensor, states: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield indices of the True entries, in groups whose latent sums fit into memory."""
    size = max(1, exact.LARGEST // (CHUNK * states[0, 0].numel()))
    for part in wanted.nonzero().split(size):
        yield part.unbind(1)


def _tiles(x: Tensor, C: int, fill: float) -> Tensor:
    """(G, T, D) -> (G, N, C, D)."""
    return split(x.unsqueeze(0), C, fill).squeeze(1).transpose(0, 1)


def _sequence(tiles: Tensor, T: int) -> Tensor:
    """Undo `_tiles`."""
    return join(tiles.transpose(0, 1).unsqueeze(1), T).squeeze(0)
