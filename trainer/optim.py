"""The optimizers: AdamW, and Muon for the matrices of blocks."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from common.settings import Settings
from model.attention.base import Decay
from model.gpt import GPT
from model.layers import FusedLinear
from trainer.distributed import World
from trainer.transfer import TransferConfig, ratios, scales

_TOGETHER = (
    2**20
)  # numbers in matrices that CPUs multiply together: small products take less time than their start
_AT_ONCE = (
    2**27
)  # numbers in updates that exist, and are sent, at once: with temporary ones about 3 GiB

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
    """Decoupled weight decay, applied to parameters of two or more dimensions (matrices and embeddings) only."""
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

    def means(self, gpt: GPT) -> float:
        """Numbers of the optimizer's state for each parameter."""
        return 2.0

    def schedule(self, optimizer: torch.optim.Optimizer, factor: float, progress: float) -> None:
        """Set what changes during a run: the learning rate. `progress` is the share of steps that are done."""
        for group in optimizer.param_groups:
            group["lr"] = self.max_lr * factor * group.get("scale", 1.0)

    def _adamw(self, gpt: GPT, params: list[nn.Parameter]) -> torch.optim.AdamW:
        scale, members = scales(gpt, self.transfer), dict[tuple[bool, float], list[nn.Parameter]]()
        for p in params:
            members.setdefault((p.dim() < 2, scale[p].adamw), []).append(p)
        groups = [
            {
                "params": members[key],
                "scale": key[1],
                "weight_decay": 0.0 if key[0] else self.weight_decay / key[1],
            }
            for key in sorted(members)
        ]
        eps = self.eps * math.prod(ratios(gpt, self.transfer))
        optimizer = torch.optim.AdamW(groups, lr=self.max_lr, betas=self.betas, eps=eps, fused=True)
        for p in (
            params
        ):  # as in its first step, so that the state can be saved, loaded and measured before
            step = torch.zeros((), dtype=torch.float32, device=p.device)
            optimizer.state[p] = {
                "step": step,
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        return optimizer


class MuonConfig(AdamWConfig, defaults="optim/muon"):
    """Muon (Jordan et al. 2024) for the matrices of blocks, in the type of the run, and AdamW for all else.

    Each update is scaled to the size that AdamW's would have (Liu et al. 2025), so one learning rate serves both.
    """

    name: Literal["muon"]  # type: ignore[assignment]
    momentum: float = Field(ge=0, lt=1)
    """Decay of the running mean of a matrix's gradient."""
    weight_decay_end: float = Field(ge=0, le=1)
    """Weight decay of the matrices at the end of the run, as a factor of that at the beginning; linear between."""

    def build(
        self, gpt: GPT, world: World | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.optim.Optimizer:
        matrices = {layer.weight for layer in block_matrices(gpt)}
        adamw = self._adamw(gpt, [p for p in gpt.parameters() if p not in matrices])
        return Muon(self, gpt, adamw, world or World(torch.device("cpu")), dtype)

    def means(self, gpt: GPT) -> float:
        return 2.0 - sum(layer.weight.numel() for layer in block_matrices(gpt)) / gpt.n_params()

    def schedule(self, optimizer: torch.optim.Optimizer, factor: float, progress: float) -> None:
        super().schedule(optimizer, factor, progress)
        left = 1 + (self.weight_decay_end - 1) * progress
        optimizer.param_groups[0]["weight_decay"] = self.weight_decay * left


OptimConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="name")]


def block_matrices(gpt: GPT) -> Iterator[nn.Linear]:
    """Yield the linear layers of blocks, except those of forget gates."""
    for block in gpt.blocks:
        gates = {
            m for decay in block.modules() if isinstance(decay, Decay) for m in decay.modules()
        }
        yield from (m for m in block.modules() if isinstance(m, nn.Linear) and m not in gates)


class Muon(torch.optim.Optimizer):
    """Updates along the nearest orthogonal matrix of the gradient's running mean.

    torch.optim.Muon can update neither the parts of a fused weight nor weights that fsdp shards. For whole weights, the
    update is torch's with adjust_lr_fn="match_rms_adamw". Each process computes a share of the updates, and sends it to
    the others. State lies where its weight does, so a checkpoint does not depend on the number of processes.
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
        self._layers, scale = (
            {layer.weight: layer for layer in block_matrices(gpt)},
            scales(gpt, config.transfer),
        )
        self._factors = {p: scale[p].muon for p in self._layers}
        self._adamw, self._world, self._dtype = adamw, world, dtype
        defaults = {
            "lr": config.max_lr,
            "momentum": config.momentum,
            "weight_decay": config.weight_decay,
        }
        super().__init__(list(self._layers), defaults)
        self._rounds, n = dict[int, list[list[Tensor]]](), 0
        for weights in self._alike():
            n += len(weights) * weights[0].numel()
            self._rounds.setdefault(n // _AT_ONCE, []).append(weights)
        for p in self._layers:
            self.state[p] = {"mean": torch.zeros_like(p)}
        self.param_groups += adamw.param_groups
        self.state.update(adamw.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        self._adamw.step()
        for batches in self._rounds.values():
            if given := [
                own for weights in batches if (own := [p for p in weights if p.grad is not None])
            ]:
                self._update(given)

    def _update(self, batches: list[list[Tensor]]) -> None:
        """Update weights. The process with the least to do computes a batch's updates, and all of them receive them."""
        group, world = self.param_groups[0], self._world
        own, loads, places = list[Tensor](), [0] * world.size, list[tuple[int, int]]()
        for batch in batches:
            rank = loads.index(min(loads))
            places.append((rank, loads[rank]))
            loads[rank] += len(batch) * batch[0].numel()
            means, grads = (
                [self.state[p]["mean"] for p in batch],
                [p.grad for p in batch if p.grad is not None],
            )
            torch._foreach_lerp_(means, grads, 1 - group["momentum"])
            ahead = torch.stack(grads)  # (n, rows, columns)
            torch._foreach_lerp_(ahead.unbind(), means, group["momentum"])  # Nesterov's momentum
            ahead = world.unshard(ahead)
            if rank == world.rank:
                own.append(self._updates_of(batch[0], ahead).flatten())
        own.append(
            torch.empty(
                max(loads) - loads[world.rank], dtype=batches[0][0].dtype, device=world.device
            )
        )
        everyones, weights, updates = world.gather(torch.cat(own)), list[Tensor](), list[Tensor]()
        for batch, (rank, first) in zip(batches, places, strict=True):
            n = len(batch) * batch[0].numel()
            found = everyones[rank].narrow(0, first, n).view(len(batch), *batch[0].shape)
            updates += [world.shard_like(update, p) for update, p in zip(found, batch, strict=True)]
            weights += batch
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(weights, updates, alpha=group["lr"])

    def _updates_of(self, p: Tensor, x: Tensor) -> Tensor:
        """Return updates, before the learning rate, of weight p and those like it from gradients x (n, rows, columns).

        Their root mean square is that of AdamW's updates, about 0.2 (Liu et al. 2025).
        """
        layer = self._layers[p]
        parts = layer.split(x) if isinstance(layer, FusedLinear) else [x]
        updates = [
            0.2 * max(part.shape[1:]) ** 0.5 * self._factors[p] * orthogonal(part, self._dtype)
            for part in parts
        ]
        return layer.join(updates) if isinstance(layer, FusedLinear) else updates[0]

    def _alike(self) -> Iterator[list[Tensor]]:
        """Yield weights of one shape and learning rate whose rows are divided in the same way."""
        kinds, on_cpu = dict[Any, list[Tensor]](), self._world.device.type == "cpu"
        for p, layer in self._layers.items():
            division = (layer.parts, layer.n_group) if isinstance(layer, FusedLinear) else None
            kinds.setdefault((p.shape, division, self._factors[p]), []).append(p)
        for weights in kinds.values():
            numel, share = weights[0].numel(), -(-len(weights) // self._world.size)
            n = max(1, _TOGETHER // numel if on_cpu else min(_AT_ONCE // numel, share))
            yield from (weights[i : i + n] for i in range(0, len(weights), n))


def orthogonal(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring all singular values of matrices (n, rows, columns) near 1, to about 0.7 to 1.2, by Newton-Schulz iteration.

    Five steps of the polynomial of Jordan et al. 2024, in `dtype`: bfloat16 is enough.
    """
    y = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    y = y.mT if x.shape[1] > x.shape[2] else y
    for _ in range(5):
        square = y @ y.mT
        y = torch.baddbmm(
            y, torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315), y, beta=3.4445
        )
    return (y.mT if x.shape[1] > x.shape[2] else y).to(x.dtype)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by parameter name: "blocks.0.norm.weight/exp_avg"."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]}/{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
