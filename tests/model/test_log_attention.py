"""log_attention against its definition and against numbers computed by the published code."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from gradients import FAST_SLOW, FORMS_SLOW, INTERPRETED, assert_all_close, tiles
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from model.ops.log_attention import BACKENDS, LogAttentionState, log_attention, naive_log_attention

GOLDEN = Path(__file__).parents[1] / "golden" / "published_log_attention.safetensors"


@functools.cache
def golden():
    return load_file(GOLDEN)


def inputs(T, S=None, d_k=5, d_v=7, B=2, H=3, gates=False):
    """q, k, log_v, the state of earlier tokens, and gates if wanted: leaves that require gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, d_k), (S or T, d_k), (S or T, d_v), (d_k, d_v), (d_k,), (T, 1)]
    *tensors, z = (torch.randn(B, H, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    tensors += [torch.nn.functional.logsigmoid(z + 1)] * gates
    return [x.requires_grad_() for x in tensors]


def results_and_gradients(attend, leaves, **options):
    """log_y, the state after, and every leaf's gradient of a random weighted sum of all three."""
    q, k, log_v, log_s, log_z, *gates = leaves
    log_y, state = attend(q, k, log_v, *gates, state=LogAttentionState(log_s, log_z), return_state=True, **options)
    outputs = [log_y, *state]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
    loss = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "form", "scale"),
    [
        *itertools.product(["naive", "chunked"], ["causal", "full"], [1, 5, 20, 80, 200]),
        pytest.param("triton", "causal", 1, marks=[INTERPRETED, pytest.mark.slow]),
        pytest.param("triton", "causal", 80, marks=[INTERPRETED, pytest.mark.slow]),
        pytest.param("triton", "causal", 200, marks=[INTERPRETED, pytest.mark.slow]),
    ],
)
def test_log_attention_gives_the_published_numbers(backend, form, scale, device):
    heads = slice(1 if (backend, scale) == ("triton", 200) else None)  # where Triton's interpreter takes ten seconds
    file = {name: tensor[:, heads].to(device) for name, tensor in golden().items()}
    leaves = [file[f"scale{scale}/{name}"].clone().requires_grad_() for name in ("q", "k", "log_v")]
    log_y = log_attention(*leaves, causal=form == "causal", backend=backend)
    gradients = torch.autograd.grad(log_y, leaves, file[f"scale{scale}/{form}/grad_out"])
    wanted = [file[f"scale{scale}/{form}/{name}"] for name in ("log_y", "dq", "dk", "dlog_v")]
    assert_all_close([log_y, *gradients], wanted, 1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "T", "S", "form"),
    [
        *(("chunked", T, T, form) for T in (1, 2, 63, 64, 65, 130) for form in ("causal", "gates")),
        ("chunked", 4097, 4097, "causal"),
        *(("chunked", T, S, "full") for T, S in [(1, 1), (1, 63), (130, 7), (63, 1000), (65, 65)]),
        pytest.param("triton", 65, 65, "gates", marks=INTERPRETED),
        pytest.param("triton", 1, 1, "gates", marks=[INTERPRETED, pytest.mark.slow]),
        pytest.param("triton", 130, 130, "causal", marks=[INTERPRETED, pytest.mark.slow]),
    ],
)
def test_log_attention_equals_the_definition_with_state_and_all_gradients(backend, T, S, form):
    leaves = inputs(T, S, gates=form == "gates", **({"B": 1, "H": 1} if T > 130 or backend == "triton" else {}))
    got = results_and_gradients(log_attention, leaves, causal=form != "full", backend=backend)
    wanted = results_and_gradients(naive_log_attention, leaves, causal=form != "full")
    # Sums of at most 4097 terms of either sign and size about 1, each with rounding of 1.1e-16 a few operations deep.
    assert_all_close(got, wanted, 1e-11)


@pytest.mark.parametrize(
    ("backend", "d_k", "d_v"), [("chunked", 64, 256), ("triton", 20, 70), ("triton", 128, 128), ("triton", 64, 256)]
)
@pytest.mark.slow
def test_heads_may_have_any_size(backend, d_k, d_v):
    leaves = inputs(70, d_k=d_k, d_v=d_v, B=1, H=1)
    got = results_and_gradients(log_attention, leaves, backend=backend)
    assert_all_close(got, results_and_gradients(naive_log_attention, leaves), 1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *itertools.product(BACKENDS, [torch.float16, torch.bfloat16, torch.float32]),
        *itertools.product(["naive", "chunked"], [torch.float64]),
        pytest.param("triton", torch.float64, marks=INTERPRETED),
    ],
)
def test_results_and_gradients_have_the_types_of_inputs_and_a_state_is_at_least_float32(backend, dtype):
    """Inputs are parts of one projection, in which heads lie side by side."""
    projection = torch.cat([x.detach() for x in inputs(20, B=1, H=2)[:3]], -1).transpose(1, 2).to(dtype).contiguous()
    leaves = [x.detach().requires_grad_() for x in projection.transpose(1, 2).split([5, 5, 7], dim=-1)]
    truths = [x.detach().double().requires_grad_() for x in leaves]
    (log_y, state), truth = log_attention(*leaves, return_state=True, backend=backend), naive_log_attention(*truths)
    assert {x.dtype for x in state} == {torch.promote_types(dtype, torch.float32)}
    weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(log_y, leaves, weights), torch.autograd.grad(truth, truths, weights.double())
    # Numbers below 8 are rounded once, or products of three rounded factors, above the rounding of float32 sums.
    for a, b in [(log_y, truth), *zip(*gradients, strict=True)]:
        assert a.dtype == dtype
        atol = max(4 * torch.finfo(dtype).eps, 4e-6) * b.abs().max().clamp(min=1).item()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "causal"), FORMS_SLOW)
@pytest.mark.usefixtures("restored_torch")
def test_every_element_of_a_result_is_written(backend, causal):
    sizes = inputs(70, d_k=20, d_v=70, B=1, H=1)  # that fill no block
    leaves = [x.detach().float().requires_grad_() for x in sizes]
    wanted = results_and_gradients(log_attention, leaves, causal=causal, backend=backend)
    torch.use_deterministic_algorithms(True)  # empty memory is now filled with NaN
    got = results_and_gradients(log_attention, leaves, causal=causal, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("backend", ["naive", *FAST_SLOW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_changes_no_bit_of_what_came_before_it(backend, dtype):
    x = [3 * y.detach().to(dtype) for y in inputs(70, B=1, H=1)[:3]]
    for t, change in itertools.product((1, 33, 63, 64, 69), (-20, 0.1, 7)):
        changed = [y.clone() for y in x]
        for y in changed:
            y[:, :, t:] += change
        tiles_before = tiles()
        before, after = (log_attention(*tensors, backend=backend)[:, :, :t] for tensors in (x, changed))
        if tiles() == tiles_before:
            assert torch.equal(before, after)
        else:  # a later token drove the chunk into the fallback: the same numbers, by another way
            torch.testing.assert_close(before, after, rtol=2e-6, atol=2e-5)


@pytest.mark.gpu
def test_triton_returns_what_the_next_projection_takes_as_it_is():
    log_y = log_attention(*(x.float() for x in inputs(3)[:3]), backend="triton")
    assert log_y.transpose(1, 2).is_contiguous()  # (B, T, H, d_v)


def allocations(run):
    """(largest, peak) of the bytes that torch allocates on the CPU while it runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(sizes), max(itertools.accumulate(sizes))


def forward_and_backward(backend, H, T, d, causal):
    leaves = [torch.randn(1, H, T, d, requires_grad=True) for _ in range(3)]
    weights = torch.randn(1, H, T, d)
    return lambda: torch.autograd.grad(log_attention(*leaves, causal=causal, backend=backend), leaves, weights)


@pytest.mark.parametrize(("backend", "causal"), FORMS_SLOW)
def test_nothing_of_size_T_dk_dv_is_built_forward_or_backward(backend, causal):
    d, bytes_of_a_number = 64, 4
    small, large = (allocations(forward_and_backward(backend, 1, T, d, causal))[0] for T in (256, 1024))
    assert large <= 2 * 1024 * (d + 4) * bytes_of_a_number  # O(T (d_k + d_v)), not T d_k d_v = 32 times that
    assert large <= 4.1 * small
    naive, _ = allocations(forward_and_backward("naive", 1, 256, d, causal))
    assert naive >= 256 * d * d * bytes_of_a_number or not causal  # the measure sees what it is meant to see


@pytest.mark.parametrize("backend", FAST_SLOW)
def test_peak_memory_is_at_most_8_times_the_inputs(backend):
    H, T, d = 2, 512, 32
    _, peak = allocations(forward_and_backward(backend, H, T, d, causal=True))
    assert peak <= 8 * 3 * H * T * d * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 1, 4, 2)}, "do not match"),
        ({"q": torch.zeros(1, 1, 5, 3)}, "causal=False"),
        ({"q": torch.zeros(1, 1, 0, 3), "causal": False}, "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"q": torch.zeros(1, 1, 3, 3), "k": torch.zeros(1, 1, 3, 3), "log_v": torch.zeros(1, 1, 3, 2)} | change
    with pytest.raises(ValueError, match=message):
        log_attention(**arguments)


@pytest.mark.parametrize("T", [1, 3])  # a single token has a path of its own
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(("log_s", "log_z"), [((1, 2, 3, 2), (1, 2, 1)), ((1, 1, 3, 2), (1, 1, 3))])
@torch.no_grad()
def test_a_state_that_does_not_fit_is_refused(T, backend, log_s, log_z):
    q, k, log_v = torch.zeros(1, 2, T, 3), torch.zeros(1, 2, T, 3), torch.zeros(1, 2, T, 2)
    state = LogAttentionState(torch.zeros(log_s), torch.zeros(log_z))
    with pytest.raises(ValueError, match=r"^state has log_s .* they must be \(1, 2, 3, 2\) and \(1, 2, 3\)$"):
        log_attention(q, k, log_v, state=state, backend=backend)
