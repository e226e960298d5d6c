"""The GPU kernels of log_attention in Triton's interpreter: each against some lines of plain torch, and all of them
against the definition."""

from typing import NamedTuple

import agreement
import pytest
import torch
from gradients import FORMS
from torch import Tensor
from torch.nn.functional import pad

from common.numbers import ceil_div
from model.ops.log_attention import gpu_kernels as kernels
from model.ops.log_attention import naive_attention as definition
from model.ops.log_attention import triton_attention as operator
from model.ops.log_attention.gpu_kernels import States, SumGrads

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter; test_kernels.py is for GPUs")

B, H = 1, 2


def in_chunks(x, C, fill):
    """(..., T, D) -> (..., N, C, D), where `fill` pads the last chunk."""
    return pad(x, (0, 0, 0, -x.shape[-2] % C), value=fill).unflatten(-2, (-1, C))


def tokens(T, sizes, gates):
    """q, k, v and log_f of random tokens: gates down to -`gates`, with resets; None for 0."""
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(B, T, H, sum(sizes), generator=generator).transpose(1, 2)
    log_f = -gates * torch.rand(B, T, H, 1, generator=generator).transpose(1, 2)
    if T > 1:
        log_f[:, :, [T // 3, T // 2]] = torch.tensor([-torch.inf, -200.0])[:, None]
    return [*projection.split(sizes, -1), log_f if gates else None]


class Twin(NamedTuple):
    """What kernels compute, in float64 and in chunks (B, H, N, C, .); E = d_v + 1."""

    e_q: Tensor
    e_k: Tensor
    e_v: Tensor
    start: Tensor
    end: Tensor
    within: Tensor
    M: Tensor
    """(B, H, N, d_k, E): any state before each chunk."""
    D: Tensor
    """(B, H, N, d_k, E): any gradient of the state after each chunk."""
    A: Tensor
    sums: Tensor


class Case:
    """The arguments of kernels, and their twin."""

    def __init__(self, form, gates, T, sizes):
        x = tokens(T, sizes, gates)
        self.P = P = operator._constants(*x, form)
        self.x, self.T, self.N = operator._inputs(*x), T, ceil_div(T, P.C)
        self.blocks = ceil_div(P.D_V, P.BV)
        q, k, v, log_f = (None if t is None else t.double() for t in x)
        e_q, e_k = definition._features(in_chunks(q, P.C, 0.0), in_chunks(k, P.C, -torch.inf), form)
        e_v = pad(in_chunks(v.exp() if form.log else v, P.C, 1.0 if form.log else 0.0), (0, 1), value=1.0)
        a = in_chunks((torch.zeros_like(q[..., :1]) if log_f is None else log_f).clamp(min=-1000), P.C, 0.0).cumsum(-2)
        start, end, within = a.exp(), (a[..., -1:, :] - a).exp(), (a - a.mT).tril().exp().tril()
        M, D = self.random(P.D_K, P.D_V + 1).exp(), self.random(P.D_K, P.D_V + 1)
        A = within * (e_q @ e_k.mT)
        self.twin = Twin(e_q, e_k, e_v, start, end, within, M, D, A, start * (e_q @ M) + A @ e_v)

    def random(self, *shape):
        return torch.randn(B, H, self.N, *shape, generator=torch.Generator().manual_seed(shape[-1])).double()

    def empty(self, *shape):
        """To be written by a kernel. What it leaves out is NaN."""
        return torch.full((B * H, self.N, *shape), torch.nan)

    def states(self, M=None):
        """For a kernel: those of a tensor (B, H, N, d_k, E), or empty."""
        if M is None:
            return States(self.empty(self.P.D_K, self.P.D_V), self.empty(self.P.D_K))
        M = M.float().flatten(0, 1)
        return States(M[..., :-1].contiguous(), M[..., -1].contiguous())

    def decays(self):
        return self.twin.start[..., -1, 0].float().flatten(0, 1).contiguous()

    def launch(self, kernel, *arguments, by_block=False):
        grid = (B * H * self.N, self.blocks) if by_block else (B * H * self.N,)
        options = {} if by_block else {"BLOCKS": self.blocks}
        kernel[grid](*arguments, H, self.T, P=self.P, **options, **operator._options(self.P))


def joined(states):
    """States of a kernel: (B, H, N, d_k, E)."""
    return torch.cat([states.M, states.z.unsqueeze(-1)], -1).unflatten(0, (B, H))


def assert_close(found, truth):
    """`found` has the shape of `truth`, (B, H, T, .), or (B H, ...)."""
    if found.shape[:1] != truth.shape[:1]:
        found = found.unflatten(0, (B, H))
    assert found.shape == truth.shape
    assert (found - truth).abs().max() <= 2e-5 * truth.abs().max()


def whole(chunks, case):
    """(B, H, N, C, D) -> (B, H, T, D)."""
    return chunks.flatten(2, 3)[:, :, : case.T]


def derivative(e, case):
    return e if case.P.EXP else e.clamp(max=1)


CASES = [
    *((name, 0.3, 70, (20, 20, 12)) for name in FORMS),
    ("log_space", 0, 70, (20, 20, 12)),
    ("linear", 0, 33, (16, 16, 100)),
    ("signed", 0.3, 1, (40, 40, 16)),
]


@pytest.fixture(params=CASES, ids=str)
def case(request):
    """Padded features and columns; two blocks of columns; chunks of 32 tokens."""
    name, *others = request.param
    return Case(FORMS[name], *others)


def test_states(case):
    t = case.twin
    added, decays = case.states(), case.empty()
    case.launch(kernels.states, case.x, added, decays, by_block=True)
    assert_close(joined(added), (t.end * t.e_k).mT @ t.e_v)
    if case.P.GATED:
        assert_close(decays, t.start[..., -1, 0])


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(case, reverse):
    added, decays = case.states(case.twin.M), case.decays()
    M, total = case.twin.M.clone(), case.twin.D[:, :, 0]
    first, last = total.float().contiguous(), torch.full(total.shape, torch.nan)
    for n in reversed(range(case.N)) if reverse else range(case.N):
        M[:, :, n], total = total, M[:, :, n] + case.twin.start[:, :, n, -1:] * total
    operator._scan(added, decays, first, last, reverse, case.P)
    assert_close(joined(added), M)
    assert_close(last, total)


def test_outputs(case):
    t = case.twin
    y = torch.full((B, H, case.T, case.P.D_V), torch.nan)
    case.launch(kernels.outputs, case.x, case.states(t.M), operator._tokens(y), by_block=True)
    truth = t.sums[..., :-1] / t.sums[..., -1:]
    assert_close(y, whole(truth.log() if case.P.LOG else truth, case))


def test_query_grads(case):
    t, P = case.twin, case.P
    g_y = case.random(P.C, P.D_V).flatten(2, 3)[:, :, : case.T].float()
    g_q = torch.full((B, H, case.T, P.D_K), torch.nan)
    g_of, D = SumGrads(case.empty(P.C, P.D_V), case.empty(P.C), case.empty(P.C)), case.states()
    case.launch(kernels.query_grads, case.x, operator._tokens(g_y), case.states(t.M), operator._tokens(g_q), g_of, D)
    values, norm = t.sums[..., :-1], t.sums[..., -1:]
    g = in_chunks(g_y.double(), P.C, 0.0) / (values if P.LOG else norm)
    g = torch.cat([g, -(g * values).sum(-1, keepdim=True) / norm], -1)
    g_e = (t.start * g) @ t.M.mT + (t.within * (g @ t.e_v.mT)) @ t.e_k
    assert_close(torch.cat([g_of.sums, g_of.norms.unsqueeze(-1)], -1), g)
    assert_close(joined(D), t.e_q.mT @ (t.start * g))
    assert_close(g_q, whole(g_e * derivative(t.e_q, case), case))
    if P.GATED:
        assert g_of.queries.abs().max() <= 1e-5 * (g * t.sums).abs().max()


def test_key_grads(case):
    t, P = case.twin, case.P
    g, rows = case.random(P.C, P.D_V + 1), case.random(P.C)
    *sums, queries = (x.float().flatten(0, 1).contiguous() for x in (g[..., :-1], g[..., -1], rows))
    grads = [torch.full((B, H, case.T, d), torch.nan) for d in (P.D_K, P.D_K, P.D_V, 1)]
    states = case.states(t.M), SumGrads(*sums, queries), case.states(t.D)
    case.launch(kernels.key_grads, case.x, *states, operator._inputs(*grads))
    g_e = (t.end * t.e_v) @ t.D.mT + (t.within * (g @ t.e_v.mT)).mT @ t.e_q
    g_v = (t.A.mT @ g + (t.end * t.e_k) @ t.D)[..., :-1]
    assert_close(grads[1], whole(g_e * derivative(t.e_k, case), case))
    assert_close(grads[2], whole(g_v * t.e_v[..., :-1] if P.LOG else g_v, case))
    if P.GATED:
        after = t.start[..., -1:, :] * t.M + (t.end * t.e_k).mT @ t.e_v
        own = rows - torch.linalg.vecdot(g_e, t.e_k)
        g_f = own.flip(-1).cumsum(-1).flip(-1) + (after * t.D).sum((-2, -1)).unsqueeze(-1)
        is_reset = in_chunks(case.x.log_f.pointer, P.C, 0.0) <= kernels.RESET.value
        assert_close(grads[3], whole(g_f.unsqueeze(-1).masked_fill(is_reset, 0), case))


BFLOAT16, FLOAT16, FLOAT32 = ([dtype] * 3 for dtype in (torch.bfloat16, torch.float16, torch.float32))


@pytest.mark.parametrize(
    ("form", "dtypes", "sizes"),
    [
        ("log_space", [*FLOAT32, torch.float32], (16, 16, 24, 1)),
        ("linear", [*BFLOAT16, torch.float32], (20, 20, 16, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("log_space", BFLOAT16, (64, 64, 32)),
                ("log_space", [*BFLOAT16, torch.float32], (128, 128, 128, 1)),
                ("log_space", [torch.bfloat16, torch.float32, *BFLOAT16[:2]], (40, 40, 16, 1)),
                ("signed", [*FLOAT16, torch.float32], (32, 32, 20, 1)),
                ("signed", FLOAT32, (20, 20, 100)),
                ("linear", FLOAT16, (64, 64, 64)),
            ]
        ),
    ],
)
def test_the_operator_agrees_with_the_definition(form, dtypes, sizes):
    agreement.compare_log_attention("cpu", dtypes, sizes, lengths=(65, 33), form=FORMS[form])
