"""The optimizer: AdamW with weight decay on what multiplies (matrices, embeddings), not on what shifts or scales."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from common.settings import Settings

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(Settings):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"]
    max_lr: float = Field(6e-4, gt=0, allow_inf_nan=False)
    """Highest learning rate; the schedule gives factors of it."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the running mean of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the mean square."""
    weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False)
    """Of parameters with two dimensions or more, a step: lr x this."""
    grad_clip: float | None = Field(1.0, gt=0, allow_inf_nan=False)
    """Largest norm of the whole gradient; null: not clipped."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model's parameters, its update fused into one kernel."""
        params = list(model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps, fused=True)
        for p in params:  # as it would itself before its first step: what is there can be saved, loaded and measured
            step = torch.zeros((), dtype=torch.float32, device=p.device)
            optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return optimizer


OptimConfig = AdamWConfig


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by parameter name: "blocks.0.norm.weight/exp_avg"."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}
