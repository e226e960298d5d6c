"""Linear(GLU(x)) without its gated features, against torch's own."""

import pytest
import torch
from torch.nn.functional import glu, linear

from model.layers import gated_linear


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator, dtype=dtype).requires_grad_() for s in ((2, 5, 14), (3, 7))]


@pytest.mark.gpu
def test_gated_linear_equals_the_definition_with_gradients():
    x, weight = inputs()
    wanted = linear(glu(x), weight)
    torch.testing.assert_close(gated_linear(x, weight), wanted)
    g = torch.randn(wanted.shape, dtype=wanted.dtype)
    got, right = (torch.autograd.grad(y, (x, weight), g) for y in (gated_linear(x, weight), wanted))
    torch.testing.assert_close(got, right)
    assert torch.autograd.gradcheck(gated_linear, (x, weight))


def test_gated_linear_keeps_only_its_inputs():
    kept = []
    x, weight = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_linear(x, weight)
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), weight.data_ptr()]


def test_under_autocast_both_passes_have_its_type():
    x, weight = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = gated_linear(x, weight)
    assert y.dtype == torch.bfloat16
    assert {g.dtype for g in torch.autograd.grad(y.sum(), (x, weight))} == {torch.float32}
