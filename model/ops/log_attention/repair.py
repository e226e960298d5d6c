"""Computes again, in log space, the chunks that `chunked.py` could not be certain of, and puts them in their places."""

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
    """How often this process needed the exact form, in tiles: chunks of at most 64 tokens of one head.

    Kernels count on their device, where nobody waits for them; who reads a number here does.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[str, torch.device], Tensor] = {}

    def counter(self, which: str, device: torch.device) -> Tensor:
        """Tiles of the "forward" or the "backward" pass on a device: (1,), to be added to."""
        if (which, device) not in self._counters:
            with torch.inference_mode(False):  # what begins in inference may be counted in training
                self._counters[which, device] = torch.zeros(1, dtype=torch.int64, device=device)
        return self._counters[which, device]

    def _total(self, which: str) -> int:
        return sum(int(tiles) for (name, _), tiles in self._counters.items() if name == which)

    @property
    def forward_tiles(self) -> int:
        """Of forward passes."""
        return self._total("forward")

    @property
    def backward_tiles(self) -> int:
        """Of backward passes."""
        return self._total("backward")


Fallback = _Fallback()


class Call(NamedTuple):
    """What `chunked.py` was called with."""

    q: Tensor
    """(G, T, d_k)."""
    k: Tensor
    """(G, S, d_k)."""
    log_v: Tensor
    """(G, S, E)."""
    log_s: Tensor
    """(G, d_k, E)."""
    causal: bool

    def of(self, heads: Tensor) -> "Call":
        """Some of its heads, in float64: what is slow anyway may as well be as exact as it can be."""
        q, k, log_v, log_s = (x[heads].double() for x in self[:4])
        return Call(q, k, log_v, log_s, self.causal)

    def tiles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (0 where the last chunk has none), keys and values (-inf there), each (G, N, C, .)."""
        C = min(CHUNK, self.k.shape[1])
        return _tiles(self.q, C, 0.0), _tiles(self.k, C, -torch.inf), _tiles(self.log_v, C, -torch.inf)


def call_of(inputs: Inputs, causal: bool) -> Call:
    """With heads in one dimension, G = B H, and the normalizer's column."""
    q, k, log_v, log_s = (x.flatten(0, 1).to(inputs.log_s.dtype) for x in inputs)
    return Call(q, k, pad(log_v, (0, 1)), log_s, causal)


def too_small(inputs: Inputs, sums: Tensor, tokens: slice) -> Tensor:
    """Chunks (n, B, H) with a sum (n, B, H, C, E) that is too small to be certain."""
    if sums.amin() >= CERTAIN[sums.dtype]:
        return sums.new_zeros(sums.shape[:3], dtype=torch.bool)
    small = sums < CERTAIN[sums.dtype]
    if (inputs.log_v == -torch.inf).any():  # a sum of nothing is 0, and certain
        some = _something_to_sum(inputs)[:, :, tokens]
        small &= split(some, min(sums.shape[3], some.shape[2]), True)
    return small.flatten(3).any(-1)


def lost_heads(inputs: Inputs, after: Tensor, wanted: bool = True) -> Tensor:
    """Heads (B, H) whose last M (B, H, d_k, E), which is wanted, has an entry too small to be certain."""
    small = after < CERTAIN[after.dtype]
    if not wanted or not small.any():
        return small.new_zeros(small.shape[:2])
    return (small & _something_to_sum(inputs)[:, :, -1:]).flatten(2).any(-1)


def _something_to_sum(inputs: Inputs) -> Tensor:
    """Whether any value up to a token, of a key that is not masked, is not zero: (B, H, S, E)."""
    some = pad(inputs.log_v > -torch.inf, (0, 1), value=True) & (inputs.k > -torch.inf).any(-1, keepdim=True)
    return (some.int().cumsum(2) > 0) | (inputs.log_s > -torch.inf).any(2, keepdim=True)


class Dense(NamedTuple):
    """What the matrix products of the backward pass gave for each chunk, by itself."""

    g_q: Tensor
    """(G, N, C, d_k)."""
    g_k: Tensor
    """(G, N, C, d_k), through the chunk's own queries only."""
    g_v: Tensor
    """(G, N, C, E), likewise."""
    g_seen: Tensor
    """(G, N, d_k, E): of the M that the chunk's queries saw."""
    e_k: Tensor
    e_v: Tensor
    before: Tensor
    """M before each chunk, (G, N, d_k, E)."""

    def of(self, heads: Tensor) -> "Dense":
        """Those of some heads, in float64."""
        return Dense(*(x[heads].double() for x in self))


def forward(call: Call, doubtful: Tensor, lost: Tensor, log_y: Tensor, log_s_after: Tensor) -> None:
    """Replace log_y (G, T, E - 1) where doubtful (G, N), and the last state (G, d_k, E) of every head concerned.

    `lost` (G) are the heads whose last state is doubtful.
    """
    heads = (doubtful.any(1) | lost).nonzero()[:, 0]
    call, doubtful, ys = call.of(heads), doubtful[heads], log_y[heads]
    q, k, log_v = call.tiles()
    states = exact.states(k, log_v, call.log_s)  # (F, N + 1, d_k, E)
    if call.causal:
        chunks = _tiles(ys, q.shape[2], 0.0).clone()
        for f, n in _groups(doubtful, states):
            log_S, _ = exact.causal_log_sums(q[f, n], k[f, n], log_v[f, n], states[f, n])
            chunks[f, n] = _normalized(log_S).to(ys.dtype)
        ys = _sequence(chunks, ys.shape[1])
    else:
        f = doubtful[:, 0]
        ys[f] = _normalized(exact.full_log_sums(call.q[f], states[f, -1])).to(ys.dtype)
    log_y[heads] = ys
    log_s_after[heads] = states[:, -1].to(log_s_after.dtype)
    Fallback.counter("forward", log_y.device).add_(doubtful.sum() * (1 if call.causal else q.shape[1]))


def backward(
    call: Call,
    doubtful: Tensor,
    lost: Tensor,
    g_log_S: Tensor,
    g_log_s: Tensor,
    dense: Dense | None,
    gradients: list[Tensor],
) -> None:
    """Replace the gradients of q, k, log_v and log_s of every head with a doubtful chunk or a last state that is lost.

    g_log_S (G, T, E) and g_log_s (G, d_k, E) are the gradients of the log-sums and of the last state.
    """
    heads = (doubtful.any(1) | lost).nonzero()[:, 0]
    call, g_log_S, g_log_s = call.of(heads), g_log_S[heads].double(), g_log_s[heads].double()
    q, k, log_v = call.tiles()
    states = exact.states(k, log_v, call.log_s)  # (F, N + 1, d_k, E)
    if dense is not None:  # causal
        g_chunks = _tiles(g_log_S, q.shape[2], 0.0)
        *chunks, g_first = _causal_backward(q, k, log_v, g_chunks, states, g_log_s, doubtful[heads], dense.of(heads))
        result = [*(_sequence(x, g_log_S.shape[1]) for x in chunks), g_first]
    else:
        result = [*exact.full_gradients(*call[:4], states[:, -1], g_log_S, g_log_s)]
        Fallback.counter("backward", q.device).add_(len(heads) * (q.shape[1] + k.shape[1]))
    for whole, part in zip(gradients, result, strict=True):
        whole[heads] = part[..., : whole.shape[-1]].to(whole.dtype)  # without the normalizer's column


def _normalized(log_S: Tensor) -> Tensor:
    """log_y of the log-sums, whose last column is the normalizer's."""
    return log_S[..., :-1] - log_S[..., -1:]


def _causal_backward(
    q: Tensor,
    k: Tensor,
    log_v: Tensor,
    g_log_S: Tensor,
    states: Tensor,
    g_log_s: Tensor,
    doubtful: Tensor,
    dense: Dense,
) -> exact.Gradients:
    """Gradients of q, k and log_v in chunks (F, N, C, .), and of the first state: from the last chunk to the first.

    What is carried is g, the gradient of the state's logarithm (F, d_k, E). A chunk uses its dense products where its
    own sums are certain and no entry of the state after it, which g is divided by, is too small.
    """
    g_q, g_k, g_v = (x.clone() for x in (dense.g_q, dense.g_k, dense.g_v))  # (F, N, C, .)
    g = g_log_s
    for n in reversed(range(q.shape[1])):
        after = dense.before[:, n] + dense.e_k[:, n].mT @ dense.e_v[:, n]
        sure = ~doubtful[:, n] & ((after >= CERTAIN[torch.float32]) | (g == 0)).flatten(1).all(1)
        g_before = torch.empty_like(g)

        s = sure.nonzero()[:, 0]
        g_M = torch.where(g[s] == 0, 0, g[s] / after[s])
        g_k[s, n] += dense.e_k[s, n] * (dense.e_v[s, n] @ g_M.mT)
        g_v[s, n] += dense.e_v[s, n] * (dense.e_k[s, n] @ g_M)
        g_before[s] = dense.before[s, n] * (g_M + dense.g_seen[s, n])

        for (u,) in _groups(~sure, states):
            tile = q[u, n], k[u, n], log_v[u, n], states[u, n]
            g_q[u, n], g_k[u, n], g_v[u, n], g_before[u] = exact.causal_gradients(*tile, g_log_S[u, n], g[u])
        Fallback.counter("backward", q.device).add_((~sure).sum())
        g = g_before
    return exact.Gradients(g_q, g_k, g_v, g)


def _groups(wanted: Tensor, states: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Indices of the True entries, as many at a time as the latent sums of their tokens leave memory for."""
    size = max(1, exact.LARGEST // (CHUNK * states[0, 0].numel()))
    for part in wanted.nonzero().split(size):
        yield part.unbind(1)


def _tiles(x: Tensor, C: int, fill: float) -> Tensor:
    """(G, T, D) -> (G, N, C, D)."""
    return split(x.unsqueeze(0), C, fill).squeeze(1).transpose(0, 1)


def _sequence(tiles: Tensor, T: int) -> Tensor:
    """Undo `_tiles`."""
    return join(tiles.transpose(0, 1).unsqueeze(1), T).squeeze(0)
