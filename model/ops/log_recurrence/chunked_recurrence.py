"""The position recurrence in chunks: all chunks step through their C tokens in parallel, then the
carry is added.

Let A be the running sum of log_p inside a chunk, and s_in the value of the recurrence before the
chunk:

    s_t = logaddexp(local_t, A_t + s_in)

where local_t is the recurrence of the chunk alone, from an empty sum.

A starts from 0 in every chunk, so its rounding error does not grow with the sequence. (The
published form sums log_p over the whole sequence, and its error grows with T.)

The backward pass is a linear recurrence in reverse, in chunks too. a_t = p_t exp(s_{t-1} - s_t) is
the share of s_{t-1} in s_t, at most 1, and G_t the gradient of output t:

    gradient of s_t through all later outputs   g_t = G_t + a_{t+1} g_{t+1}
    gradients of log_p_t and h_t                g_t a_t and g_t exp(h_t - s_t)

The carry between chunks is in float64: if almost nothing is forgotten, the rounding errors of all
chunks add up.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

# Tokens: T / C chunks of C steps take C + T / C dependent steps, fewest near C = sqrt(T).
STEPS = 32


def forward(log_p: Tensor, h: Tensor, start: Tensor) -> Tensor:
    """log_p (B, T, D), h (B, T, D), start (B, D) -> s (B, T, D) in the type of start."""
    T = h.shape[1]
    log_p = _split(log_p.to(start.dtype), 0.0)  # (B, N, C, D)
    h = _split(h.to(start.dtype), -torch.inf)
    _, N, C, _ = h.shape
    local = h.clone()
    A = log_p.clone()
    for t in range(1, C):
        torch.logaddexp(local[:, :, t - 1] + log_p[:, :, t], h[:, :, t], out=local[:, :, t])
        A[:, :, t] += A[:, :, t - 1]  # not cumsum, which is not deterministic on GPUs
    last = local[:, :, -1].double()  # (B, N, D)
    log_decay = log_p.double().sum(2)
    carried = [start.double()]  # s before each chunk
    for n in range(N - 1):
        carried.append(torch.logaddexp(last[:, n], log_decay[:, n] + carried[-1]))
    A.add_(torch.stack(carried, 1).to(A.dtype).unsqueeze(2))
    s = torch.logaddexp(local, A)
    return s.flatten(1, 2)[:, :T].contiguous()


def backward(
    g_s: Tensor, log_p: Tensor, h: Tensor, start: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of log_p, h and start, given the gradient of s."""
    wide_p = log_p.to(s.dtype)
    previous = torch.cat([start.unsqueeze(1), s[:, :-1]], dim=1)
    a = (wide_p + previous - s).exp_()  # (B, T, D)
    # The product of a over the tokens after a chunk's first, up to the next chunk's first. All s
    # but those of the two firsts cancel. The sum of log_p begins one token later: hence the roll.
    first = s[:, :: min(STEPS, s.shape[1])].double()  # (B, N, D)
    log_decay = _split(wide_p.roll(-1, 1), 0.0).double().sum(2)
    across = (log_decay[:, :-1] + first[:, :-1] - first[:, 1:]).exp_()
    a_of_next = pad(a[:, 1:], (0, 0, 0, 1))
    g = _reverse_linear_recurrence(a_of_next, g_s, across)
    g_p = g * a
    g_h = g.mul_((h.to(s.dtype) - s).exp_())
    return g_p.to(log_p.dtype), g_h.to(h.dtype), g_p[:, 0].clone()


def _reverse_linear_recurrence(a: Tensor, g: Tensor, across: Tensor) -> Tensor:
    """r_t = g_t + a_t r_{t+1}, from the last token to the first; (B, T, D) all.

    across (B, N - 1, D): the product of a from each chunk's first token to the next chunk's first
    token, in float64.
    """
    T = g.shape[1]
    a = _split(a, 0.0)  # (B, N, C, D)
    r = _split(g, 0.0).clone()
    _, N, C, _ = r.shape
    for t in reversed(range(C - 1)):
        r[:, :, t].addcmul_(a[:, :, t], r[:, :, t + 1])
    later = r[:, :, 0].to(torch.float64, copy=True)  # (B, N, D): first r of each chunk
    for n in reversed(range(N - 1)):
        later[:, n].addcmul_(across[:, n], later[:, n + 1])
    # Share of the next chunk's first r in each r of this chunk.
    weight = a.flip(2).cumprod(2).flip(2)
    r[:, :-1].addcmul_(weight[:, :-1], later[:, 1:].to(r.dtype).unsqueeze(2))
    return r.flatten(1, 2)[:, :T].contiguous()


def _split(x: Tensor, fill: float) -> Tensor:
    """(B, T, D) -> (B, N, C, D): a view, unless the last chunk must be padded."""
    C = min(STEPS, x.shape[1])
    missing = -x.shape[1] % C
    if missing:
        x = pad(x, (0, 0, 0, missing), value=fill)
    return x.unflatten(1, (-1, C))
