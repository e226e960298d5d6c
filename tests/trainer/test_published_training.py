"""Training the published model takes the published code's steps: loss, gradient, clipping, AdamW and one cycle."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy, glu

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
    compute, optimizer, steps = Compute(torch.device("cpu"), torch.float64), optim.build(gpt), []
    for step, ids in enumerate(token_ids.long()):
        factor = schedule.factor(step, len(token_ids))
        optim.set_learning_rate(optimizer, factor)
        x, y = ids[:, :-1], ids[:, 1:].contiguous()
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


class Published(nn.Module):
    """The published model as the paper defines it, with all latent sums in memory, over one dict of its weights."""

    def __init__(self, weights, n_head, d_key):
        super().__init__()
        self.names, self.n_head, self.d_key = list(weights), n_head, d_key
        self.weights = nn.ParameterList(nn.Parameter(weights[name].clone()) for name in self.names)

    def forward(self, ids):
        w = dict(zip(self.names, self.weights, strict=True))
        x = w["embed.weight"][ids]  # (B, T, n_embd)
        p, h = nn.functional.linear(x, w["embed_pos.dense.weight"], w["embed_pos.dense.bias"]).chunk(2, -1)
        s, states = torch.zeros_like(h[:, 0]), []
        for p_t, h_t in zip(p.sigmoid().log().unbind(1), h.unbind(1), strict=True):
            s = torch.logaddexp(p_t + s, h_t)
            states.append(s)
        x = x + torch.stack(states, 1)
        for i in range(sum(name.endswith("feedforward2.2.weight") for name in self.names)):
            x = x + self.layer(x, {name.split(f"layers.{i}.")[-1]: value for name, value in w.items()})
        x = nn.functional.layer_norm(x, x.shape[-1:], w["lnorm.weight"], w["lnorm.bias"])
        return x @ w["embed.weight"].T

    def layer(self, x, w):
        y = nn.functional.layer_norm(x, x.shape[-1:], w["feedforward1.0.weight"], w["feedforward1.0.bias"])
        y = nn.functional.linear(y, w["feedforward1.1.weight"], w["feedforward1.1.bias"])
        y = y.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, H, T, 2 d_key + d_val)
        q, k, log_v = y.split([self.d_key, self.d_key, y.shape[-1] - 2 * self.d_key], -1)
        log_s = (k[..., None] + log_v[..., None, :]).logcumsumexp(2)  # (B, H, T, d_key, d_val)
        log_y = (q[..., None] + log_s).logsumexp(-2) - (q + k.logcumsumexp(2)).logsumexp(-1, keepdim=True)
        a = nn.functional.linear(
            log_y.transpose(1, 2).flatten(-2), w["feedforward2.0.weight"], w["feedforward2.0.bias"]
        )
        return nn.functional.linear(glu(a), w["feedforward2.2.weight"])


def test_8_steps_in_two_micro_batches_follow_the_definition_and_torchs_own_optimizer_and_schedule():
    """Needs nothing that is not in the repository: the definition above, torch's AdamW, OneCycleLR and clipping."""
    gpt = load_published(WEIGHTS)
    with safe_open(WEIGHTS, "pt") as file:
        sizes = json.loads(file.metadata()["config"])
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(sizes["vocab_sz"], (8, 4, 14), generator=generator)
    shape = {"max_lr": 6e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
    cycle = {"warmup_steps": 4, "start": 0.1, "end": 0.05}

    weights = {published_name(name): value.detach() for name, value in gpt.named_parameters()}
    reference = Published(weights, sizes["n_heads"], sizes["d_key"])
    groups = [
        {"params": [w for w in reference.weights if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in reference.weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 6e-4, 8, pct_start=4 / 8, div_factor=10, final_div_factor=2, cycle_momentum=False
    )
    expected = []
    for ids in token_ids:
        loss = cross_entropy(reference(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        expected.append([loss.item(), norm.item(), optimizer.param_groups[0]["lr"]])
        optimizer.step()
        rates.step()

    steps = trained(gpt, token_ids, shape | cycle, micro_batch=2)
    torch.testing.assert_close(steps, torch.tensor(expected, dtype=torch.float64).T, rtol=1e-11, atol=0)
    after = dict(zip(reference.names, reference.weights, strict=True))
    for name, weight in gpt.named_parameters():
        torch.testing.assert_close(weight, after[published_name(name)], rtol=0, atol=1e-11)
