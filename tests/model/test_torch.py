"""The model with PyTorch's features: compiled, under autocast, with recomputed activations, as a pure function."""

import itertools
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from model.gpt import GPT, GPTConfig
from model.ops.linear_cross_entropy import _summed_loss
from model.ops.log_attention import log_attention
from model.ops.log_attention.chunked import _attend, _attend_backward
from model.ops.log_attention.triton import _attend as _attend_triton
from model.ops.log_recurrence import _recur, _recur_backward

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"attention": {"name": "log_space"}, "block": {"name": "mlp"}, "position": {"name": "log_recurrence"}}


def build(**sizes):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**{"n_vocab": 11, "n_layer": 2, "n_head": 3, "n_embd": 12, **PARTS, **sizes}))
    return gpt.to(ids().device)


def ids(T=70):
    return torch.randint(11, (2, T), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(gpt, loss):
    gpt.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in gpt.parameters())]


@pytest.mark.parametrize("T", [1, 64, 70])
@pytest.mark.slow
def test_operators_keep_the_promises_that_torch_asks_of_them(T):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, T, 5), (1, 2, T, 5), (1, 2, T, 7), (1, 2, 5, 8)]
    q, k, log_v, log_s = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    torch.library.opcheck(_attend, (q, k, log_v, None, log_s, True, True))
    torch.library.opcheck(_attend, (q, k, log_v, None, log_s, False, True))
    log_p = (-torch.rand(2, T, 5, generator=generator)).requires_grad_()
    start = torch.randn(2, 5, generator=generator).requires_grad_()
    torch.library.opcheck(_recur, (log_p, k[0].detach().float().requires_grad_(), start, "chunked"))


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.slow
def test_kernels_keep_the_promises_that_torch_asks_of_them(T):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, T, 5), (1, 2, T, 5), (1, 2, T, 8), (1, 2, 5, 8), (1, 2, 5)]
    q, k, log_v, *state = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    log_f = (-torch.rand(1, 2, T, 1, generator=generator, dtype=torch.float64)).requires_grad_()
    torch.library.opcheck(_attend_triton, (q, k, log_v, log_f, *state, True, True))
    torch.library.opcheck(_attend_triton, (q, k, log_v, None, None, None, False, True))
    without_grad = (None if x is None else x.detach() for x in (q, k, log_v, log_f, *state))
    torch.library.opcheck(_attend_triton, (*without_grad, True, False))


@pytest.mark.slow
def test_kernels_compile_without_a_graph_break_and_are_recomputed_to_the_same_bits():
    def attend(qkv):
        q, k, log_v = qkv.view(2, 70, 3, -1).transpose(1, 2).split([5, 5, 7], dim=-1)
        return log_attention(q, k, log_v, backend="triton").transpose(1, 2).reshape(2, 70, -1)

    qkv = torch.randn(2, 70, 3 * 17, generator=torch.Generator().manual_seed(0), requires_grad=True)
    results = [
        attend(qkv),
        torch.compile(attend, fullgraph=True, backend="aot_eager")(qkv),
        checkpoint(attend, qkv, use_reentrant=False),
    ]
    gradients = [torch.autograd.grad(y, qkv, torch.ones_like(y))[0] for y in results]
    assert all(torch.equal(y, results[0]) for y in results)
    assert all(torch.equal(g, gradients[0]) for g in gradients)


@pytest.mark.parametrize("T", [1, 64, 70])
def test_fakes_have_the_strides_of_results(T):
    """Compiled code relies on this, and opcheck does not check it."""
    x, narrow, s = torch.randn(2, T, 3, 15), torch.randn(2, 3, 5, 6), torch.zeros(2, T, 4)
    q, k, log_v = (part.transpose(1, 2) for part in x.split(5, dim=-1))
    *_, M, doubtful = _attend(q, k, log_v, None, narrow, True, True)
    calls = [
        (_attend, (q, k, log_v, None, narrow, True, True)),
        (_attend_backward, ([log_v, narrow], [q, k, log_v, None, narrow], M, doubtful, True)),
        (_recur, (s, s, s[:, 0].clone(), "chunked")),
        (_recur_backward, (s, s, s, s[:, 0].clone(), s, "chunked")),
        (
            _summed_loss,
            (torch.randn(7, 3), torch.randn(4, 3), torch.zeros(7, dtype=torch.int64), True, None, "chunked"),
        ),
    ]
    for operator, arguments in calls:
        with FakeTensorMode() as mode:
            fakes = operator(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        found = operator(*arguments)
        for fake, real in zip(*((y,) if isinstance(y, torch.Tensor) else y for y in (fakes, found)), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.slow
def test_compiled_for_one_length_it_takes_others():
    gpt = build()
    compiled = torch.compile(gpt.loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in range(70, 500, 36):  # more of them than torch would compile apart
        batch = ids(T)
        torch.testing.assert_close(compiled(batch[:, :-1], batch[:, 1:]), gpt.loss(batch[:, :-1], batch[:, 1:]))


def test_the_backward_pass_may_have_another_number_of_threads():
    x = torch.randn(1, 24, 512, 32, requires_grad=True)
    (wanted,) = torch.autograd.grad(log_attention(x, x, x).sum(), x)
    y = log_attention(x, x, x)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        (got,) = torch.autograd.grad(y.sum(), x)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_compiles_without_a_graph_break_forward_and_backward():
    gpt = build()
    compiled = torch.compile(gpt.loss, fullgraph=True, backend="aot_eager")
    got = loss_and_gradients(gpt, compiled(ids()[:, :-1], ids()[:, 1:]))
    wanted = loss_and_gradients(gpt, gpt.loss(ids()[:, :-1], ids()[:, 1:]))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_sums_stay_float32_under_autocast(device):
    """The result differs from float32 by what bfloat16 does to the linear layers: 8 bits in each of a few."""
    gpt = build()
    exact = gpt.loss(ids()[:, :-1], ids()[:, 1:])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        _, state = gpt(ids(), return_state=True)
        loss = gpt.loss(ids()[:, :-1], ids()[:, 1:])
    assert {x.dtype for layer in state.layers for x in layer} == {torch.float32}
    assert state.position.dtype == torch.float32
    assert loss.item() != exact.item()
    torch.testing.assert_close(loss, exact, rtol=2**-7, atol=0)
    assert all(x.isfinite().all() for x in loss_and_gradients(gpt, loss))


def test_is_a_pure_function_of_its_parameters():
    gpt, other = build(), build(n_layer=2)
    doubled = {name: 2 * p for name, p in gpt.named_parameters()}
    other.load_state_dict(doubled)
    assert torch.equal(functional_call(gpt, doubled, (ids(),)), other(ids()))


@pytest.mark.gpu
@pytest.mark.usefixtures("restored_torch")
def test_deterministic_algorithms_are_enough():
    gpt = build()
    torch.use_deterministic_algorithms(True)
    results = [loss_and_gradients(gpt, gpt.loss(ids()[:, :-1], ids()[:, 1:])) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("capability", "dtype", "d", "states"),
    [
        (90, "bfloat16", 32, [False, True]),
        (90, "float32", 16, [False]),
        (90, "float64", 16, [False]),
        (100, "bfloat16", 32, [False, True]),
    ],
)
@pytest.mark.slow
def test_kernels_compile_for_gpus_that_are_not_here(kernel_resources, capability, dtype, d, states):
    cases = [
        {
            "capability": capability,
            "operator": "log_attention",
            "dtype": dtype,
            "d": d,
            "gates": gates,
            "carried": state,
        }
        for gates, state in itertools.product([False, True], states)
    ]
    rows = kernel_resources(*cases)
    kernels = ["forward_sweep", "exact_forward", "backward_sweep", "exact_backward"]
    assert [row["kernel"] for row in rows] == kernels * len(cases)
    assert all(row["shared"] <= 99 * 1024 for row in rows)  # which every GPU from 8.0 on has


def test_functions_of_kernels_may_return_none_in_triton_3_6(monkeypatch):
    semantic = pytest.importorskip("triton.language.semantic").TritonSemantic
    constexpr = pytest.importorskip("triton.language").constexpr
    from model.ops.log_attention.triton_arguments import _let_functions_return_none

    monkeypatch.setattr(semantic, "to_tensor", lambda self, x, check_type=True: ("a tensor of", x))
    _let_functions_return_none()
    none, one = constexpr(None), constexpr(1)
    assert semantic.to_tensor(None, none) is none
    assert semantic.to_tensor(None, one) == ("a tensor of", one)


TYPED = """
import sys
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import JITFunction
sys.path.append('tests/model')
from kernel_resources import compiled, launch_log_attention
class Typed(Exception):
    pass
def stop(*_):
    raise Typed
def stages_up_to_types(backend, stages, *rest):
    add_stages(backend, stages, *rest)
    stages["ttgir"] = stop
def run_up_to_types(kernel, *arguments, **options):
    try:
        run(kernel, *arguments, **options)
    except Typed:
        pass
    print(kernel.__name__)  # compiled up to here, or whole in Triton's cache
add_stages, CUDABackend.add_stages = CUDABackend.add_stages, stages_up_to_types
run, JITFunction.run = JITFunction.run, run_up_to_types
import torch
for gates, of_values in [(False, "float32"), (True, "bfloat16")]:
    compiled(lambda: launch_log_attention(torch.bfloat16, 32, gates, True, getattr(torch, of_values)), 90)
"""


def test_kernels_that_carry_a_state_have_sound_types(run_process):
    """The compiler's first stage, which the interpreter lacks: a variable keeps its type and shape in a loop."""
    pytest.importorskip("triton.backends.nvidia")
    [result] = run_process(["-c", TYPED])
    assert result.status == 0, result.err
    assert result.out.split() == 2 * ["forward_sweep", "exact_forward", "backward_sweep", "exact_backward"]
