"""What tests of operators share: where kernels run, and a result compared together with its gradients."""

import pytest
import torch

from model.attention.longformer import LongformerAttention
from model.ops.log_attention import LINEAR, LOG_SPACE, SIGNED
from model.position import Positions

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have no kernels for float64")
"""For kernels in float64, which run in Triton's interpreter alone."""

FORMS = {"log_space": LOG_SPACE, "signed": SIGNED, "linear": LINEAR}
FAST_SLOW = ["chunked", pytest.param("triton", marks=pytest.mark.slow)]  # triton's interpreter takes seconds
CAUSAL_SLOW = [("chunked", True), ("chunked", False), pytest.param("triton", True, marks=pytest.mark.slow)]
"""Backend and whether attention is causal."""


def naive(module, x, rotation=None):
    """The result of an attention module for a text from its beginning, from the equation in the source."""

    log_f = None if module.decay is None else module.decay(x)

    def attend(features):
        return module.naive_attend(module.project(features, log_f, Positions(rotation)))

    y = attend(module.qkv(x))
    if isinstance(module, LongformerAttention):  # global tokens have projections of their own
        first = attend(module.qkv_global(x))[:, :, : module.n_global]
        y = torch.cat([first, y[:, :, module.n_global :]], dim=2)
    y = y.transpose(1, 2).flatten(2)
    return y if module.gate is None else y * module.gate_function(module.gate(x))


def with_gradients(y, leaves):
    """The result, and the gradients of a weighted sum of it: the same weights for the same shape."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y, *torch.autograd.grad(y, leaves, weights)]


def assert_all_close(got, wanted, tolerance=1e-12):
    """Shape by shape and number by number. float64: some 200 roundings of 1.1e-16 in numbers of size about 1."""
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
