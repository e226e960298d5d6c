"""Blocks against their definition: GPT-2's with every combination of its optional parts, and the published linear unit.

Convolutions in pieces, batches, documents and compiled code are in test_ngrams.py.
"""

import pytest
import torch
from functorch.compile import make_boxed_func
from gradients import assert_all_close, naive, with_gradients
from test_gpt import ids
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import cross_entropy, glu, linear

from cli import compose
from common.settings import decode
from model.config import GPTConfig
from model.gpt import GPT
from model.layers import gated_linear
from model.ops.causal_conv import causal_conv

ACTIVATIONS = {
    "gelu": lambda x: x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
    "swiglu": lambda x: (lambda a, b: a * a.sigmoid() * b)(*x.chunk(2, dim=-1)),
    "relu2": lambda x: torch.where(x > 0, x**2, 0),
}


def layer_norm(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    return scaled if norm.bias is None else scaled + norm.bias


def rms_norm(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


NORMS = {"layer": layer_norm, "rms": rms_norm}


def of_linear(x, layer):
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


def gpt_of(block, attention="log_space", eot_id=None, **changes):
    """A model in which no part is still the identity or 0; the weights do not depend on eot_id."""
    sizes = {"n_vocab": 11, "n_layer": 2, "n_head": 2, "n_embd": 12}
    parts = {"attention": {"name": attention}, "block": {"name": "mlp", **block}, "position": {"name": "none"}}
    gpt = GPT(decode(GPTConfig, sizes | parts | changes), eot_id).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in gpt.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return gpt


def convolved(x: Tensor, weight: Tensor | None) -> Tensor:
    """y_t = sum_i w_i x_(t - i), token by token; the last weights are those of the token itself."""
    if weight is None:
        return x
    rows = weight.view(-1, x.shape[2]).flip(0)
    return torch.stack([sum(row * x[:, t - i] for i, row in enumerate(rows[: t + 1])) for t in range(x.shape[1])], 1)


def defined(gpt: GPT, token_ids: Tensor, x: Tensor | None = None) -> Tensor:
    """Logits from the definition of block, norms and output layer. x: what the first block reads; None: embeddings."""
    config, x = gpt.config, gpt.embed.weight[token_ids] if x is None else x
    norm, activation = NORMS[config.norm], ACTIVATIONS[config.block.activation]
    for block in gpt.blocks:
        a = naive(block.attention, convolved(norm(x, block.norm_attention), block.conv_attention))
        x = x + of_linear(a, block.proj)
        h = of_linear(convolved(norm(x, block.norm_mlp), block.conv_mlp), block.up)
        x = x + of_linear(activation(h), block.down)
    logits = norm(x, gpt.norm) @ (gpt.embed.weight if config.tied else gpt.output.weight).T
    return logits if config.logit_cap is None else config.logit_cap * (logits / config.logit_cap).tanh()


@pytest.mark.parametrize(
    ("activation", "conv", "changes"),
    [
        ("gelu", 0, {}),
        ("gelu", 4, {"tied": False, "norm": "rms", "logit_cap": 3.0}),
        ("swiglu", 0, {"tied": False, "bias": False}),
        ("swiglu", 4, {"logit_cap": 3.0}),
        ("relu2", 0, {"tied": False, "norm": "rms", "bias": False, "logit_cap": 3.0}),
        ("relu2", 4, {}),
    ],
)
def test_logits_and_gradients_are_the_definitions(activation, conv, changes):
    gpt = gpt_of({"activation": activation, "conv": conv}, **changes)
    found, wanted = gpt(ids(37)), defined(gpt, ids(37))
    assert_all_close(*(with_gradients(y, list(gpt.parameters())) for y in (found, wanted)), tolerance=1e-11)


def test_the_loss_is_that_of_the_capped_logits():
    gpt = gpt_of({"activation": "relu2"}, norm="rms", logit_cap=3.0)
    targets = ids(37).roll(-1, 1)
    wanted = cross_entropy(defined(gpt, ids(37)).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    torch.testing.assert_close(gpt.token_losses(ids(37), targets), wanted, rtol=1e-11, atol=1e-11)
    summed = gpt.summed_loss(ids(37), targets)
    weights = list(gpt.parameters())
    assert_all_close(*(with_gradients(y, weights) for y in (summed, wanted.sum())), tolerance=1e-11)


@pytest.mark.parametrize("block", ["glu", "mlp"])
def test_a_model_without_biases_has_only_matrices(block):
    gpt = gpt_of({"name": block}, attention="softmax", norm="rms", bias=False)
    assert {p.dim() for p in gpt.parameters()} == {2}


def modern(config: GPTConfig, weights: dict[str, Tensor], token_ids: Tensor) -> Tensor:
    """Logits of modern_*, written from nanochat's description, but with QK-norm before the rotation: it is the same."""
    H, D, T = config.n_head, config.head_features, token_ids.shape[1]
    speed = 10_000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    turn = torch.polar(torch.ones(T, D // 2, dtype=torch.float64), torch.outer(torch.arange(T).double(), speed))

    def rotated(x):
        turned = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def normed(x):
        return rms_norm(x, None)

    x = weights["embed.weight"][token_ids]
    for i in range(config.n_layer):
        matrix = {name: weights[f"blocks.{i}.{name}.weight"] for name in ("attention.qkv", "proj", "up", "down")}
        heads = (normed(x) @ matrix["attention.qkv"].T).unflatten(-1, (3 * H, D)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        scores = rotated(normed(q)) @ rotated(normed(k)).mT / D**0.5
        later = torch.ones(T, T).triu(1).bool()
        y = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        x = x + y.transpose(1, 2).flatten(2) @ matrix["proj"].T
        x = x + (normed(x) @ matrix["up"].T).clamp(min=0).square() @ matrix["down"].T
    logits = normed(x) @ weights["embed.weight" if config.tied else "output.weight"].T
    return 15 * (logits[..., : config.n_vocab] / 15).tanh()


@pytest.mark.parametrize("name", ["modern_1m", "modern_125m"])
def test_the_modern_models_are_what_their_page_says(name):
    small = {"n_vocab": 11, "n_layer": 2, "n_head": 3, "head_dim": 8, "n_embd": 16}
    config = decode(GPTConfig, compose("train", ["dataset_dir=x", f"model={name}"])["model"] | small)
    gpt = GPT(config).double()
    with torch.no_grad():
        gpt.output_weight.mul_(30)  # beyond the cap
    found = gpt(ids(37))
    wanted = modern(config, dict(gpt.named_parameters()), ids(37))
    assert 10 < found.abs().max() < 15
    assert_all_close(*(with_gradients(y, list(gpt.parameters())) for y in (found, wanted)), tolerance=1e-11)


def test_convolutions_see_the_order_of_tokens_from_the_start():
    settings = {"attention": {"name": "softmax"}, "position": {"name": "none"}}
    sizes = {"n_vocab": 11, "n_layer": 2, "n_head": 2, "n_embd": 12}
    gpt = GPT(decode(GPTConfig, sizes | settings | {"block": {"name": "mlp", "conv": 4}}))
    for weight in (gpt.blocks[0].conv_attention, gpt.blocks[0].conv_mlp):
        beside_identity = weight.view(4, 12) - torch.eye(4)[-1:].T
        assert beside_identity.abs().min() > 0
        assert 0.4 < beside_identity.abs().max() <= 0.5


def test_convolutions_have_autocasts_type():
    x, weight = torch.randn(2, 30, 5), torch.randn(20)
    with torch.autocast("cpu", torch.bfloat16):
        y, seen = causal_conv(x, weight)
    assert (y.dtype, seen.dtype) == (torch.bfloat16, torch.bfloat16)
    wanted, sizes = convolved(x.double(), weight.double()), convolved(x.double().abs(), weight.double().abs())
    assert ((y - wanted).abs() <= 6 * 2**-9 * sizes).all()  # x and w are rounded, and each of four sums


@pytest.mark.slow
def test_gradients_do_not_stack_sums_over_tokens():  # see causal_conv: for GPUs, torch compiles these wrongly
    graphs, x = [], torch.randn(2, 40, 12, dtype=torch.float64)
    backend = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or make_boxed_func(graph.forward))
    torch.compile(gpt_of({"conv": 4}).blocks[0], backend=backend)(x)[0].sum().backward()
    assert "stack" not in graphs[1].code


def gated_inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator, dtype=dtype).requires_grad_() for s in ((2, 5, 14), (3, 7))]


@pytest.mark.gpu
def test_gated_linear_equals_the_definition_with_gradients():
    x, weight = gated_inputs()
    wanted = linear(glu(x), weight)
    torch.testing.assert_close(gated_linear(x, weight), wanted)
    g = torch.randn(wanted.shape, dtype=wanted.dtype)
    got, right = (torch.autograd.grad(y, (x, weight), g) for y in (gated_linear(x, weight), wanted))
    torch.testing.assert_close(got, right)


def test_gated_linear_keeps_only_its_inputs():
    kept = []
    x, weight = gated_inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_linear(x, weight)
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), weight.data_ptr()]


def test_gated_linear_has_autocasts_type_in_both_passes():
    x, weight = gated_inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = gated_linear(x, weight)
    assert y.dtype == torch.bfloat16
    assert {g.dtype for g in torch.autograd.grad(y.sum(), (x, weight))} == {torch.float32}
