"""log_attention at the ends of the range of exponentials, and which inputs need its fallback.

Random inputs of all ranges are in test_log_attention_fuzz.py.
"""

import math

import gradients
import pytest
import torch
from gradients import FAST_SLOW, FORMS_SLOW, INTERPRETED

from model.ops.log_attention import BACKENDS, LogAttentionState, log_attention, naive_log_attention

FAST = [name for name in BACKENDS if name != "naive"]
FORMS = [("chunked", True), ("chunked", False), ("triton", True)]
"""Backend and whether attention is causal."""


def normal(T, sd=1, H=2, sizes=(16, 16, 24)):
    generator = torch.Generator().manual_seed(0)
    return [sd * torch.randn(1, H, T, d, generator=generator) for d in sizes]  # q, k, log_v


def log_y_and_gradients(inputs, causal, backend):
    leaves = [x.clone().requires_grad_() for x in inputs]
    log_y = log_attention(*leaves, causal=causal, backend=backend)
    weights = torch.randn(log_y.shape, generator=torch.Generator().manual_seed(1))
    return log_y.detach(), torch.autograd.grad(log_y, leaves, weights)


@pytest.mark.parametrize(("backend", "causal"), FORMS_SLOW)
def test_a_value_that_is_zero_in_every_token_stays_zero_spoils_no_gradient_and_needs_no_fallback(backend, causal):
    """Padding queries in the last chunk do not count as having terms either."""
    q, k, log_v = normal(T=70, H=1)
    log_v[:, :, :, 3] = -torch.inf
    results = []
    run = lambda: results.extend(log_y_and_gradients([q, k, log_v], causal, backend))  # noqa: E731
    assert tiles(run) == (0, 0)
    log_y, gradients = results
    assert (log_y[..., 3] == -torch.inf).all()
    assert all(x.isfinite().all() for x in gradients)
    others = [0, 1, 2, *range(4, 24)]
    wanted = log_attention(q, k, log_v[..., others], causal=causal, backend=backend)
    torch.testing.assert_close(log_y[..., others], wanted, rtol=0, atol=1e-5)


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
    inputs = normal(T=130)
    inputs[which][..., 3] = mask
    if which == 1:
        assert tiles(lambda: log_y_and_gradients(inputs, True, "chunked")) == (0, 0)
    _, state = log_attention(*inputs, return_state=True, backend="chunked")
    _, wanted = naive_log_attention(*(x.double() for x in inputs), return_state=True)
    for a, b in zip(state, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("backend", "causal"), FORMS)
def test_keys_and_states_may_be_beyond_what_bfloat16_is_made_for(backend, causal):
    """If a key's and a row's frame are both out of range, the sum is doubtful, but not NaN."""
    k = torch.full((1, 1, 2, 1), 700, dtype=torch.bfloat16)
    q, log_v = torch.full_like(k, 100), torch.zeros_like(k)
    assert log_attention(q, k, log_v, causal=causal, backend=backend).flatten().tolist() == [0, 0]
    state = LogAttentionState(torch.full((1, 1, 1, 1), 701.0), torch.full((1, 1, 1), 700.0))
    assert log_attention(q, k - 700, log_v, causal=causal, state=state, backend=backend).flatten().tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["chunked", pytest.param("triton", marks=INTERPRETED)])
@pytest.mark.parametrize(
    ("q", "k", "log_v", "wanted"),
    [  # d_k = 1, in float64
        ([0, 0], [0, 0], [0, 2428544158], [0, 2428544158 - math.log(2)]),
        ([-1e9, -2e9, -1e9], [1e9, 2e9, 2e9], [0, 5, 5], [0, 5, 5]),
        ([0, 0, 0], [-torch.inf, 0, 0], [1e30, -torch.inf, 3], [torch.nan, -torch.inf, 3 - math.log(2)]),
        ([0, 0, 0], [0, 0, 0], [-torch.inf, -torch.inf, torch.nan], [-torch.inf, -torch.inf, torch.nan]),
        ([0, 0], [0, 0], [-1e30, -1e30], [-1e30, -1e30]),
    ],
    ids=["value beyond all frames", "keys beyond", "a value of a masked key", "NaN after nothing", "all masked"],
)
def test_extremes_beside_nothing_are_exact(backend, q, k, log_v, wanted):
    inputs = [torch.tensor(x, dtype=torch.float64).view(1, 1, -1, 1) for x in (q, k, log_v)]
    log_y = log_attention(*inputs, backend=backend).flatten()
    wanted = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(log_y, wanted, rtol=1e-14, atol=1e-14, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "T"), [("chunked", 2), ("auto", 1), pytest.param("triton", 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("key", [-torch.inf, -1e4])
@torch.no_grad()
def test_a_state_keeps_its_bits_through_a_million_calls_with_nothing_new(backend, T, key):
    """A call is a function of the state alone: if one returns the bits that it got, so do all later ones.

    The first calls may round, because sums are exponentials of the state. A GPU's own logarithm may go on doing so
    where the result is near 0.
    """
    torch.manual_seed(0)
    size = torch.cat([torch.logspace(-2, 5.5, 63), torch.tensor([127.95])])  # below 2^20 ln 2, where frames end
    log_z = torch.cat([size, -size] if key == -torch.inf else [size]).view(1, -1, 8)
    given = before = state = LogAttentionState(log_z.unsqueeze(-1) + torch.randn(*log_z.shape, 3), log_z)
    tokens = torch.zeros(1, log_z.shape[1], T, 8)
    for _ in range(8):
        before = state
        _, state = log_attention(
            tokens, tokens + key, tokens[..., :3], state=before, return_state=True, backend=backend
        )
    for first, second, last in zip(given, before, state, strict=True):
        assert ((second == last) | (last.is_cuda & (first.abs() < 2))).all()
        assert ((last - first).abs() <= 1e-6 * first.abs().clamp(min=1)).all()


def tiles(run):
    before = gradients.tiles()
    run()
    return tuple(after - n for after, n in zip(gradients.tiles(), before, strict=True))


@pytest.mark.parametrize(("backend", "causal"), FORMS_SLOW)
def test_ordinary_inputs_never_need_the_fallback(backend, causal):
    inputs = normal(T=200, sd=3)
    assert tiles(lambda: log_y_and_gradients(inputs, causal, backend)) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FAST_SLOW)
@pytest.mark.parametrize("steepest", [1e-4, 8, 1e4])
def test_gates_and_resets_never_need_the_fallback(backend, steepest):
    """Nor do values that are zero since a reset."""
    reset, inputs = 77, normal(T=150, sd=3)
    log_f = -steepest * torch.rand(1, 2, 150, 1, generator=torch.Generator().manual_seed(0))
    log_f[:, 1, reset] = -torch.inf
    inputs[2][:, 1, reset:, 0] = -torch.inf
    results = []
    run = lambda: results.extend(log_y_and_gradients([*inputs, log_f], True, backend))  # noqa: E731
    assert tiles(run) == (0, 0)
    log_y, gradients = results
    assert all(x.isfinite().all() for x in gradients)
    alone, _ = log_y_and_gradients([x[:, 1:, reset:] for x in (*inputs, log_f)], True, backend)
    torch.testing.assert_close(log_y[:, 1:, reset:], alone)
    assert (alone[..., 0] == -torch.inf).all()


RESETS = [(33, 0), (130, 0), (200, 70)]
"""Tokens, and the reset among them: first with a state, then with earlier tokens in the chunk."""


@pytest.mark.parametrize("which", ["keys", "a feature", "values"])
@pytest.mark.parametrize(
    ("backend", "key", "place"),
    [
        *(("chunked", key, place) for place, key in enumerate([-torch.inf, -40, -torch.inf])),
        # exp(-35) is below 2^-40, by which a frame of the kernels can shrink. What is below 2^-64 falls back.
        *(pytest.param("triton", key, place, marks=pytest.mark.slow) for key, place in [(-torch.inf, 1), (-35, 0)]),
    ],
)
def test_masked_and_tiny_keys_after_a_reset_are_no_reason_to_fall_back(backend, place, key, which):
    """What a reset separates has sums of its own, also if they are much smaller."""
    torch.manual_seed(0)
    T, reset = RESETS[place]
    inputs, log_f = normal(T), torch.zeros(1, 2, T, 1)
    log_f[:, :, reset] = log_f[:, :1, min(reset + 9, T - 1)] = -torch.inf  # a second one, in one head
    place = inputs[2 if which == "values" else 1][:, :, reset:]
    (place[..., 3] if which == "a feature" else place).fill_(key)
    z = torch.randn(1, 2, 16)
    state = LogAttentionState(z.unsqueeze(-1) + torch.randn(1, 2, 16, 24), z)
    leaves = [x.requires_grad_() for x in (*inputs, log_f, *state)]

    def attend(backend, *leaves):
        *inputs, log_s, log_z = leaves
        log_y, after = log_attention(*inputs, state=LogAttentionState(log_s, log_z), return_state=True, backend=backend)
        return [log_y, *after]

    results, weights, gradients = [], [], []

    def run():
        results.extend(attend(backend, *leaves))
        weights.extend(torch.randn(x.shape).masked_fill(~x.isfinite(), 0) for x in results)
        gradients.extend(torch.autograd.grad(results, leaves, weights))

    assert tiles(run) == (0, 0)
    assert all(x.isfinite().all() for x in gradients)
    leaves = [x.detach().double().requires_grad_() for x in leaves]
    wanted = attend("naive", *leaves)
    for a, b in zip(results, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-5, equal_nan=True)
    if key > -torch.inf:  # the definition has no gradients of nothing
        wanted = torch.autograd.grad(wanted, leaves, [x.double() for x in weights])
        for a, b in zip(gradients, wanted, strict=True):  # sums of up to 3,000 numbers of about 1, rounded by 6e-8
            torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-4)


@pytest.mark.parametrize(
    ("backend", "T", "most"), [("chunked", 640, 4), pytest.param("triton", 130, 3, marks=pytest.mark.slow)]
)
def test_the_fallback_is_for_the_chunks_that_need_it(backend, T, most):
    inputs = normal(T, sizes=(4, 4, 3))
    inputs[2][:, 0, 100] += 300  # in the second chunk of one of two heads
    forward, backward = tiles(lambda: log_y_and_gradients(inputs, True, backend))
    assert forward == 1
    assert 1 <= backward <= most  # with triton, all chunks of the head


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FAST_SLOW)
def test_a_hostile_input_needs_the_fallback_everywhere_and_gives_the_same_bits_twice(backend):
    inputs = normal(T=65, sd=200, H=1, sizes=(4, 4, 3))
    results = []
    for _ in range(2):
        run = lambda: results.append(log_y_and_gradients(inputs, True, backend))  # noqa: E731
        assert tiles(run) == (2, 2)
    (y, gradients), (same_y, same_gradients) = results
    assert torch.equal(y, same_y)
    assert all(torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))
