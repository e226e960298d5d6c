"""The optimizers: AdamW, and Muon for the matrices of blocks."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from common.numbers import ceil_div
from common.settings import Settings
from model.attention.base import Decay
from model.gpt import GPT
from model.layers import Linear
from runtime.distributed import World
from trainer.mup import TransferConfig, ratios, scale_factors

_AT_ONCE = 2**27
"""Numbers in updates that exist, and are sent, at once: with temporary ones about 3 GiB."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(Settings, defaults="optim/adamw"):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"]
    max_lr: float = Field(gt=0, le=1e30)
    """Highest learning rate; the schedule multiplies it by a factor."""
    betas: tuple[Beta, Beta]
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(gt=0, allow_inf_nan=False)
    """Added to the root of the mean square in the denominator."""
    weight_decay: float = Field(ge=0, allow_inf_nan=False)
    """Decoupled weight decay, applied only to parameters of two or more dimensions (matrices and
    embeddings)."""
    grad_clip: float | None = Field(gt=0, allow_inf_nan=False)
    """Largest norm of the whole gradient; null: no clipping."""
    transfer: TransferConfig | None
    """The size that max_lr was tuned for; null: max_lr and initial weights are used as given."""

    def build(
        self, gpt: GPT, world: World | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.optim.Optimizer:
        """Build the optimizer, with a fused update and its state allocated.

        Args:
            dtype: the run's, in which Muon multiplies matrices; AdamW does not use it.
        """
        return self._adamw(gpt, list(gpt.parameters()))

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Set the learning rate to `factor` of the highest one."""
        for group in optimizer.param_groups:
            group["lr"] = self.max_lr * factor * group.get("scale", 1.0)

    def _adamw(self, gpt: GPT, params: list[nn.Parameter]) -> torch.optim.AdamW:
        factors = scale_factors(gpt, self.transfer)
        members: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for p in params:
            is_vector = p.dim() < 2
            members.setdefault((is_vector, factors[p].adamw), []).append(p)
        groups = []
        for is_vector, scale in sorted(members):
            # The rate is multiplied by `scale`, and the product of rate and decay stays.
            weight_decay = 0.0 if is_vector else self.weight_decay / scale
            groups.append(
                {"params": members[is_vector, scale], "scale": scale, "weight_decay": weight_decay}
            )
        eps = self.eps * math.prod(ratios(gpt, self.transfer))
        optimizer = torch.optim.AdamW(groups, lr=self.max_lr, betas=self.betas, eps=eps, fused=True)
        # As in its first step, so that the state can be saved, loaded and measured before.
        for p in params:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        return optimizer


class MuonConfig(AdamWConfig, defaults="optim/muon"):
    """Muon (Jordan et al. 2024) for the matrices of blocks, and AdamW for all else.

    Each update is scaled to the size that AdamW's would have (Liu et al. 2025), so one learning
    rate serves both.
    """

    name: Literal["muon"]  # type: ignore[assignment]
    momentum: float = Field(ge=0, lt=1)
    """Decay of the running mean of a matrix's gradient."""

    def build(
        self, gpt: GPT, world: World | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.optim.Optimizer:
        matrices = {layer.weight for layer in block_matrices(gpt)}
        adamw = self._adamw(gpt, [p for p in gpt.parameters() if p not in matrices])
        return Muon(self, gpt, adamw, world or World(torch.device("cpu")), dtype)


OptimConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="name")]


def block_matrices(gpt: GPT) -> Iterator[Linear]:
    """Yield the linear layers of blocks, except those of forget gates."""
    gate_modules: set[nn.Module] = set()
    for module in gpt.blocks.modules():
        if isinstance(module, Decay):
            gate_modules.update(module.modules())
        if isinstance(module, Linear) and module not in gate_modules:
            yield module


class Muon(torch.optim.Optimizer):
    """Updates along the nearest orthogonal matrix of the gradient's running mean.

    torch.optim.Muon can update neither the matrices in a fused weight nor weights that fsdp shards.
    For whole weights, the update is torch's with adjust_lr_fn="match_rms_adamw". Each process
    computes a share of the updates, and sends it to the others. State lies where its weight does,
    so a checkpoint does not depend on the number of processes.
    """

    def __init__(
        self,
        config: MuonConfig,
        gpt: GPT,
        adamw: torch.optim.AdamW,
        world: World,
        dtype: torch.dtype,
    ) -> None:
        """`adamw` updates the other parameters."""
        self._layers = {layer.weight: layer for layer in block_matrices(gpt)}
        factors = scale_factors(gpt, config.transfer)
        self._factors = {p: factors[p].muon for p in self._layers}
        self._adamw = adamw
        self._world = world
        self._dtype = dtype
        defaults = {
            "lr": config.max_lr,
            "momentum": config.momentum,
            "weight_decay": config.weight_decay,
        }
        super().__init__(list(self._layers), defaults)
        self._kinds = list(self._alike())
        for p in self._layers:
            self.state[p] = {"mean": torch.zeros_like(p)}
        self.param_groups += adamw.param_groups
        self.state.update(adamw.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        self._adamw.step()
        for weights in self._kinds:
            with_gradients = [p for p in weights if p.grad is not None]
            if with_gradients:
                self._update(with_gradients)

    def _update(self, weights: list[Tensor]) -> None:
        """Update weights of one kind. Each process computes a share of the updates, and sends it to
        the others."""
        group = self.param_groups[0]
        world = self._world
        means = [self.state[p]["mean"] for p in weights]
        grads = [p.grad for p in weights if p.grad is not None]
        torch._foreach_lerp_(means, grads, 1 - group["momentum"])
        lookahead = torch.stack(grads)  # (n, rows, columns)
        torch._foreach_lerp_(lookahead.unbind(), means, group["momentum"])  # Nesterov's momentum
        lookahead = world.unshard(lookahead)
        share = ceil_div(len(weights), world.size)
        local = lookahead[share * world.rank :][:share]
        # The last process may have fewer, but all must send as many.
        local_updates = lookahead.new_zeros(share, *lookahead.shape[1:])
        local_updates[: len(local)] = self._updates_of(weights[0], local)
        gathered = torch.cat(world.gather(local_updates))[: len(weights)]
        updates = [world.shard_like(x, p) for x, p in zip(gathered, weights, strict=True)]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(weights, updates, alpha=group["lr"])

    def _updates_of(self, p: Tensor, x: Tensor) -> Tensor:
        """Updates, before the learning rate, of p and weights like it; x: (n, rows, columns).

        Their root mean square is that of AdamW's updates, about 0.2 (Liu et al. 2025).
        """

        def update_of(matrix: Tensor) -> Tensor:
            factor = 0.2 * max(matrix.shape[1:]) ** 0.5 * self._factors[p]
            return factor * orthogonalize(matrix, self._dtype)

        layer = self._layers[p]
        return layer.join([update_of(matrix) for matrix in layer.split(x)])

    def _alike(self) -> Iterator[list[Tensor]]:
        """Yield weights of one shape and learning rate whose rows are divided in the same way."""
        kinds: dict[Any, list[Tensor]] = {}
        for p, layer in self._layers.items():
            kinds.setdefault((p.shape, layer.division, self._factors[p]), []).append(p)
        for weights in kinds.values():
            n = max(1, _AT_ONCE // weights[0].numel())
            for first in range(0, len(weights), n):
                yield weights[first : first + n]


def orthogonalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring all singular values of matrices (n, rows, columns) near 1, to about 0.7 to 1.2.

    By five steps of Newton-Schulz iteration with the polynomial of Jordan et al. 2024, in `dtype`:
    bfloat16 is enough.
    """
    is_tall = x.shape[1] > x.shape[2]
    y = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    if is_tall:
        y = y.mT
    for _ in range(5):
        square = y @ y.mT
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        y = torch.baddbmm(y, polynomial, y, beta=3.4445)
    if is_tall:
        y = y.mT
    return y.to(x.dtype)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by parameter name: "blocks.0.norm.weight/exp_avg"."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
