"""The model with PyTorch's features: compiled, under autocast, with recomputed activations."""

import pytest
import torch
from test_gpt import ids, tiny
from test_recompute import gradients
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from model.gpt import GPT
from model.ops import custom
from model.ops.linear_cross_entropy import _summed_loss
from model.ops.log_attention.chunked_attention import _attend, _attend_backward
from model.ops.log_attention.triton_attention import _attend as _attend_triton
from model.ops.log_recurrence import _recur, _recur_backward


def build():
    torch.manual_seed(0)
    return GPT(tiny(block={"name": "mlp"})).to(ids(1).device)


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.slow
def test_operators_keep_the_promises_that_torch_asks_of_them(T):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, T, 5), (1, 2, T, 5), (1, 2, T, 7), (1, 2, T, 1), (1, 2, 5, 8)]
    q, k, log_v, log_f, M = (torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)
    state = M.detach().exp().requires_grad_()
    torch.library.opcheck(_attend, (q, k, log_v, None, state, True, True))
    torch.library.opcheck(_attend, (q, k, log_v, -log_f.detach().abs(), state, False, False))
    log_p = (-torch.rand(2, T, 5, generator=generator)).requires_grad_()
    start = torch.randn(2, 5, generator=generator).requires_grad_()
    torch.library.opcheck(_recur, (log_p, k[0].detach().float().requires_grad_(), start, "chunked"))


@pytest.mark.slow
def test_kernels_keep_the_promises_that_torch_asks_of_them():
    T = 70
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, T, 5), (1, 2, T, 5), (1, 2, T, 8), (1, 2, T, 1), (1, 2, 5, 9)]
    q, k, log_v, log_f, M = (torch.randn(s, generator=generator).requires_grad_() for s in shapes)
    state = M.detach().exp().requires_grad_()
    torch.library.opcheck(_attend_triton, (q, k, log_v, -log_f.detach().abs(), state, True, True))
    torch.library.opcheck(_attend_triton, (q, k, log_v, None, state.detach(), False, False))


@pytest.mark.parametrize(
    ("backend", "T"), [*(("chunked", T) for T in (1, 64, 70)), pytest.param("triton", 3, marks=pytest.mark.gpu)]
)
def test_fakes_have_the_strides_and_types_of_results(backend, T):
    """Compiled code relies on this, and opcheck does not check it."""
    log_p, h, s = torch.zeros(2, T, 4), torch.zeros(2, 4, T).mT, torch.zeros(2, T, 4, dtype=torch.float64)
    start, targets = s[:, 0].clone(), torch.zeros(7, dtype=torch.int64)
    calls = [
        (_recur, (log_p, h, start, backend)),
        (_recur_backward, (s, log_p, h, start, s, backend)),
        (_summed_loss, (torch.randn(7, 3), torch.randn(4, 3), targets, True, None, backend)),
    ]
    if backend == "chunked":
        x, M = torch.randn(2, T, 3, 15), torch.randn(2, 3, 5, 6)
        q, k, log_v = (part.transpose(1, 2) for part in x.split(5, dim=-1))
        arguments = (q, k, log_v, None, M, True, True)
        *_, before = _attend(*arguments)
        calls += [(_attend, arguments), (_attend_backward, (log_v, M, q, k, log_v, None, before, True, True))]
    for operator, arguments in calls:
        with FakeTensorMode() as mode:
            fakes = operator(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        for fake, real in zip(tree_leaves(fakes), tree_leaves(operator(*arguments)), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.slow
def test_a_model_compiled_for_one_length_takes_others():
    gpt = build()
    compiled = torch.compile(gpt.loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in range(70, 500, 36):  # more of them than torch would compile apart
        batch = ids(T)
        torch.testing.assert_close(compiled(batch[:, :-1], batch[:, 1:]), gpt.loss(batch[:, :-1], batch[:, 1:]))


@pytest.mark.gpu
def test_sums_stay_float32_under_autocast(device):
    """The result differs from float32 by what bfloat16 does to the linear layers: 8 bits in each of a few."""
    gpt = build()
    exact = gpt.loss(ids(70)[:, :-1], ids(70)[:, 1:])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        _, state = gpt(ids(70), return_state=True)
        loss = gpt.loss(ids(70)[:, :-1], ids(70)[:, 1:])
    assert {x.dtype for x in state.layers} == {torch.float32}
    assert state.position.dtype == torch.float32
    assert loss.item() != exact.item()
    torch.testing.assert_close(loss, exact, rtol=2**-7, atol=0)
    assert all(x.isfinite().all() for x in gradients(gpt, loss))


@pytest.mark.gpu
@pytest.mark.usefixtures("restored_torch")
def test_deterministic_algorithms_are_enough():
    gpt = build()
    torch.use_deterministic_algorithms(True)
    results = [gradients(gpt, gpt.loss(ids(70)[:, :-1], ids(70)[:, 1:])) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_operator_of_a_second_copy_of_this_code_leaves_that_of_the_first():
    def sign(x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    copies = [custom.operator("sign")(sign) for _ in range(2)]
    assert len({copy.name() for copy in copies}) == 2
