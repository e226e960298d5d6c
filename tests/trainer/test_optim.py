"""Parameter groups, and an optimizer's state by name."""

import pytest
import torch
from safetensors.torch import load, save

from model.gpt import GPT
from trainer.optim import AdamWConfig, named_state, set_lr

OPTIM = AdamWConfig(name="adamw", max_lr=1e-2, weight_decay=0.3)


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


def test_a_decay_step_without_gradient_scales_by_one_minus_lr_times_decay(tiny):
    gpt = GPT(tiny().model)
    before = {name: p.clone() for name, p in gpt.named_parameters()}
    optimizer = OPTIM.build(gpt)
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p)
    set_lr(optimizer, 0.5)
    optimizer.step()
    for name, p in gpt.named_parameters():
        factor = 1 - 0.5 * 0.3 if p.dim() >= 2 else 1.0
        torch.testing.assert_close(p, before[name] * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("regrouped", [False, True])
def test_training_goes_on_to_the_bit_from_state_that_was_saved_by_name(tiny, regrouped):
    first, second = GPT(tiny().model), GPT(tiny().model)
    optimizer = OPTIM.build(first)
    train(first, optimizer, range(5))
    weights, state = save(first.state_dict()), save(named_state(first, optimizer))

    second.load_state_dict(load(weights))
    restored = OPTIM.build(second)
    if regrouped:  # another order of parameters, as another version may have
        restored.param_groups.reverse()
    loaded = load(state)
    for name, value in named_state(second, restored).items():
        value.copy_(loaded[name])
    train(first, optimizer, range(5, 8))
    train(second, restored, range(5, 8))
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_state_that_is_there_from_the_start_changes_no_bit(tiny):
    """torch makes it in the first step; ours is there before, so that it can be saved, loaded and measured."""
    ours, torchs = GPT(tiny().model), GPT(tiny().model)
    torchs.load_state_dict(ours.state_dict())
    optimizers = OPTIM.build(ours), OPTIM.build(torchs)
    made = {name: (value.dtype, value.shape) for name, value in named_state(ours, optimizers[0]).items()}
    optimizers[1].state.clear()
    train(ours, optimizers[0], range(3))
    train(torchs, optimizers[1], range(3))
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {name: (v.dtype, v.shape) for name, v in named_state(torchs, optimizers[1]).items()} == made
