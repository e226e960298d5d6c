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
    log_f: Tensor
    """(G, S, d_k or 1)."""
    log_s: Tensor
    """(G, d_k, E)."""
    causal: bool
    C: int
    """Tokens of a chunk."""

    def tiles(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and gates (padded with 0), keys and values (padded with -inf), each (G, N, C, .)."""
        tensors = zip(self[:4], (0.0, -torch.inf, -torch.inf, 0.0), strict=True)
        q, k, log_v, log_f = (_tiles(x, self.C, fill) for x, fill in tensors)
        return q, k, log_v, log_f


def call_of(inputs: Inputs, causal: bool) -> Call:
    """Flatten heads to one dimension, and append the normalizer's column to log_v."""
    log_f = torch.zeros_like(inputs.k[..., :1]) if inputs.log_f is None else inputs.log_f
    tensors = inputs.q, inputs.k, pad(inputs.log_v, (0, 1)), log_f, inputs.log_s
    q, k, log_v, log_f, log_s = (x.flatten(0, 1).to(inputs.log_s.dtype) for x in tensors)
    return Call(q, k, log_v, log_f, log_s, causal, min(inputs.C, k.shape[1]))


class Certificate:
    """Finds doubtful sums, which are too small or not finite. A sum without terms is 0 and not doubtful."""

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
            stop = min(start + n * C, S)
            small &= (self._first_term(stop) <= query) & (query < S)  # the last chunk may be padded
            if self._inputs.log_f is not None and small.any():
                here = self._since_reset(stop)[:, :, start:]
                small &= split(here, C, 0)
        return small.flatten(3).any(-1)

    def lost_heads(self, M: Tensor) -> Tensor:
        """Return which heads (B, H) have a doubtful entry in M after all tokens (B, H, d_k, E)."""
        small = _doubtful(M)
        if small is None:
            return M.new_zeros(M.shape[:2], dtype=torch.bool)
        has_key, has_value = self._alive(slice(None))
        in_state = self._inputs.log_s != -torch.inf  # (B, H, d_k, E)
        if self._inputs.log_f is not None:
            last = self._last_resets(self._inputs.k.shape[2])[:, :, -1:]  # (B, H, 1, 1)
            has_key = has_key & (torch.arange(has_key.shape[2], device=M.device).unsqueeze(1) >= last)
            in_state = in_state & (last < 0)
        some = (has_key.to(M.dtype).mT @ has_value.to(M.dtype) > 0) | in_state
        return (small & some).flatten(2).any(-1)

    def _alive(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Which keys (B, H, t, d_k) and values (B, H, t, E) are not -inf."""
        k, log_v = self._inputs.k[:, :, tokens], self._inputs.log_v[:, :, tokens]
        return k != -torch.inf, pad(log_v != -torch.inf, (0, 1), value=True)  # NaN is a term

    def _since_reset(self, stop: int) -> Tensor:
        """Whether a column has a term since the last reset, for tokens up to `stop`: (B, H, stop, E)."""
        has_key, has_value = self._alive(slice(stop))
        token = torch.arange(stop, device=has_key.device).unsqueeze(1)
        first = torch.where((self._inputs.log_s != -torch.inf).any(2, keepdim=True), -1, -2)  # in the state, nowhere
        last_term = torch.where(has_value & has_key.any(-1, keepdim=True), token, first).cummax(2).values
        return last_term >= self._last_resets(stop)

    def _last_resets(self, stop: int) -> Tensor:
        """The last reset up to each token, or -1: (B, H, stop, 1)."""
        assert self._inputs.log_f is not None
        reset = (self._inputs.log_f[:, :, :stop] == -torch.inf).all(-1, keepdim=True)
        return torch.where(reset, torch.arange(stop, device=reset.device).unsqueeze(1), -1).cummax(2).values

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
    """Which sums are below CERTAIN, infinite or NaN; None if no sum is."""
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
    q, k, log_v, log_f = call.tiles()
    states = exact.states(k, log_v, log_f, call.log_s)  # (G, N + 1, d_k, E)
    if call.causal:
        chunks = _tiles(log_y, q.shape[2], 0.0).clone()
        for g, n in _groups(doubtful, states):
            log_S, _ = exact.causal_log_sums(q[g, n], k[g, n], log_v[g, n], log_f[g, n], states[g, n])
            chunks[g, n] = _normalized(log_S)
        log_y = _sequence(chunks, log_y.shape[1])
    elif doubtful.any():
        g = doubtful[:, 0]
        log_y[g] = _normalized(exact.full_log_sums(call.q[g], states[g, -1]))
    return log_y, states[:, -1]


def backward(call: Call, g_log_S: Tensor, g_log_s: Tensor) -> tuple[Tensor, ...]:
    """Return `exact.Gradients`, from gradients of the log-sums (G, T, E) and of the last state (G, d_k, E)."""
    tiles = call.tiles()
    states = exact.states(*tiles[1:], call.log_s)  # (G, N + 1, d_k, E)
    if not call.causal:
        return exact.full_gradients(*call[:3], call.log_s, states[:, -1], g_log_S, g_log_s)
    *gradients, g_first = _causal_backward(tiles, _tiles(g_log_S, call.C, 0.0), states, g_log_s)
    return *(_sequence(x, g_log_S.shape[1]) for x in gradients), g_first


def _normalized(log_S: Tensor) -> Tensor:
    """log_y from the log-sums: their last column, the normalizer, is subtracted from the others."""
    return log_S[..., :-1] - log_S[..., -1:]


def _causal_backward(tiles: tuple[Tensor, ...], g_log_S: Tensor, states: Tensor, g: Tensor) -> exact.Gradients:
    """Gradients of chunks (F, N, C, .) and of the first state; g (F, d_k, E) is the gradient of the last state."""
    q, k, log_v, _ = tiles
    parts = g_q, g_k, g_v, g_f = tuple(torch.empty_like(x) for x in (q, k, log_v, k))
    for n in reversed(range(q.shape[1])):
        g_before = torch.empty_like(g)
        for (f,) in _groups(torch.ones_like(g[:, 0, 0], dtype=torch.bool), states):
            q_n, k_n, v_n, f_n = (x[f, n] for x in tiles)
            *gradients, g_before[f] = exact.causal_gradients(q_n, k_n, v_n, f_n, states[f, n], g_log_S[f, n], g[f])
            for whole, part in zip(parts, gradients, strict=True):
                whole[f, n] = part
        g = g_before
    return exact.Gradients(g_q, g_k, g_v, g_f, g)


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
