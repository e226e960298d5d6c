"""log_attention is exact at any range: against the definition in float64, on inputs made to break exponentials."""

import itertools
import math
import random

import pytest
import torch

from model.ops.log_attention import BACKENDS, LogAttentionState, fallback, log_attention, naive_log_attention

FAST = [name for name in BACKENDS if name != "naive"]
FAST_SLOW = ["chunked", pytest.param("triton", marks=pytest.mark.slow)]  # triton's interpreter takes seconds
FORMS = [("chunked", True), ("chunked", False), ("triton", True)]
FORMS_SLOW = [("chunked", True), ("chunked", False), pytest.param("triton", True, marks=pytest.mark.slow)]
"""Backend and whether attention is causal, as it must be for triton."""
NOTHING = -5000  # its exponential is 0, in float64 too


def cases(values, few):
    """FORMS with all values, and with few for triton, whose interpreter takes seconds for a fallback."""
    slow = {"triton": pytest.mark.slow}
    return [
        pytest.param(name, causal, value, marks=slow.get(name, ()) if value > 5 else ())
        for name, causal in FORMS
        for value in (few if name == "triton" else values)
    ]


def size(backend):
    """More than one chunk; see `cases`."""
    return {"T": 70, "H": 1} if backend == "triton" else {"T": 200, "H": 2}


def normal(T=200, sd_q=1, sd_k=1, sd_v=1, seed=0, H=2):
    """q, k, log_v in float64, of numbers that float32 has."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, H, T, 16), (1, H, T, 16), (1, H, T, 24)]
    parts = (torch.randn(shape, generator=generator) * sd for shape, sd in zip(shapes, (sd_q, sd_k, sd_v), strict=True))
    return [x.double() for x in parts]


def log_y_and_gradients(attend, inputs, causal, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    log_y = attend(*leaves, causal=causal, **options)
    weights = torch.randn(log_y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return log_y.detach(), torch.autograd.grad(log_y, leaves, weights.to(log_y.dtype))


def largest(x):
    return x.double().abs().nan_to_num(0, posinf=0).amax().item()


def tolerance(q, k, log_v):
    """The largest error that a logarithm may have in float32, on any machine.

    An exponent q + k + log_v is rounded by eps / 2 of its size, once among the values and once in the normalizer; the
    result, no larger than log_v, is rounded by eps / 2 of its size when its frame is added and when it is stored. Each
    addition rounds too, by eps / 2 of the sum, up or down: n of them err by about sqrt(n) as much as one.
    """
    sizes = [largest(x[x > NOTHING]) for x in (q, k, log_v)]
    return torch.finfo(torch.float32).eps * (sum(sizes) + sizes[2] + (k.shape[2] + k.shape[3]) ** 0.5)


def assert_exact(inputs, causal, backend, truth_inputs=None):
    """float32 against float64: the errors are within `tolerance`, and nothing is lost.

    A gradient is a sum of shares, which are exponentials of logarithms, times numbers of either sign. Errors of the
    shares average out like the shares, so the gradients' error relative to the largest equals a logarithm's error.
    """
    exact = truth_inputs or inputs
    truth, true_gradients = log_y_and_gradients(naive_log_attention, exact, causal)
    own, own_gradients = log_y_and_gradients(log_attention, [x.float() for x in inputs], causal, backend=backend)
    assert torch.equal(own == -torch.inf, truth == -torch.inf)
    finite = truth.isfinite()
    assert own[finite].isfinite().all()
    assert largest((own - truth)[finite]) <= tolerance(*exact)
    scale = max(largest(x) for x in true_gradients)
    for x, y in zip(own_gradients, true_gradients, strict=True):
        assert x[y.isfinite()].isfinite().all()
        assert largest((x - y)[y.isfinite()]) / scale <= tolerance(*exact)


@pytest.mark.parametrize(("backend", "causal", "sd"), cases([1, 5, 20, 200], few=[5, 200]))
@pytest.mark.parametrize("which", ["all", "q", "k", "v"])
def test_standard_deviations_together_and_each_alone(backend, causal, sd, which):
    wide = {f"sd_{name}": sd for name in "qkv" if which in ("all", name)}
    assert_exact(normal(**size(backend), **wide), causal, backend)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "causal"), FORMS_SLOW)
def test_values_of_zero_masked_keys_and_constant_rows(backend, causal):
    q, k, log_v = normal(**size(backend))
    log_v[:, :, 1::7] = -torch.inf
    k[:, :, 3::11] = -torch.inf
    # The definition's own gradient is NaN at -inf.
    truth = [x.clamp(min=NOTHING) for x in (q, k, log_v)]
    assert_exact([q, k, log_v], causal, backend, truth)
    assert_exact([torch.full_like(q, 3), torch.full_like(k, -50), torch.full_like(log_v, 90)], causal, backend)


MASKS = [-1e10, -1e30, torch.finfo(torch.bfloat16).min]


@pytest.mark.parametrize(
    ("backend", "causal", "which", "mask"),
    [
        *itertools.product(["chunked"], [True, False], [1, 2], MASKS),
        *(
            pytest.param("triton", True, which, mask, marks=pytest.mark.slow)
            for which, mask in itertools.product([1, 2], MASKS)
        ),
    ],
)
def test_a_mask_may_be_a_large_finite_number(backend, causal, which, mask):
    """In k it masks a key, in log_v it is a value of zero: among other values, and if all values are masked."""
    inputs, truth = (normal(**size(backend)) for _ in range(2))
    inputs[which][:, :, 3:9] = mask
    truth[which][:, :, 3:9] = NOTHING
    assert_exact(inputs, causal, backend, truth)
    if which == 2 and mask > -1e38:  # below, its log2 is no float32 any more
        q, k, log_v = (x.float() for x in normal(T=5))
        log_v[:] = mask
        log_y = log_attention(q, k, log_v, causal=causal, backend=backend)
        torch.testing.assert_close(log_y, log_v, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FAST_SLOW)
def test_tokens_before_which_nothing_is_seen_spoil_no_other(backend):
    """Padding at the left, next to values of zero: the padding's results are NaN, and all gradients are finite."""
    q, k, log_v = (x.float() for x in normal(T=65))
    k[:, :, :3] = -torch.inf
    log_v[..., ::2] = -torch.inf
    leaves = [x.requires_grad_() for x in (q, k, log_v)]
    log_y = log_attention(*leaves, backend=backend)
    assert log_y[:, :, :3].isnan().all()
    gradients = torch.autograd.grad(log_y[:, :, 10:, 1::2].sum(), leaves)
    assert all(x.isfinite().all() for x in gradients)


def test_a_state_may_be_lost_where_no_result_is():
    k, log_v = torch.tensor([[0.0, 0, 0], [0, -100, 0]]), torch.tensor([[-100.0, 0], [0, 0]])
    q = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    inputs = [x.view(1, 1, *x.shape) for x in (q, k, log_v)]
    got = log_attention(*inputs, causal=False, return_state=True)
    wanted = naive_log_attention(*(x.double() for x in inputs), causal=False, return_state=True)
    for a, b in zip([got[0], *got[1]], [wanted[0], *wanted[1]], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance(*inputs))


@pytest.mark.parametrize(("backend", "causal"), FORMS_SLOW)
@pytest.mark.parametrize("which", [1, 2])
def test_masked_among_numbers_whose_own_exponentials_are_zero(backend, causal, which):
    """A frame far below 1 gives a factor far above 1, and 0 times that factor must still be 0."""
    inputs, truth = (normal(**size(backend)) for _ in range(2))
    inputs[which] = (inputs[which] - 300).float().double()
    truth[which] = inputs[which].clone()
    inputs[which][:, :, 3::11] = -torch.inf
    truth[which][:, :, 3::11] = NOTHING
    assert_exact(inputs, causal, backend, truth)


@pytest.mark.parametrize(("backend", "causal"), FORMS_SLOW)
def test_a_value_that_is_zero_in_every_token_stays_zero_spoils_no_gradient_and_needs_no_fallback(backend, causal):
    """Padding queries in the last chunk do not count as having terms either."""
    q, k, log_v = (x.float() for x in normal(**size(backend)))
    log_v[:, :, :, 3] = -torch.inf
    results = []
    run = lambda: results.extend(log_y_and_gradients(log_attention, [q, k, log_v], causal, backend=backend))  # noqa: E731
    assert tiles(run) == (0, 0)
    log_y, gradients = results
    assert (log_y[..., 3] == -torch.inf).all()
    assert all(x.isfinite().all() for x in gradients)
    others = [0, 1, 2, *range(4, 24)]
    wanted = log_attention(q, k, log_v[..., others], causal=causal, backend=backend)
    torch.testing.assert_close(log_y[..., others], wanted, rtol=0, atol=2 * tolerance(q, k, log_v))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_far_below_the_rest_are_told_apart_where_queries_make_them_count(backend, dtype):
    parts = [[-1e7, 0], [-1e7, 0]], [[0, -1e9], [0, -2e6]], [[0], [5]]
    q, k, log_v = (torch.tensor(x, dtype=dtype).view(1, 1, 2, -1) for x in parts)
    log_y, state = log_attention(q, k, log_v, return_state=True, backend=backend)
    wanted, wanted_state = naive_log_attention(q.double(), k.double(), log_v.double(), return_state=True)
    assert wanted.flatten().tolist() == [0, 5]
    for a, b in zip([log_y, *state], [wanted, *wanted_state], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("mask", [-1e9, -1e30])
def test_a_feature_that_is_masked_throughout_is_no_reason_to_fall_back(which, mask):
    inputs = [x.float() for x in normal(T=130)]
    inputs[which][..., 3] = mask
    if which == 1:
        assert tiles(lambda: log_y_and_gradients(log_attention, inputs, True, backend="chunked")) == (0, 0)
    _, state = log_attention(*inputs, return_state=True, backend="chunked")
    _, wanted = naive_log_attention(*(x.double() for x in inputs), return_state=True)
    for a, b in zip(state, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("backend", "causal"), FORMS)
def test_keys_and_states_beyond_what_bfloat16_is_made_for(backend, causal):
    """If a key's and a row's frame are both out of range, the sum is doubtful, but not NaN."""
    k = torch.full((1, 1, 2, 1), 700, dtype=torch.bfloat16)
    q, log_v = torch.full_like(k, 100), torch.zeros_like(k)
    assert log_attention(q, k, log_v, causal=causal, backend=backend).flatten().tolist() == [0, 0]
    state = LogAttentionState(torch.full((1, 1, 1, 1), 701.0), torch.full((1, 1, 1), 700.0))
    assert log_attention(q, k - 700, log_v, causal=causal, state=state, backend=backend).flatten().tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(
    ("q", "k", "log_v", "wanted"),
    [  # d_k = 1, in float64
        ([0, 0], [0, 0], [0, 2428544158], [0, 2428544158 - math.log(2)]),
        ([-1e9, -2e9, -1e9], [1e9, 2e9, 2e9], [0, 5, 5], [0, 5, 5]),
        ([0, 0, 0], [-torch.inf, 0, 0], [1e30, -torch.inf, 3], [torch.nan, -torch.inf, 3 - math.log(2)]),
        ([0, 0, 0], [0, 0, 0], [-torch.inf, -torch.inf, torch.nan], [-torch.inf, -torch.inf, torch.nan]),
    ],
    ids=["value beyond all frames", "keys beyond, queries below", "a value of a masked key", "NaN after nothing"],
)
def test_extremes_beside_nothing(backend, q, k, log_v, wanted):
    inputs = [torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in (q, k, log_v)]
    log_y = log_attention(*inputs, backend=backend).flatten()
    wanted = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(log_y, wanted, rtol=1e-14, atol=1e-14, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["chunked", "auto", pytest.param("triton", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_state_that_is_passed_on_is_rounded_once(backend):
    """Each call sees one masked token, so it must return the state that it gets: a million of them change nothing.

    The first call may round, because the sums are exponentials of the state; no later call may.
    """
    size = torch.logspace(-2, 5.5, 64).view(1, 8, 8)  # below 2^20 ln 2, where frames end
    log_z = torch.cat([size, -size], 1)
    given = state = LogAttentionState(log_z.unsqueeze(-1) + torch.randn(1, 16, 8, 3), log_z)
    tokens = torch.zeros(1, 16, 1, 8), torch.full((1, 16, 1, 8), -torch.inf), torch.zeros(1, 16, 1, 3)
    states = []
    for _ in range(3 if backend == "triton" else 60):
        _, state = log_attention(*tokens, state=state, return_state=True, backend=backend)
        states.append(state)
    for first, second, last in zip(given, states[0], state, strict=True):
        large = first.abs() > 2  # for others, exp and log take some calls to settle
        assert torch.equal(second[large], last[large])
        assert ((last - first).abs() <= 1e-6 * first.abs().clamp(min=1)).all()


NEVER = [-torch.inf, -1e30, -1e13, -1e9, -2e6, -1e4, -700, -90]


@pytest.mark.parametrize(
    ("backend", "seeds", "T"),
    [("chunked", range(40), 300), pytest.param("triton", range(3), 140, marks=pytest.mark.slow)],
)
@torch.no_grad()
def test_states_after_resets_are_empty_where_the_definitions_are_and_never_nan(backend, seeds, T):
    """Masked and tiny keys and values of a chunk, a half of one or a token, with resets and steep gates between."""
    for seed in seeds:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        q, k, log_v = (torch.randn(1, 1, T, d, generator=generator, dtype=torch.float64) for d in (3, 3, 2))
        log_f = -rng.choice([0, 0.01, 30, 1e6]) * torch.rand(1, 1, T, 1, generator=generator, dtype=torch.float64)
        log_f[:, :, rng.sample(range(T), rng.randint(1, 6))] = -torch.inf
        for x, share in ((k, 0.6), (log_v, 0.3)):
            for tokens, feature in itertools.product(torch.arange(T).split(rng.choice([1, 32, 64])), range(x.shape[3])):
                if rng.random() < share:
                    x[:, :, tokens, feature] = rng.choice(NEVER)
        dtype = rng.choice([torch.float32, torch.float64])
        inputs = [x.to(dtype) for x in (q, k, log_v, log_f)]
        log_z = 100 * torch.randn(1, 1, 3, generator=generator)
        first = LogAttentionState(log_z.unsqueeze(-1).repeat(1, 1, 1, 2), log_z)
        _, state = log_attention(*inputs, state=first, return_state=True, backend=backend)
        _, wanted = naive_log_attention(*(x.double() for x in inputs), state=first, return_state=True)
        for x, y in zip(state, wanted, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-3)  # terms of size 1e4, rounded


def tiles(run):
    before = fallback.forward_tiles, fallback.backward_tiles
    run()
    return fallback.forward_tiles - before[0], fallback.backward_tiles - before[1]


@pytest.mark.parametrize(("backend", "causal"), FORMS_SLOW)
def test_ordinary_inputs_never_need_the_fallback(backend, causal):
    inputs = [x.float() for x in normal(T=200, sd_q=3, sd_k=3, sd_v=3)]
    assert tiles(lambda: log_y_and_gradients(log_attention, inputs, causal, backend=backend)) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FAST_SLOW)
@pytest.mark.parametrize("steepest", [1e-4, 8, 1e4])
def test_gates_and_resets_never_need_the_fallback(backend, steepest):
    """Nor do values that are zero since a reset."""
    reset, inputs = 77, [x.float() for x in normal(T=150, sd_q=3, sd_k=3, sd_v=3)]
    log_f = -steepest * torch.rand(1, 2, 150, 1, generator=torch.Generator().manual_seed(0))
    log_f[:, 1, reset] = -torch.inf
    inputs[2][:, 1, reset:, 0] = -torch.inf
    results = []
    run = lambda: results.extend(log_y_and_gradients(log_attention, [*inputs, log_f], True, backend=backend))  # noqa: E731
    assert tiles(run) == (0, 0)
    log_y, gradients = results
    assert all(x.isfinite().all() for x in gradients)
    alone, _ = log_y_and_gradients(log_attention, [x[:, 1:, reset:] for x in (*inputs, log_f)], True, backend=backend)
    torch.testing.assert_close(log_y[:, 1:, reset:], alone)
    assert (alone[..., 0] == -torch.inf).all()


@pytest.mark.parametrize(
    ("backend", "T", "most"), [("chunked", 640, 4), pytest.param("triton", 130, 3, marks=pytest.mark.slow)]
)
def test_the_fallback_is_for_the_chunks_that_need_it(backend, T, most):
    inputs = [x.float() for x in normal(T)]
    inputs[2][:, 0, 100] += 300  # in the second chunk of one of two heads
    forward, backward = tiles(lambda: log_y_and_gradients(log_attention, inputs, True, backend=backend))
    assert forward == 1
    assert 1 <= backward <= most  # with triton, all chunks of the head


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FAST_SLOW)
def test_a_hostile_input_needs_it_everywhere_and_gives_the_same_bits_twice(backend):
    inputs = [x.float() for x in normal(T=65, sd_q=200, sd_k=200, sd_v=200, H=1)]
    results = []
    for _ in range(2):
        run = lambda: results.append(log_y_and_gradients(log_attention, inputs, True, backend=backend))  # noqa: E731
        assert tiles(run) == (2, 2)
    (y, gradients), (same_y, same_gradients) = results
    assert torch.equal(y, same_y)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))
