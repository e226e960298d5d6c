"""Parameter groups, an optimizer's state by name, and Muon against its definition and torch's own."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load, save

from model.gpt import GPT
from runtime.distributed import World
from trainer import optim
from trainer.optim import AdamWConfig, MuonConfig, block_matrices, named_state, orthogonalize

OPTIM = AdamWConfig(name="adamw", max_lr=1e-2, weight_decay=0.3)
MUON = MuonConfig(name="muon", max_lr=1e-2, weight_decay=0.3)
TRANSFERRED = MuonConfig(name="muon", max_lr=1e-2, weight_decay=0.3, transfer={"n_embd": 4, "n_layer": 1})


def train(gpt, optimizer, steps):
    for seed in steps:
        ids = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(seed))
        gpt.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_weights_decay_and_biases_and_norms_do_not(tiny):
    gpt = GPT(tiny().model)
    decayed, kept = OPTIM.build(gpt).param_groups
    names = {p: name for name, p in gpt.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert {names[p] for p in kept["params"]} == {n for n in names.values() if n.endswith("bias") or "norm" in n}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


@pytest.mark.parametrize(("config", "regrouped"), [(OPTIM, False), (OPTIM, True), (MUON, False), (TRANSFERRED, False)])
def test_training_goes_on_to_the_bit_from_state_that_was_saved_by_name(tiny, config, regrouped):
    first = GPT(tiny().model)
    second = GPT(tiny().model)
    optimizer = config.build(first)
    train(first, optimizer, range(5))
    weights = save(first.state_dict())
    state = save(named_state(first, optimizer))

    second.load_state_dict(load(weights))
    restored = config.build(second)
    if regrouped:  # another order of parameters, as another version may have
        restored.param_groups.reverse()
    loaded = load(state)
    for name, value in named_state(second, restored).items():
        value.copy_(loaded[name])
    train(first, optimizer, range(5, 8))
    train(second, restored, range(5, 8))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


FLAGSHIP = {"model.attention": {"name": "log_space", "decay": "head", "product": True, "d_key": 4, "gate": "silu"}}
LINEAR = {
    "model.attention": {"name": "linear", "decay": "head"},
    "model.block": {"name": "glu"},
}


@pytest.mark.parametrize("changes", [{}, FLAGSHIP, LINEAR])
def test_muon_updates_all_matrices_of_blocks_and_nothing_else(tiny, changes):
    gpt = GPT(tiny(changes).model)
    names = {p: name for name, p in gpt.named_parameters()}
    matrices = {names[layer.weight] for layer in block_matrices(gpt)}
    expected = {n for n, p in gpt.named_parameters() if n.startswith("blocks.") and p.dim() == 2}
    assert matrices == {n for n in expected if "decay" not in n}
    kinds = {name.rpartition("/")[0]: name.rpartition("/")[2] for name in named_state(gpt, MUON.build(gpt))}
    assert {name for name, kind in kinds.items() if kind == "mean"} == matrices
    assert kinds.keys() == set(names.values())


@pytest.mark.parametrize("attention", ["log_space", "linear", "softmax", "longformer"])
def test_the_matrices_of_a_fused_weight_are_what_gives_queries_keys_and_values(tiny, attention):
    grouped = {"n_kv_head": 1} if attention in ("softmax", "longformer") else {}
    module = GPT(tiny({"model.attention": {"name": attention, **grouped}}).model).blocks[0].attention
    layers = [module.qkv, module.qkv_global] if attention == "longformer" else [module.qkv]
    for layer in layers:
        rows = torch.arange(layer.out_features, dtype=torch.float64)
        parts = layer.split(rows[:, None])
        for part, features in zip(parts, module.split(rows.view(1, 1, -1)), strict=True):
            assert sorted(part.flatten().tolist()) == sorted(features.flatten().tolist())
        assert torch.equal(layer.join(parts), rows[:, None])


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1, 16, 16), (3, 40, 9)])
def test_orthogonal_applies_its_polynomial_to_the_singular_values(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalize(x, torch.float64), u * s.unsqueeze(1) @ v, rtol=0, atol=1e-12)
    assert orthogonalize(torch.zeros(shape), torch.float32).eq(0).all()


@pytest.mark.parametrize("at_once", [1, 2**20])
def test_muon_is_torchs_own_for_each_of_the_matrices(tiny, monkeypatch, at_once):
    """In float64, without the rounding to bfloat16 that is part of torch's; one at a time, and all that are alike."""
    monkeypatch.setattr(optim, "_AT_ONCE", at_once)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    gpt = GPT(tiny(FLAGSHIP).model).double()
    layers = list(block_matrices(gpt))

    def matrices(tensors):
        pairs = zip(layers, tensors, strict=True)
        return [part for m, x in pairs for part in m.split(x)]

    expected = [part.detach().clone() for part in matrices([m.weight for m in layers])]
    torchs = torch.optim.Muon(expected, lr=1e-2, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    ours = MUON.build(gpt, dtype=torch.float64)
    for seed in range(3):
        ids = torch.randint(257, (2, 9), generator=torch.Generator().manual_seed(seed))
        gpt.loss(ids[:, :-1], ids[:, 1:]).backward()
        for matrix, gradient in zip(expected, matrices([m.weight.grad for m in layers]), strict=True):
            matrix.grad = gradient.clone()
        torchs.step()
        ours.step()
        ours.zero_grad()
    for mine, theirs in zip(matrices([m.weight.detach() for m in layers]), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_processes_share_muons_products_and_no_bit_changes(tiny, monkeypatch):
    """Three processes are threads here."""
    sent = [None] * 3
    meeting = threading.Barrier(3)
    products = Counter()
    definition = optim.orthogonalize

    class Sharing(World):
        def gather(self, value):
            sent[self.rank] = value
            meeting.wait(60)
            values = list(sent)
            meeting.wait(60)
            return values

    def counted(x, dtype):
        products[threading.current_thread().name] += x.numel()
        return definition(x, dtype)

    def trained(gpt, world):
        optimizer = TRANSFERRED.build(gpt, world)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for p in gpt.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return [*gpt.parameters(), *named_state(gpt, optimizer).values()]

    monkeypatch.setattr(optim, "orthogonalize", counted)
    gpts = [GPT(tiny(FLAGSHIP | {"model.n_layer": 3}).model) for _ in range(4)]
    for gpt in gpts:
        gpt.load_state_dict(gpts[0].state_dict())
    alone = trained(gpts.pop(), World(torch.device("cpu")))
    (all_products,) = products.values()
    products.clear()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(trained, gpts, [Sharing(torch.device("cpu"), rank, 3) for rank in range(3)]))
    for theirs in found:
        assert all(torch.equal(a, b) for a, b in zip(alone, theirs, strict=True))
    assert [*products.values()] == [all_products // 3] * 3
