"""log_attention on unusual random inputs: every backend, type and layout against the definition."""

import itertools
import random

import numpy as np
import pytest
import torch
from definition import Definition

from model.ops.log_attention import LogAttentionState, log_attention
from model.ops.log_attention.exponentials import CERTAIN

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# A sum may be off by so many units in the last place of its size: three exponents and their frames are rounded, and so
# are products of three factors, sums over features, a chunk and all chunks, and the logarithm. Observed: a fifth of it.
ROUNDINGS = 16
LOWEST = [torch.finfo(torch.bfloat16).min, -1e30, -1e13, -1e9, -2e6, -1.1e6, -1e4, -750]
EXTREMES = [*LOWEST, 0, 700, 3e4, 1.1e6, 2e6, 1e9, 1e13, 1e30]


class Case:
    """One random call, which may be causal; `largest` bounds B H T d_k d_v, `longest` B H T and B H S."""

    def __init__(self, seed, structure, dtype, layout, gates, causal, largest, longest):
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        while True:
            B, H = rng.choice([(1, 1), (1, 3), (2, 1), (2, 2)])
            T = rng.choice([1, 2, 3, 63, 64, 65, 128, rng.randint(1, 20), rng.randint(1, 300)])
            d_k, d_v = (rng.choice([1, 2, 3, 8, rng.randint(1, 70)]) for _ in range(2))
            self.causal = causal or gates or rng.random() < 0.7
            S = T if self.causal else rng.choice([T, rng.randint(1, 200)])
            if B * H * max(T, S) * d_k * d_v <= largest and B * H * max(T, S) <= longest:
                break
        self.dtype = dtype
        shapes = [(B, H, T, d_k), (B, H, S, d_k), (B, H, S, d_v)]
        tensors = [torch.randn(shape, dtype=torch.float64) * 10 ** rng.uniform(-3, 4) for shape in shapes]
        self.structures = [*rng.choices(list(STRUCTURES), k=rng.choice([0, 0, 1, 2])), structure]
        for name in self.structures:
            STRUCTURES[name](rng, *tensors)
        largest_number = torch.finfo(self.dtype).max / 4
        tensors = [x.clamp(max=largest_number).to(self.dtype) for x in tensors]  # large masks of float16 become -inf
        self.layout = layout
        self.q, self.k, self.log_v = (x.requires_grad_() for x in LAYOUTS[self.layout](tensors))
        acc = torch.promote_types(self.dtype, torch.float32)
        self.state = None
        log_s = torch.full((B, H, d_k, d_v), -torch.inf, dtype=acc)
        log_z = torch.full((B, H, d_k), -torch.inf, dtype=acc)
        if rng.random() < 0.4:
            log_z = torch.randn(B, H, d_k, dtype=acc) * 10 ** rng.uniform(-3, 3)
            log_s = log_z.unsqueeze(-1) + torch.randn(B, H, d_k, d_v, dtype=acc) * 10 ** rng.uniform(-3, 3)
            if rng.random() < 0.3:
                log_s[..., rng.randrange(d_v)] = rng.choice([-torch.inf, -1e9, 2e6])
            if rng.random() < 0.3:
                feature = rng.randrange(d_k)
                log_z[..., feature], log_s[..., feature, :] = -torch.inf, -torch.inf
            self.state = LogAttentionState(log_s.requires_grad_(), log_z.requires_grad_())
        self.log_f = None
        self.token_by_token = torch.finfo(torch.float64).eps
        if gates and self.causal:
            self.log_f = _gates(rng, (B, H, T, 1)).to(self.dtype).requires_grad_()
        self.definition = Definition(
            *(x.detach() for x in (self.q, self.k, self.log_v, log_s, log_z)),
            causal=self.causal,
            log_f=None if self.log_f is None else self.log_f.detach(),
        )

    def __repr__(self):
        sizes = f"q {tuple(self.q.shape)}, S={self.k.shape[2]}, d_v={self.log_v.shape[3]}, {self.dtype}"
        given = f"causal={self.causal}, state={self.state is not None}, gates={self.log_f is not None}"
        return f"{sizes}, {given}, {self.layout}, {self.structures}"


def _gates(rng, shape):
    """Gates as a model has them, some of other sizes, and some resets."""
    log_f = torch.nn.functional.logsigmoid(rng.uniform(-2, 6) + torch.randn(shape, dtype=torch.float64))
    others = torch.tensor(rng.choices([0.0, -1e-6, -0.3, -8.0, -30.0, -1e4], k=log_f.numel())).view(shape)
    log_f = torch.where(torch.rand(shape) < rng.choice([0, 0.1, 1]), others, log_f)
    for _ in range(rng.choice([0, 0, 1, 3])):
        log_f[:, rng.randrange(shape[1]), rng.randrange(shape[2])] = -torch.inf
    return log_f


def _some(rng, n):
    """A stretch of n tokens or features, or single ones, or all."""
    start, stop = sorted((rng.randint(0, n), rng.randint(0, n)))
    return rng.choice([slice(start, stop), slice(0, stop), slice(None, None, rng.randint(1, 7)), slice(None)])


def _set(value, *which):
    def change(rng, *qkv):
        x = qkv[rng.choice(which)]
        x[:, rng.randrange(x.shape[1]) :, _some(rng, x.shape[2]), _some(rng, x.shape[3])] = value(rng)

    return change


def _spike(rng, *qkv):
    x = rng.choice(qkv)
    x[:, :, rng.randrange(x.shape[2])] += rng.choice([-1, 1]) * 10 ** rng.uniform(1, 4)


def _below(rng, q, k, log_v):
    """Numbers whose exponentials are zero: a frame far below 1 gives a factor far above 1."""
    rng.choice([k, log_v]).sub_(300)


def _masked_pieces(rng, q, k, log_v):
    """Keys and values that do not count for a chunk, a half of one or a token: a state is empty until the next."""
    for x, share in ((k, 0.6), (log_v, 0.3)):
        pieces = torch.arange(x.shape[2]).split(rng.choice([1, 32, 64]))
        for tokens, feature in itertools.product(pieces, range(x.shape[3])):
            if rng.random() < share:
                x[:, :, tokens, feature] = rng.choice([-torch.inf, *LOWEST, -90])


STRUCTURES = {
    "constant": _set(lambda rng: rng.uniform(-100, 100), 0, 1, 2),
    "spike": _spike,
    "masked pieces": _masked_pieces,
    "values of zero": _set(lambda rng: -torch.inf, 2),
    "extreme": _set(lambda rng: rng.choice(EXTREMES), 0, 1, 2),
    "below": _below,
    "NaN": _set(lambda rng: torch.nan, 0, 1, 2),
}


def _as_one_projection(tensors):
    """In the model's layout: slices of (B, T, H, all features); queries are separate if their number differs."""
    q, k, log_v = tensors
    together = [q, k, log_v] if q.shape[2] == k.shape[2] else [k, log_v]
    parts = torch.cat(together, -1).transpose(1, 2).contiguous().split([x.shape[3] for x in together], -1)
    parts = [x.transpose(1, 2) for x in parts]
    return [x.detach() for x in (parts if len(parts) == 3 else [q, *parts])]


LAYOUTS = {
    "contiguous": lambda tensors: tensors,
    "projection": _as_one_projection,
    "gaps": lambda tensors: [torch.stack([x, x], -1)[..., 0] for x in tensors],
    "one head for all": lambda tensors: [x[:, :1].expand_as(x) for x in tensors],
    "last heads first": lambda tensors: [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors],
}


def assert_within(name, got, truth, unit, dtype, operand_eps, case, lost=0.0):
    """Errors are at most those of rounding the operands, the sums and the result, plus what may underflow."""
    acc = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert torch.equal(got.isnan(), truth.isnan()), f"{name} of {case}: NaN"
    checked = truth.isfinite() & (unit * acc * ROUNDINGS < 1)  # beyond, float32 does not know the result
    token_by_token = case.token_by_token * case.k.shape[2]  # how the definition sums
    allowed = (ROUNDINGS * acc + token_by_token) * unit + operand_eps * (unit if name.startswith("g") else 1)
    allowed = allowed + torch.finfo(got.dtype).eps * truth.abs() + torch.finfo(got.dtype).tiny + lost
    fits = torch.where(checked, (got - truth).abs() <= allowed, truth.isfinite() | (got == truth)) | truth.isnan()
    fits |= (got == truth.sign() * torch.inf) & (truth.abs() > torch.finfo(got.dtype).max)  # of float16
    if not fits.all():
        at = tuple(x[0].item() for x in (~fits).nonzero(as_tuple=True))
        raise AssertionError(
            f"{name} of {case} at {at}: {got[at].item()}, truth {truth[at].item()}, allowed {allowed[at].item()}, "
            f"{(~fits).sum().item()} of {fits.numel()} wrong"
        )


def check(seed, backend, structure, largest=2**16, longest=300):
    """Compare a call with the definition. Seeds that follow each other have all types and layouts, and gates."""
    dtype, layout = DTYPES[seed % 4], list(LAYOUTS)[seed % 5]
    case = Case(seed, structure, dtype, layout, seed % 3 == 0, backend == "triton", largest, longest)
    if backend == "naive" and case.log_f is not None:
        case.token_by_token = torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps
    truth = case.definition.forward()
    operand_eps = 0.0
    if backend == "triton" and case.dtype in (torch.bfloat16, torch.float16):
        operand_eps = 4 * torch.finfo(case.dtype).eps  # four factors of a term are rounded
    log_y, state = log_attention(
        case.q, case.k, case.log_v, case.log_f, causal=case.causal, state=case.state, return_state=True, backend=backend
    )
    outputs = [log_y, *state]
    acc = torch.promote_types(case.dtype, torch.float32)
    assert [x.dtype for x in outputs] == [case.dtype, acc, acc]
    for name, got, wanted, unit in zip(("log_y", "log_s", "log_z"), outputs, *truth, strict=True):
        assert_within(name, got.detach(), wanted, unit, case.dtype, operand_eps, case)

    generator = torch.Generator().manual_seed(seed)
    gs = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    if case.rng.random() < 0.5:  # as in training, where nobody reads the state
        gs[1:] = [torch.zeros_like(x) for x in gs[1:]]
    gs = [g.masked_fill(~x.isfinite(), 0) for g, x in zip(gs, truth.values, strict=True)]
    leaves = [x for x in (case.q, case.k, case.log_v, case.log_f, *(case.state or ())) if x is not None]
    if any(x.isnan().any() for x in leaves):
        return  # gradients are NaN, in places that are nobody's concern
    if backend == "naive" and (case.dtype != torch.float64 or any((x == -torch.inf).any() for x in leaves)):
        return  # its float32 gradients know nothing of extremes, and all are NaN at -inf
    got = torch.autograd.grad(outputs, leaves, gs)
    wanted = case.definition.backward(*(g.double() for g in gs), truth.units[0].nan_to_num(0))
    # What underflows is, of a sum that is certain, at most this; and tokens may share it.
    lost = torch.finfo(acc).tiny / CERTAIN[acc] * sum(g.double().abs().sum().item() for g in gs)
    names = ["g_q", "g_k", "g_v", "g_f", "g_s", "g_z"]
    compared = [x for x in zip(names, *wanted, strict=True) if x[0] != "g_f" or case.log_f is not None]
    for x, (name, *of_definition) in zip(got, compared, strict=False):
        assert_within(name, x, *of_definition, case.dtype, 2 * operand_eps, case, lost)

    if case.causal:  # in pieces, single tokens among them, without gradients
        T, state, parts = case.q.shape[2], case.state, []
        cuts = sorted(case.rng.sample(range(1, T), min(T - 1, case.rng.choice([0, 1, 3]))))
        with torch.no_grad():
            for start, stop in zip([0, *cuts], [*cuts, T], strict=True):
                tensors = (case.q, case.k, case.log_v, case.log_f)
                piece = (None if x is None else x[:, :, start:stop] for x in tensors)
                pick = "auto" if stop - start == 1 and backend == "chunked" else backend
                y, state = log_attention(*piece, state=state, return_state=True, backend=pick)
                parts.append(y)
        # A state that is handed over has been rounded once more, as has each term in it.
        for name, x, value, unit in zip(
            ("log_y", "log_s", "log_z"), [torch.cat(parts, 2), *state], *truth, strict=True
        ):
            assert_within(f"{name} in pieces", x, value, 2 * unit, case.dtype, 2 * operand_eps, case)


@pytest.fixture(autouse=True)
def maxima_of_gpus(monkeypatch):
    """Maxima and minima in Triton's interpreter ignore NaN unless told otherwise, as GPUs do; numpy's do not."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax))
    monkeypatch.setattr(InterpreterBuilder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("backend", "n"), [("naive", 2), ("chunked", 6)])
def test_every_structure_gives_the_definitions_numbers(backend, n, structure):
    start = 7 * list(STRUCTURES).index(structure)
    for seed in range(start, start + n):
        check(seed, backend, structure)


@pytest.mark.parametrize(
    ("structure", "segments"),
    [("masked pieces", 1)]
    + [pytest.param(name, 1 + 2 * (i % 2), marks=pytest.mark.slow) for i, name in enumerate(STRUCTURES)],
)
def test_every_structure_gives_the_definitions_numbers_by_the_kernels(monkeypatch, structure, segments):
    """Triton's interpreter is slow."""
    monkeypatch.setattr("model.ops.log_attention.triton.fastest_segments", lambda *_: segments)
    check(3 * list(STRUCTURES).index(structure) + segments, "triton", structure, 2**12, 70 if segments == 1 else 140)
