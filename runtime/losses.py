"""Evaluation loss, weighted by tokens: no number of processes or micro-batch changes it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.console import Track
from common.numbers import ceil_div
from data.loader import EvalBatches
from data.tokenizers.chat import IGNORED
from model.gpt import GPT, GPTState
from runtime.device import Compute
from runtime.distributed import World

_N_GROUPS = 16


@dataclass(frozen=True)
class Loss:
    """Cross-entropy of a text."""

    nats: float
    """Sum over its tokens."""
    tokens: int
    """Number of predicted tokens."""
    bytes: int
    """UTF-8 bytes of those tokens; an end-of-document token has none."""
    stderr: float
    """Standard error of nats per token, over windows; NaN with fewer than two."""
    bits_stderr: float
    """Standard error of bits per byte, over windows."""

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
    """Sums of the losses of windows by a key, such as a token's position or dataset, in float64."""

    def __init__(self, n_keys: int, byte_lengths: Tensor) -> None:
        """`byte_lengths`: (n_vocab,), UTF-8 bytes of each token id, on the device of the losses."""
        self._byte_lengths = byte_lengths
        shape = (n_keys + 1, 4, 4)
        self._products = torch.zeros(shape, dtype=torch.float64, device=byte_lengths.device)
        """For each key, and last for all tokens: outer products of each window's nats, tokens,
        bytes and 1, summed. The last row has the sums, the others what standard errors need."""

    def add(self, keys: Tensor, targets: Tensor, losses: Tensor) -> None:
        """Add losses (B, T) of targets (B, T); negative ones do not count. `keys`: (B or 1, T)."""
        n_windows = len(targets)
        n_keys = len(self._products) - 1
        is_counted = targets >= 0
        n_bytes = self._byte_lengths[targets.clamp(min=0)].where(is_counted, 0)
        figures = torch.stack([losses.double(), is_counted.double(), n_bytes.double()], dim=-1)
        firsts = n_keys * torch.arange(n_windows, device=figures.device).unsqueeze(1)
        rows = keys.to(figures.device) + firsts
        by_key = figures.new_zeros(n_windows * n_keys, 3)
        by_key.index_add_(0, rows.expand_as(targets).flatten(), figures.flatten(0, 1))
        by_key = by_key.view(n_windows, n_keys, 3)
        sums = torch.cat([by_key, figures.sum(1, keepdim=True)], dim=1)
        sums = torch.cat([sums, (sums[..., 1:2] > 0).double()], dim=-1)
        self._products += torch.einsum("bki,bkj->kij", sums, sums)

    def losses(self, world: World) -> list[Loss]:
        """The loss of each key over all processes, and last of all tokens.

        Every process must call this, and only once.
        """
        return [_loss_of(products) for products in world.sum(self._products).cpu()]


def _loss_of(products: Tensor) -> Loss:
    nats, tokens, n_bytes, _ = products[3].tolist()
    bits_stderr = _ratio_stderr(products, 2) / math.log(2)
    return Loss(nats, int(tokens), int(n_bytes), _ratio_stderr(products, 1), bits_stderr)


def _ratio_stderr(products: Tensor, column: int) -> float:
    """Standard error of nats over a column's sum, as windows differ in nats - ratio * column."""
    nats, amount, n_windows = products[3, [0, column, 3]].tolist()
    if n_windows < 2 or amount == 0:
        return math.nan
    residual = torch.zeros(4, dtype=torch.float64)
    residual[0] = 1
    residual[column] = -nats / amount
    variance = float(residual @ products @ residual) * n_windows / (n_windows - 1)
    return math.sqrt(max(variance, 0.0)) / amount


def evaluate_windows(
    gpt: GPT,
    windows: EvalBatches,
    byte_lengths: Tensor,
    micro_batch: int,
    compute: Compute,
    world: World,
    chunk: int | None = None,
) -> list[Loss]:
    """The loss of every 16th window, from the first, second, ..., and last that of all windows.

    They are split among the processes, and summed in float64. Two models can be compared group by
    group, without what makes a window hard for both.

    Args:
        byte_lengths: (n_vocab,), UTF-8 bytes of each token id.
        micro_batch: windows per forward pass.
        chunk: tokens of a window per forward pass, with the state carried along; None: all.
    """
    sums = LossSums(_N_GROUPS, byte_lengths)
    for first, targets, losses in window_losses(gpt, windows, micro_batch, compute, world, chunk):
        numbers = torch.arange(first, first + len(targets))
        sums.add((numbers % _N_GROUPS).unsqueeze(1), targets, losses)
    return sums.losses(world)


def window_losses(
    gpt: GPT,
    windows: EvalBatches,
    micro_batch: int,
    compute: Compute,
    world: World,
    chunk: int | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield micro-batches of this process's windows: index of the first, targets and losses (B, T).

    Iterate to the end: the model is in evaluation mode until then.
    """
    gpt.eval()
    # All processes together read so many windows at once.
    micro_batch = min(micro_batch, ceil_div(len(windows), world.size))
    together = world.size * micro_batch
    chunk = min(chunk or windows.seq_len, windows.seq_len)
    title = f"evaluating windows of {windows.seq_len:,}: tokens"
    with Track(title, len(windows) * windows.seq_len) as track:
        for first in range(0, len(windows), together):
            # Read this process's share of them.
            n_rows = min(together, len(windows) - first)
            start = first + world.rank * micro_batch
            batch = windows.rows(start, min(start + micro_batch, len(windows)))
            token_ids = torch.from_numpy(batch[0])
            targets = torch.from_numpy(batch[1])
            has_windows = len(targets) > 0
            chunk_here = chunk
            if not has_windows:
                # The others still have some, and with fsdp all must do every pass: here of a token.
                n_passes = ceil_div(windows.seq_len, chunk)
                token_ids = torch.zeros(1, n_passes, dtype=torch.int64)
                targets = torch.full((1, n_passes), IGNORED)
                chunk_here = 1
            token_ids = token_ids.to(world.device)
            targets = targets.to(world.device)
            # Compute their losses, a chunk at a time.
            losses_of_chunks = []
            with torch.no_grad(), compute.autocast():
                for losses in _losses_in_chunks(gpt, token_ids, targets, chunk_here):
                    losses_of_chunks.append(losses)
                    track.advance(losses.shape[1] * n_rows)
            if has_windows:
                yield start, targets, torch.cat(losses_of_chunks, dim=1)
    gpt.train()


def _losses_in_chunks(gpt: GPT, token_ids: Tensor, targets: Tensor, chunk: int) -> Iterator[Tensor]:
    """Yield the losses of texts (B, T), `chunk` tokens at a time."""
    if token_ids.shape[1] <= chunk:
        yield gpt.token_losses(token_ids, targets)
        return
    state: GPTState | None = None
    chunks = zip(token_ids.split(chunk, dim=1), targets.split(chunk, dim=1), strict=True)
    for ids_of_chunk, targets_of_chunk in chunks:
        losses, state = gpt.token_losses(ids_of_chunk, targets_of_chunk, state, return_state=True)
        yield losses
