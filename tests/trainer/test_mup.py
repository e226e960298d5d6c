"""Transfer across sizes: against CompleteP's table and its training, and at the tuned size."""

import math

import pytest
import torch
from torch.func import functional_call

from common.settings import UserError, decode
from model.config import GPTConfig
from model.gpt import GPT
from trainer.mup import scale_weights
from trainer.optim import AdamWConfig, MuonConfig, block_matrices, orthogonalize

BASE = {"n_embd": 32, "n_layer": 2}
OPTIMS = {"adamw": AdamWConfig, "muon": MuonConfig}
BLOCKS = ("mlp", "glu")
PAIRS = [*zip(OPTIMS, BLOCKS, strict=True)]
N_VOCAB = 32
FLAGSHIP = {"name": "log_space", "decay": "head", "product": True, "d_key": 8, "gate": "silu"}
SOFTMAX = {"name": "softmax"}
LINEAR = {"name": "linear", "decay": "head"}


def gpt_of(n_embd, n_layer=2, block="mlp", attention=SOFTMAX, position="none", seed=2, **changes):
    """Heads have 8 features at every width."""
    sizes = {"n_vocab": N_VOCAB, "n_embd": n_embd, "n_layer": n_layer, "n_head": n_embd // 8}
    parts = {"attention": attention, "block": {"name": block}, "position": {"name": position}}
    torch.manual_seed(seed)
    return GPT(decode(GPTConfig, sizes | parts | changes))


def optim_of(name, transfer, **changes):
    return decode(OPTIMS[name], {"name": name, "transfer": transfer, "max_lr": 1e-2} | changes)


IDS = torch.randint(N_VOCAB, (4, 17), generator=torch.Generator().manual_seed(1))


def new_gpt(transfer, *sizes, **parts):
    gpt = gpt_of(*sizes, **parts)
    scale_weights(gpt, optim_of("adamw", transfer).transfer)
    return gpt


def train(gpt, optim, steps=3):
    optimizer = optim.build(gpt)
    optim.set_learning_rate(optimizer, factor=1.0)
    for _ in range(steps):
        gpt.loss(IDS[:, :-1], IDS[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return gpt


@pytest.mark.parametrize(("optim", "block"), PAIRS)
def test_a_model_of_the_tuned_size_trains_to_the_bit_as_without_transfer(optim, block):
    parts = {"block": block, "attention": LINEAR, "position": "log_recurrence"}
    with_, without = (train(new_gpt(to, **BASE, **parts), optim_of(optim, to)) for to in (BASE, None))
    for (name, a), b in zip(with_.named_parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b), name


def kind(name, p, last="norm"):
    """The row of CompleteP's table that a parameter belongs to."""
    layer = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if layer in ("proj", "down") and name.startswith("blocks.") and ".decay." not in name:
        return "to stream" if p.dim() == 2 else "bias to stream"
    if name.startswith(f"{last}."):
        return "last"
    fixed_inputs = name in ("embed.weight", "output.weight", "position.embed.weight")
    return "hidden" if p.dim() == 2 and not fixed_inputs else "other"


def rms(x):
    return float(x.detach().double().square().mean().sqrt())


@pytest.mark.parametrize(
    ("position", "tied", "norm"),
    [("log_recurrence", True, "layer"), ("learned", False, "layer"), ("none", False, "rms")],
)
@pytest.mark.parametrize("block", BLOCKS)
def test_initial_weights_are_those_of_the_table(block, position, tied, norm):
    """Beside the tuned model's own. A mean of n squares of normal numbers errs by less than 5 sqrt(2 / n)."""
    parts = {"block": block, "position": position, "tied": tied, "norm": norm, "attention": LINEAR}
    last = "norm" if norm == "layer" else "output"  # RMSNorm has no weights
    w = 4
    d = 2
    tuned = gpt_of(**BASE, **parts)
    gpt = new_gpt(BASE, 32 * w, 2 * d, **parts)
    expected = {"hidden": w**-0.5, "to stream": w**-0.5 / d, "last": 1 / w, "other": 1, "bias to stream": 1}
    ours = dict(gpt.named_parameters())
    for name, p in tuned.named_parameters():
        tolerance = 5 * (2 / p.numel()) ** 0.5
        assert rms(ours[name]) == pytest.approx(rms(p) * expected[kind(name, p, last)], rel=tolerance), name


@pytest.mark.parametrize(
    ("block", "tied", "norm"), [("mlp", True, "layer"), ("glu", False, "layer"), ("mlp", False, "rms")]
)
def test_training_is_that_of_complete_p_with_its_multipliers(block, tied, norm):
    """In float64, without eps: activations times 1 / d and logits times 1 / w, as the paper has it."""
    w = 2
    d = 3
    parts = {"block": block, "tied": tied, "norm": norm, "position": "log_recurrence", "attention": LINEAR}
    parts |= {"ngrams": [1, 2], "logit_cap": None if norm == "layer" else 15.0}
    last = "norm" if norm == "layer" else "output"
    gpt = new_gpt(BASE, 32 * w, 2 * d, **parts).double()
    optim = optim_of("adamw", BASE, eps=1e-100, weight_decay=0.3)
    kinds = {name: kind(name, p, last) for name, p in gpt.named_parameters()}
    multipliers = {"to stream": 1 / d, "bias to stream": 1 / d, "last": 1 / w}
    times = {name: multipliers.get(kind, 1.0) for name, kind in kinds.items()}
    theirs = {name: (p.detach() / times[name]).requires_grad_() for name, p in gpt.named_parameters()}
    hidden = [p for name, p in theirs.items() if kinds[name] in ("hidden", "to stream")]
    others = [p for name, p in theirs.items() if kinds[name] not in ("hidden", "to stream")]
    groups = [
        {"params": hidden, "lr": 1e-2 / w, "weight_decay": 0.3 * w},
        {"params": [p for p in others if p.dim() == 2], "weight_decay": 0.3},
        {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=optim.betas, eps=1e-100)
    ours = optim.build(gpt)
    optim.set_learning_rate(ours, factor=1.0)
    assert all(math.isclose(group["eps"], 1e-100 / (w * d)) for group in ours.param_groups)
    for _ in range(3):
        scaled = {name: p * times[name] for name, p in theirs.items()}
        their_loss = functional_call(gpt, scaled, (IDS[:, :-1],)).flatten(0, 1).log_softmax(-1)
        their_loss = -their_loss.gather(1, IDS[:, 1:].reshape(-1, 1)).mean()
        loss = gpt.loss(IDS[:, :-1], IDS[:, 1:])
        torch.testing.assert_close(loss, their_loss, rtol=1e-9, atol=0)
        for one, optimizer in ((loss, ours), (their_loss, adamw)):
            one.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_without_a_last_weight_to_scale_transfer_is_refused():
    optim = optim_of("adamw", BASE)
    gpt_of_tuned_size, wider = (gpt_of(n_embd, norm="rms") for n_embd in (32, 64))
    scale_weights(gpt_of_tuned_size, optim.transfer)
    with pytest.raises(UserError, match=r"use model.tied=false, or optim.transfer=null"):
        scale_weights(wider, optim.transfer)


def test_muons_updates_have_the_spectral_norm_of_the_tuned_models():
    w = 2
    d = 3
    gpt = new_gpt(BASE, 32 * w, 2 * d, block="glu", attention=FLAGSHIP)
    optim = optim_of("muon", BASE, weight_decay=0.3)
    optimizer = optim.build(gpt)
    optim.set_learning_rate(optimizer, factor=0.5)
    gpt.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    before = {layer: layer.weight.detach().clone() for layer in block_matrices(gpt)}
    optimizer.step()
    for layer, old in before.items():
        shrink = d if layer in [block.proj for block in gpt.blocks] else 1
        matrices = map(layer.split, (old, layer.weight.grad, layer.weight))
        for x, grad, after in zip(*matrices, strict=True):
            norm = 0.2 * (max(x.shape) / w) ** 0.5 / shrink  # of a matrix of the tuned model
            update = norm * orthogonalize(grad[None], torch.float32)[0]
            torch.testing.assert_close(after, x * (1 - 5e-3 * 0.3) - 5e-3 * update)
