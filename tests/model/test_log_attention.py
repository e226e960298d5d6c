"""log_attention in all its forms against its definition, the paper's, and numbers of the published code."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from agreement import compare
from gradients import CAUSAL_SLOW, FAST_SLOW, FORMS, assert_all_close
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from model.ops.log_attention import (
    LINEAR,
    LOG_SPACE,
    SIGNED,
    chunked_attention,
    log_attention,
    naive_log_attention,
)
from model.ops.log_attention.naive_attention import KEY, QUERY, VALUE

GOLDEN = Path(__file__).parents[1] / "golden" / "published_log_attention.safetensors"


@functools.cache
def golden():
    return load_file(GOLDEN)


def inputs(T, S=None, d_k=5, d_v=7, B=2, H=3, gates=False, dtype=torch.float64):
    """q, k, v, the state of earlier tokens, and gates if wanted, by name."""
    generator = torch.Generator().manual_seed(T)
    shapes = {"q": (T, d_k), "k": (S or T, d_k), "log_v": (S or T, d_v), "state": (d_k, d_v + 1), "log_f": (T, 1)}
    x = {name: torch.randn(B, H, *s, generator=generator, dtype=torch.float64).to(dtype) for name, s in shapes.items()}
    x["state"].exp_()
    x["log_f"] = torch.nn.functional.logsigmoid(x["log_f"] + 1)
    if not gates:
        del x["log_f"]
    return x


def paper(q, k, log_v, causal):
    """Heinsen 2024, eqs. 4-6: sums in log space."""
    kv = k.unsqueeze(-1) + log_v.unsqueeze(-2)  # (B, H, S, d_k, d_v)
    log_s, log_z = (x.logcumsumexp(2) if causal else x.logsumexp(2, keepdim=True) for x in (kv, k))
    return (q.unsqueeze(-1) + log_s).logsumexp(-2) - (q + log_z).logsumexp(-1, keepdim=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "form"), itertools.product(["naive", "chunked"], ["causal", "full"]))
@pytest.mark.parametrize("scale", [1, 5, 20, 200])
def test_log_attention_gives_the_published_numbers(backend, form, scale, device):
    """Scales 20 and 200 are beyond the bounds: their numbers are those of `paper` for bounded inputs."""
    file = {name: tensor.to(device) for name, tensor in golden().items()}
    leaves = [file[f"scale{scale}/{name}"].clone().requires_grad_() for name in ("q", "k", "log_v")]
    log_y = log_attention(*leaves, causal=form == "causal", backend=backend)
    gradients = torch.autograd.grad(log_y, leaves, file[f"scale{scale}/{form}/grad_out"])
    wanted = [file[f"scale{scale}/{form}/{name}"] for name in ("log_y", "dq", "dk", "dlog_v")]
    assert_all_close([log_y, *gradients], wanted, 1e-9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("deviation", [1, 4, 100])
def test_the_definition_is_the_papers_within_bounds_and_bounded_beyond(causal, deviation):
    """The derivative is the paper's at the bounded inputs."""
    leaves = [deviation * x for x in list(inputs(20).values())[:3]]
    q, k, log_v = leaves
    bounded = [(q - q.amax(-1, keepdim=True)).clamp(*QUERY), k.clamp(*KEY), log_v.clamp(*VALUE)]
    if deviation < 10:  # logarithms of features of a query are relative
        assert torch.equal(bounded[1], k)
        assert torch.equal(bounded[2], log_v)
        bounded[0] = q
    results = []
    for form, x in ((naive_log_attention, leaves), (paper, bounded)):
        x = [y.clone().requires_grad_() for y in x]
        y = form(*x, causal=causal)
        results.append([y, *torch.autograd.grad(y.sin().sum(), x)])
    assert_all_close(*results, 1e-12)


def test_the_definition_of_linear_attention_is_the_papers():
    """Katharopoulos et al. 2020, eqs. 7 and 8, one pair of tokens at a time."""
    q, k, v = list(inputs(31).values())[:3]
    phi = lambda x: torch.nn.functional.elu(x) + 1  # noqa: E731
    rows = []
    for i in range(31):
        weights = [(phi(q[:, :, i]) * phi(k[:, :, j])).sum(-1, keepdim=True) for j in range(i + 1)]
        rows.append(sum(w * v[:, :, j] for j, w in enumerate(weights)) / sum(weights))
    assert_all_close([naive_log_attention(q, k, v, form=LINEAR)], [torch.stack(rows, dim=2)])


def test_signed_values_are_weighed_by_a_softmax():
    q, k, v = list(inputs(31).values())[:3]
    scores = (q.unsqueeze(3) + k.unsqueeze(2)).logsumexp(-1)  # (B, H, T, T)
    wanted = scores.masked_fill(~torch.ones(31, 31, dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ v
    assert_all_close([naive_log_attention(q, k, v, form=SIGNED)], [wanted])


def by(attend, **options):
    """The operator as `compare` wants it."""

    def attended(**leaves):
        y, after = attend(**leaves, return_state=True, **options)
        return {"y": y, "the state": after}

    return attended


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("T", "S", "kind"),
    [
        *((T, T, kind) for T in (1, 2, 63, 65, 130, 600) for kind in ("causal", "gates")),
        *((T, S, "full") for T, S in [(1, 1), (130, 7), (63, 200)]),
    ],
)
def test_chunks_equal_the_definition_with_state_and_all_gradients(form, T, S, kind, monkeypatch):
    monkeypatch.setattr(chunked_attention, "STEP", 64 * 3 * 5)  # many steps
    options = {"form": FORMS[form], "causal": kind != "full"}
    leaves = inputs(T, S, gates=kind == "gates")
    compare(kind, by(log_attention, backend="chunked", **options), by(naive_log_attention, **options), leaves)


LAYOUTS = {
    "contiguous": lambda x: x,
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "last heads first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_may_have_any_type_and_layout(dtype, layout):
    leaves = {name: LAYOUTS[layout](x) for name, x in inputs(70, gates=True, dtype=dtype).items()}
    leaves["state"] = leaves["state"].float()
    y, after = log_attention(**leaves, return_state=True)
    assert (y.dtype, after.dtype) == (dtype, torch.float32)
    compare(layout, by(log_attention, backend="chunked"), by(naive_log_attention), leaves)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gates", [False, True])
@torch.no_grad()
def test_token_by_token_equals_the_whole_and_states_join(form, gates):
    x = inputs(70, gates=gates, dtype=torch.float32)
    state, form = x.pop("state"), FORMS[form]
    y, after = log_attention(**x, form=form, state=state, return_state=True)
    step, ys = state, []
    for t in range(70):
        token = {name: value[:, :, t : t + 1] for name, value in x.items()}
        y_t, step = log_attention(**token, form=form, state=step, return_state=True)
        ys.append(y_t)
    # Each token adds one rounding of 6e-8 to a state.
    torch.testing.assert_close(torch.cat(ys, 2), y, rtol=0, atol=70 * 6e-8)
    torch.testing.assert_close(step, after, rtol=70 * 6e-8, atol=0 if form.log else 1e-4)
    first, second = ({name: value[:, :, part] for name, value in x.items()} for part in (slice(40), slice(40, None)))
    _, M_1 = log_attention(**first, form=form, state=state, return_state=True)
    _, M_2 = log_attention(**second, form=form, return_state=True)
    decay = second["log_f"].sum(2, keepdim=True).exp() if gates else 1
    torch.testing.assert_close(decay * M_1 + M_2, after, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_triton_returns_what_the_next_projection_takes_as_it_is():
    x = inputs(3, dtype=torch.float32)
    log_y = log_attention(x["q"], x["k"], x["log_v"], backend="triton")
    assert log_y.transpose(1, 2).is_contiguous()  # (B, T, H, d_v)


def allocations(run):
    """(largest, peak) of the bytes that torch allocates on the CPU while it runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(sizes), max(itertools.accumulate(sizes))


def forward_and_backward(backend, H, T, d, causal, form=LOG_SPACE):
    leaves = [torch.randn(1, H, T, d, requires_grad=True) for _ in range(3)]
    weights = torch.randn(1, H, T, d)
    return lambda: torch.autograd.grad(
        log_attention(*leaves, form=form, causal=causal, backend=backend), leaves, weights
    )


@pytest.mark.parametrize(("backend", "causal"), CAUSAL_SLOW)
def test_nothing_of_size_T_T_or_T_dk_dv_is_built_forward_or_backward(backend, causal):
    d, bytes_of_a_number = 64, 4
    small, large = (allocations(forward_and_backward(backend, 1, T, d, causal))[0] for T in (256, 1024))
    assert large <= 2 * 1024 * (d + 4) * bytes_of_a_number  # O(T (d_k + d_v)), not T d_k d_v = 32 times that
    assert large <= 4.1 * small
    naive, _ = allocations(forward_and_backward("naive", 1, 1024, d, causal))
    assert naive >= 1024 * 1024 * bytes_of_a_number  # the measure sees what it is meant to see


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", FAST_SLOW)
def test_peak_memory_is_at_most_8_times_the_inputs(backend, form):
    H, T, d = 2, 512, 32
    _, peak = allocations(forward_and_backward(backend, H, T, d, causal=True, form=FORMS[form]))
    assert peak <= 8 * 3 * H * T * d * 4


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("k", (1, 2, 4, 2)),
        ("q", (1, 2, 5, 3)),
        ("log_f", (1, 2, 3, 5)),
        ("state", (1, 2, 3, 2)),
        ("state", (1, 1, 3, 3)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, shape):
    inputs = {"q": torch.zeros(1, 2, 3, 3), "k": torch.zeros(1, 2, 3, 3)}
    inputs["log_v"] = torch.zeros(1, 2, 3, 2)
    inputs[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=rf"{name} .*do not fit: need \(B, H, T, d_k\)"):
        log_attention(**inputs)
