"""Evaluation loss, weighted by tokens: it does not depend on the number of processes or the micro-batch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.console import Track
from data.loader import IGNORED, EvalBatches
from model.gpt import GPT, GPTState
from trainer.distributed import World
from trainer.runtime import Runtime


@dataclass(frozen=True)
class Loss:
    """Cross-entropy of a text."""

    nats: float
    """Sum over its tokens."""
    tokens: int
    """Number of predicted tokens."""
    bytes: int
    """UTF-8 bytes of those tokens; an end-of-document token has none."""

    @property
    def per_token(self) -> float:
        """Nats per token; NaN without tokens."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, comparable between tokenizers; NaN for a text without bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(self.per_token) if self.per_token < 700 else math.inf


class LossSums:
    """Sums of losses by a key, such as a token's position or dataset, in float64."""

    def __init__(self, n_keys: int, byte_lengths: Tensor) -> None:
        """`byte_lengths`: (n_vocab,), UTF-8 bytes of each token id, on the device of the losses."""
        self._byte_lengths = byte_lengths
        self._sums = torch.zeros(n_keys, 3, dtype=torch.float64, device=byte_lengths.device)

    def add(self, keys: Tensor, targets: Tensor, losses: Tensor) -> None:
        """Add losses (B, T) of targets (B, T), ignoring targets below 0; `keys` (B or 1, T), int64."""
        keys, counted = keys.to(self._sums.device).expand_as(targets), targets >= 0
        n_bytes = self._byte_lengths[targets.clamp(min=0)].where(counted, 0)
        each = torch.stack([losses.double(), counted.double(), n_bytes.double()], dim=-1)
        self._sums.index_add_(0, keys.flatten(), each.flatten(0, 1))

    def losses(self, world: World) -> list[Loss]:
        """The loss of each key over all processes. Every process must call this once: sums become totals."""
        return [
            Loss(nats, int(tokens), int(n_bytes))
            for nats, tokens, n_bytes in world.sum(self._sums).tolist()
        ]


def total(losses: list[Loss]) -> Loss:
    """The sum of several losses."""
    nats = math.fsum(loss.nats for loss in losses)
    return Loss(nats, sum(loss.tokens for loss in losses), sum(loss.bytes for loss in losses))


def evaluate(
    gpt: GPT,
    windows: EvalBatches,
    byte_lengths: Tensor,
    micro_batch: int,
    runtime: Runtime,
    world: World,
    piece: int | None = None,
) -> Loss:
    """The loss over all windows, split among the processes and summed in float64.

    Args:
        byte_lengths: (n_vocab,), UTF-8 bytes of each token id.
        micro_batch: windows per forward pass.
        piece: tokens of a window per forward pass, with the state carried along; None: all.
    """
    sums, key = LossSums(1, byte_lengths), torch.zeros(1, 1, dtype=torch.int64)
    for _, targets, losses in window_losses(gpt, windows, micro_batch, runtime, world, piece):
        sums.add(key, targets, losses)
    return sums.losses(world)[0]


def window_losses(
    gpt: GPT,
    windows: EvalBatches,
    micro_batch: int,
    runtime: Runtime,
    world: World,
    piece: int | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield this process's windows batch by batch: index of the first window, targets (B, T), losses (B, T).

    Iterate to the end: the model is in evaluation mode until then.
    """
    gpt.eval()
    together, piece = world.size * micro_batch, min(piece or windows.seq_len, windows.seq_len)
    with Track(
        f"evaluating windows of {windows.seq_len:,}: tokens", len(windows) * windows.seq_len
    ) as track:
        for first in range(0, len(windows), together):
            start = first + world.rank * micro_batch
            token_ids, targets = map(
                torch.from_numpy, windows.rows(start, min(start + micro_batch, len(windows)))
            )
            mine = len(targets) > 0
            if not mine:  # other processes still have windows, and with fsdp all must do every pass
                passes = -(-windows.seq_len // piece)
                token_ids, targets = (
                    torch.zeros(1, passes, dtype=torch.int64),
                    torch.full((1, passes), IGNORED),
                )
            token_ids, targets = token_ids.to(world.device), targets.to(world.device)
            parts, n_rows = [], min(together, len(windows) - first)
            with torch.no_grad(), runtime.autocast():
                for losses in _losses_in_pieces(gpt, token_ids, targets, piece if mine else 1):
                    world.at(f"evaluating window {first}")
                    parts.append(losses)
                    track.advance(losses.shape[1] * n_rows)
            if mine:
                yield start, targets, torch.cat(parts, dim=1)
    gpt.train()


def _losses_in_pieces(gpt: GPT, token_ids: Tensor, targets: Tensor, piece: int) -> Iterator[Tensor]:
    """The losses of whole texts, (B, T) in all, `piece` tokens at a time."""
    if token_ids.shape[1] <= piece:
        yield gpt.token_losses(token_ids, targets)
        return
    state: GPTState | None = None
    for ids, wanted in zip(token_ids.split(piece, dim=1), targets.split(piece, dim=1), strict=True):
        losses, state = gpt.token_losses(ids, wanted, state, return_state=True)
        yield losses
