"""Log-space attention token by token in float64, from its definition alone, with a bound on each rounding error.

A result is a nest of weighted sums, so a first-order change of its terms changes it by their weighted mean. The size of
a sum is that mean of |q| + |k| + |log_v| over its terms: rounding of these numbers, and of sums of them, changes the
result by some units in the last place of its size, and a gradient by as much of its terms' absolute values.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """log_y, the state after, or gradients; and by how much one unit of rounding may change each number."""

    values: list[Tensor]
    units: list[Tensor]


def _share(part, whole):
    """exp(part - whole); 0 for an empty sum."""
    return torch.where(whole == -torch.inf, -torch.inf, part - whole.masked_fill(whole == -torch.inf, 0)).exp()


def _size(x):
    return x.abs().masked_fill(x == -torch.inf, 0)


class Definition:
    """One call: log_s (B, H, d_k, E) includes the normalizer's column, which is last and has values of 0."""

    def __init__(self, q, k, log_v, log_s, log_z, causal, log_f=None):
        self.q, self.k = q.double(), k.double()
        self.v = torch.nn.functional.pad(log_v.double(), (0, 1))
        first = torch.cat([log_s, log_z.unsqueeze(-1)], -1).double()
        T, S = q.shape[2], k.shape[2]
        reads = [[t] for t in range(T)] if causal else [[] for _ in range(S - 1)] + [list(range(T))]
        self.reads = reads  # queries that see the state after each key
        self.states, self.state_sizes = [first], [_size(first)]
        self.f = torch.zeros_like(self.k[..., :1]) if log_f is None else log_f.double()
        for j in range(S):
            term, before = self._term(j), self._before(j)
            after = torch.logaddexp(before, term)
            size = _size(self.k[:, :, j]).unsqueeze(-1) + _size(self.v[:, :, j]).unsqueeze(-2)
            size_before = self.state_sizes[-1] + _size(self.f[:, :, j]).unsqueeze(-1)
            self.state_sizes.append(_share(before, after) * size_before + _share(term, after) * size)
            self.states.append(after)

    def _before(self, j):
        """The factor that remains of the earlier state at token j."""
        return self.states[j] + self.f[:, :, j].unsqueeze(-1)

    def _term(self, j):
        return self.k[:, :, j].unsqueeze(-1) + self.v[:, :, j].unsqueeze(-2)  # (B, H, d_k, E)

    def _log_sums(self, j, t):
        """log_S of query t (B, H, 1, E) from the state after key j, and the share of each feature (B, H, d_k, E)."""
        terms = self.q[:, :, t].unsqueeze(-1) + self.states[j + 1]
        log_S = terms.logsumexp(-2, keepdim=True)
        return log_S, _share(terms, log_S)

    def forward(self):
        """[log_y, log_s, log_z] and their units."""
        ys, units = {}, {}
        for j, queries in enumerate(self.reads):
            for t in queries:
                log_S, share = self._log_sums(j, t)
                size = (share * (_size(self.q[:, :, t]).unsqueeze(-1) + self.state_sizes[j + 1])).sum(-2)
                ys[t] = (log_S[..., :-1] - log_S[..., -1:]).squeeze(-2)
                units[t] = 1 + size[..., :-1] + size[..., -1:]
        last, size = self.states[-1], 1 + self.state_sizes[-1]
        return Sizes(
            [torch.stack([ys[t] for t in range(len(ys))], 2), last[..., :-1], last[..., -1]],
            [torch.stack([units[t] for t in range(len(ys))], 2), size[..., :-1], size[..., -1]],
        )

    def backward(self, g_y, g_s, g_z, units):
        """Gradients of q, k, log_v, log_f, log_s and log_z, and their units; units are those of log_y."""
        values = self._flow(g_y, -1, g_s, g_z)
        flow = self._flow(g_y.abs(), 1, g_s.abs(), g_z.abs())
        last = 1 + self.state_sizes[-1]
        reach = self._flow(g_y.abs() * units, 1, g_s.abs() * last[..., :-1], g_z.abs() * last[..., -1])
        # A weight is an exponential of its own term, too; that of the largest is the most it can be.
        own_k, own_v = (_size(x).amax(-1, keepdim=True) for x in (self.k, self.v))
        own_s = self.state_sizes[0].amax((-1, -2), keepdim=True)
        own = [_size(self.q).amax(-1, keepdim=True), own_k + own_v, own_k + own_v, 0, own_s, own_s.squeeze(-1)]
        units = [b + a * (1 + size) for a, b, size in zip(flow, reach, own, strict=True)]
        # A gate's gradient is a sum of those of q and k over its chunk, which cancel.
        around = units[0] + units[1] if units[0].shape == units[1].shape else units[1]
        around = torch.nn.functional.pad(around.sum(-1, keepdim=True), (0, 0, 63, 63)).unfold(2, 127, 1).sum(-1)
        units[3] = units[3] + around
        return Sizes(values, units)

    def _flow(self, g_y, sign, g_s, g_z):
        g_y = torch.cat([g_y, sign * g_y.sum(-1, keepdim=True)], -1).double()
        g = torch.cat([g_s, g_z.unsqueeze(-1)], -1).double()
        g_q, g_k, g_v, g_f = (torch.zeros_like(x) for x in (self.q, self.k, self.v, self.f))
        for j in reversed(range(len(self.reads))):
            for t in self.reads[j]:
                _, share = self._log_sums(j, t)
                read = g_y[:, :, t].unsqueeze(-2) * share
                g_q[:, :, t] = read.sum(-1)
                g = g + read
            written = g * _share(self._term(j), self.states[j + 1])
            g_k[:, :, j], g_v[:, :, j] = written.sum(-1), written.sum(-2)
            g = g * _share(self._before(j), self.states[j + 1])
            g_f[:, :, j] = g.sum((-1, -2)).unsqueeze(-1)
        return [g_q, g_k, g_v[..., :-1], g_f, g[..., :-1], g[..., -1]]
