"""What `chunked.py` can be certain of; and, computed in log space, the tiles where even its float64 cannot.

All tensors that are replaced are float64, in which such tiles are rare: what is slow anyway is kept simple.
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
        """Some of its heads."""
        q, k, log_v, log_s = (x[heads] for x in self[:4])
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
    certain = CERTAIN[sums.dtype]
    if sums.amin() >= certain and sums.amax() < torch.inf:
        return sums.new_zeros(sums.shape[:3], dtype=torch.bool)
    small = ~((sums >= certain) & (sums < torch.inf))  # NaN, too
    if (inputs.log_v == -torch.inf).any():  # a sum of nothing is 0, and certain
        some = _something_to_sum(inputs)[:, :, tokens]
        small &= split(some, min(sums.shape[3], some.shape[2]), True)
    return small.flatten(3).any(-1)


def lost_heads(inputs: Inputs, after: Tensor, wanted: bool = True) -> Tensor:
    """Heads (B, H) whose last M (B, H, d_k, E), which is wanted, has an entry too small to be certain."""
    small = ~((after >= CERTAIN[after.dtype]) & (after < torch.inf))
    if not wanted or not small.any():
        return small.new_zeros(small.shape[:2])
    return (small & _something_to_sum(inputs)[:, :, -1:]).flatten(2).any(-1)


def _something_to_sum(inputs: Inputs) -> Tensor:
    """Whether any value up to a token, of a key that is not masked, is not zero: (B, H, S, E)."""
    some = pad(inputs.log_v > -torch.inf, (0, 1), value=True) & (inputs.k > -torch.inf).any(-1, keepdim=True)
    return (some.int().cumsum(2) > 0) | (inputs.log_s > -torch.inf).any(2, keepdim=True)


def count(which: str, doubtful: Tensor, T: int, causal: bool) -> None:
    """Count the tiles of a "forward" or "backward" pass over T queries: chunks (N, B, H), or all T as one."""
    if doubtful.any():
        Fallback.counter(which, doubtful.device).add_(doubtful.sum() * (1 if causal else -(-T // CHUNK)))


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
            chunks[f, n] = _normalized(log_S)
        ys = _sequence(chunks, ys.shape[1])
    elif doubtful.any():
        f = doubtful[:, 0]
        ys[f] = _normalized(exact.full_log_sums(call.q[f], states[f, -1]))
    log_y[heads] = ys
    log_s_after[heads] = states[:, -1]


def backward(call: Call, heads: Tensor, g_log_S: Tensor, g_log_s: Tensor, gradients: list[Tensor]) -> None:
    """Replace the gradients of q, k, log_v and log_s of some heads (G).

    g_log_S (G, T, E) and g_log_s (G, d_k, E) are the gradients of the log-sums and of the last state.
    """
    call, g_log_S, g_log_s = call.of(heads), g_log_S[heads], g_log_s[heads]
    q, k, log_v = call.tiles()
    states = exact.states(k, log_v, call.log_s)  # (F, N + 1, d_k, E)
    if call.causal:
        *tiles, g_first = _causal_backward(q, k, log_v, _tiles(g_log_S, q.shape[2], 0.0), states, g_log_s)
        result = [*(_sequence(x, g_log_S.shape[1]) for x in tiles), g_first]
    else:
        result = [*exact.full_gradients(*call[:4], states[:, -1], g_log_S, g_log_s)]
    for whole, part in zip(gradients, result, strict=True):
        whole[heads] = part[..., : whole.shape[-1]]  # without the normalizer's column


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
