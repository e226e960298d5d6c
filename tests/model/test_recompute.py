"""Activations that are computed again: the same gradients to the bit, and less memory."""

import itertools

import pytest
import torch
from test_gpt import ids, tiny
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode

from common.settings import variant_names
from model.attention import ATTENTION
from model.gpt import GPT

MECHANISMS = [name for attention in ATTENTION for name in variant_names(attention)]
HOW = ["block", "selective"]
KINDS = itertools.cycle([*zip(HOW, [torch.float32, torch.bfloat16], strict=True)])


def build(how, eot_id=None, **sizes):
    torch.manual_seed(0)
    gpt = GPT(tiny(**sizes), eot_id)
    gpt.recompute = how
    return gpt


def gradients(gpt, loss):
    loss.backward()
    found = [p.grad for p in gpt.parameters()]
    gpt.zero_grad()
    return [loss.detach(), *found]


def assert_same_bits(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("attention", "block", "how", "dtype"),
    [(*pair, *kind) for pair, kind in zip(itertools.product(MECHANISMS, ["glu", "mlp"]), KINDS, strict=False)],
)
def test_gradients_have_the_same_bits(attention, block, dtype, how):
    choice = {"attention": attention, "block": block, "position": "log_recurrence"}
    results = []
    for gpt in (build("none", choice=choice), build(how, choice=choice)):
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            loss = gpt.loss(ids(33)[:, :-1], ids(33)[:, 1:])
        results.append(gradients(gpt, loss))
    assert_same_bits(*results)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("attention", ["log_space", "softmax"])
def test_the_state_carries_gradients(attention, how):
    choice = {"attention": attention, "block": "mlp", "position": "log_recurrence"}
    results = []
    for gpt in (build(kind, choice=choice, ngrams=[1, 2]) for kind in ("none", how)):
        _, state = gpt(ids(9)[:, :4], return_state=True)
        results.append(gradients(gpt, gpt(ids(9)[:, 4:], state)[..., 0].sum()))
    assert_same_bits(*results)


@pytest.mark.parametrize("how", HOW)
def test_documents_stay_apart(how):
    results = [gradients(gpt, gpt.loss(ids(9), ids(9))) for gpt in (build("none", 3), build(how, 3))]
    assert_same_bits(*results)


@pytest.mark.parametrize("how", HOW)
def test_random_numbers_are_drawn_again_as_before(how):
    results = []
    for kind in ("none", how):
        gpt = build("none")
        for block in gpt.blocks:
            block.attention.register_forward_hook(lambda _, __, out: (dropout(out[0], 0.5), out[1]))
        gpt.recompute = kind
        torch.manual_seed(1)
        results.append([*gradients(gpt, gpt.loss(ids(9), ids(9))), torch.rand(1)])  # and the next ones are the same
    assert_same_bits(*results)


def kept(how, B, T, **sizes):
    """Bytes that a forward pass saves, without the weights."""
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    gpt = build(how, **sizes)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gpt.loss(ids(T, B), ids(T, B))
    own = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in own)


def kept_by_a_block(how, choice, B, T, n_layer=4):
    """The same for each further block."""
    return (kept(how, B, T, choice=choice, n_layer=n_layer) - kept(how, B, T, choice=choice, n_layer=1)) / (n_layer - 1)


@pytest.mark.parametrize("attention", MECHANISMS)
def test_of_a_block_its_input_is_kept(attention):
    choice, (B, T, D) = {"attention": attention, "block": "glu", "position": "learned"}, (2, 64, 12)
    assert kept_by_a_block("block", choice, B, T) == B * T * D * 4
    assert kept_by_a_block("none", choice, B, T) > 5 * B * T * D * 4


@pytest.mark.parametrize("block", ["glu", "mlp"])
def test_only_a_blocks_products_but_its_last_are_computed_twice(block):
    """With "block" every product with a weight, but not an mlp's last, whose result nothing needs; else none."""
    choice, counts = {"attention": "log_space", "block": block, "position": "learned"}, {}
    for how in ("none", *HOW):
        gpt = build(how, choice=choice)
        loss = gpt.loss(ids(9), ids(9))
        with Products() as products:
            loss.backward()
        counts[how] = products.count
    assert counts["selective"] == counts["none"]
    assert counts["block"] - counts["none"] == 3 * len(gpt.blocks)  # glu: qkv, gate, proj; mlp: qkv, proj, up


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return op(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(("how", "by_block"), zip(HOW, [False, True], strict=True))
def test_a_recomputed_model_compiles_in_one_graph(how, by_block):
    """As ddp and as fsdp compile it. Convolutions write in place, of which torch warns with "selective"."""
    results = []
    for kind in ("none", how):
        conv = {"attention": {"name": "log_space"}, "block": {"name": "mlp", "conv": 4}}
        gpt = build(kind, **conv, ngrams=[1, 2])
        torch.compiler.reset()
        for module in gpt.blocks if by_block else [gpt]:
            module.compile(backend="aot_eager", fullgraph=True)
        results.append(gradients(gpt, gpt(ids(9)).square().sum()))
    assert_same_bits(*results)
