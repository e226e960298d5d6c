"""The optimizer: AdamW with weight decay for matrices and embeddings, not for biases and scales."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from common.settings import Settings

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(Settings, defaults="optim/adamw"):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"]
    max_lr: float = Field(gt=0, allow_inf_nan=False)
    """Highest learning rate; the schedule multiplies it by a factor."""
    betas: tuple[Beta, Beta]
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(gt=0, allow_inf_nan=False)
    """Added to the root of the mean square in the denominator."""
    weight_decay: float = Field(ge=0, allow_inf_nan=False)
    """Decoupled weight decay, applied to parameters of two or more dimensions (matrices and embeddings) only."""
    grad_clip: float | None = Field(gt=0, allow_inf_nan=False)
    """Largest norm of the whole gradient; null: no clipping."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer, with a fused update and its state allocated."""
        params = list(model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps, fused=True)
        for p in params:  # as in its first step, so that the state can be saved, loaded and measured before
            step = torch.zeros((), dtype=torch.float32, device=p.device)
            optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return optimizer


OptimConfig = AdamWConfig


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by parameter name: "blocks.0.norm.weight/exp_avg"."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}
