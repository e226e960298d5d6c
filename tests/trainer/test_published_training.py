"""Training the published model takes the published code's steps: loss, gradient, clipping, AdamW and one cycle."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from common.settings import decode
from model.interop import load_published, published_name
from runtime.device import Compute
from trainer.optim import AdamWConfig
from trainer.schedule import OneCycle
from trainer.step import SummedLoss, train_step

RECORDED = Path(__file__).parents[2].parent / "shared" / "golden" / "published_training.safetensors"
WEIGHTS = Path(__file__).parents[1] / "golden" / "published_model.safetensors"


def trained(gpt, token_ids, training, micro_batch):
    """Train on one batch (B, T + 1) a step; returns losses, norms and rates of all steps, float64 (steps,)."""
    names = ("max_lr", "betas", "eps", "weight_decay")
    optim = decode(AdamWConfig, {"name": "adamw", "grad_clip": training["clip"]} | {n: training[n] for n in names})
    names = ("warmup_steps", "start", "end")
    schedule = decode(OneCycle, {"name": "one_cycle"} | {name: training[name] for name in names})
    compute = Compute(torch.device("cpu"), torch.float64)
    optimizer = optim.build(gpt)
    steps = []
    for step, ids in enumerate(token_ids.long()):
        factor = schedule.factor(step, len(token_ids))
        optim.set_learning_rate(optimizer, factor)
        x = ids[:, :-1]
        y = ids[:, 1:].contiguous()
        batches = list(zip(x.split(micro_batch), y.split(micro_batch), strict=True))
        done = train_step(SummedLoss(gpt), optimizer, batches, compute, grad_clip=optim.grad_clip)
        steps.append([done.loss, done.grad_norm, optim.max_lr * factor])
    return torch.tensor(steps, dtype=torch.float64).T


@pytest.mark.slow
@pytest.mark.skipif(not RECORDED.exists(), reason="needs ../shared/golden/published_training.safetensors")
def test_200_steps_follow_those_recorded_from_the_published_code():
    with safe_open(RECORDED, "pt") as file:
        recorded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        training = json.loads(file.metadata()["training"])
    gpt = load_published(RECORDED)
    steps = trained(gpt, recorded["token_ids"], training, micro_batch=4)
    for ours, name in zip(steps, ("losses", "grad_norms", "learning_rates"), strict=True):
        torch.testing.assert_close(ours, recorded[name], rtol=1e-12, atol=0)
    for name, weight in gpt.named_parameters():
        torch.testing.assert_close(weight.detach(), recorded[f"after/{published_name(name)}"], rtol=0, atol=1e-12)


def test_8_steps_in_two_micro_batches_are_those_of_torchs_own_optimizer_and_schedule():
    """With AdamW, OneCycleLR and clipping. tests/model/test_interop.py has the model's own gradients."""
    gpt = load_published(WEIGHTS)
    with safe_open(WEIGHTS, "pt") as file:
        sizes = json.loads(file.metadata()["config"])
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(sizes["vocab_sz"], (8, 4, 14), generator=generator)
    shape = {"max_lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
    cycle = {"warmup_steps": 4, "start": 0.1, "end": 0.05}

    reference = load_published(WEIGHTS)
    groups = [
        {"params": [w for w in reference.parameters() if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in reference.parameters() if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 6e-4, 8, pct_start=4 / 8, div_factor=10, final_div_factor=2, cycle_momentum=False
    )
    expected = []
    for ids in token_ids:
        loss = reference.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        expected.append([loss.item(), norm.item(), optimizer.param_groups[0]["lr"]])
        optimizer.step()
        rates.step()

    steps = trained(gpt, token_ids, shape | cycle, micro_batch=2)
    torch.testing.assert_close(steps, torch.tensor(expected, dtype=torch.float64).T, rtol=1e-11, atol=0)
    for ours, theirs in zip(gpt.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
