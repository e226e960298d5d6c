"""The loss at contexts of any length: the model reads the text in pieces, with the state carried along."""

import torch
from torch import Tensor

from common.console import Track
from data.loader import EvalBatches
from inference.scoring import Text, features_in_pieces, padded
from model.gpt import GPT
from trainer.distributed import World
from trainer.losses import Loss, Sums
from trainer.runtime import Runtime

Window = tuple[int, int]
"""The index of a window's first token in the split, and the number of its targets."""


def position_bins(length: int) -> list[int]:
    """Edges of bins of positions, two per octave: 0 1 2 3 4 6 8 12 16 24 ... and `length`, where the last bin ends."""
    powers = [2**k for k in range(length.bit_length())]
    return [0, *sorted(n for n in {*powers, *(3 * n // 2 for n in powers)} if n < length), length]


def bin_of_positions(bins: list[int]) -> Tensor:
    """The bin of each position, int64 (length,)."""
    return torch.bucketize(torch.arange(bins[-1]), torch.tensor(bins), right=True) - 1


def context_windows(stretches: EvalBatches, context: int) -> list[Window]:
    """Cut each stretch of text into windows of `context` targets. The targets are the same whatever the context."""
    windows = []
    for stretch in range(len(stretches)):
        begin = stretches.begin(stretch)
        stop = min(begin + stretches.seq_len, stretches.stream.n_tokens - 1)
        windows += [(start, min(context, stop - start)) for start in range(begin, stop, context)]
    return windows


def context_losses(
    gpt: GPT,
    stretches: EvalBatches,
    context: int,
    byte_lengths: Tensor,
    batch_tokens: int,
    runtime: Runtime,
    world: World,
) -> list[Loss]:
    """The losses in windows of `context` tokens, by the bins of their positions, shared among the processes.

    Args:
        stretches: the text to measure.
        byte_lengths: (n_vocab,), UTF-8 bytes of each token id.
        batch_tokens: about how many tokens, in windows side by side, the model's state holds at once.
    """
    windows = context_windows(stretches, context)
    rows = max(1, batch_tokens // context)
    bins = position_bins(context)
    sums, bin_of = Sums(len(bins) - 1, byte_lengths), bin_of_positions(bins)
    gpt.eval()
    n_tokens = sum(n for _, n in windows)
    with Track(f"context {context:,}: tokens", n_tokens) as track, torch.no_grad(), runtime.autocast():
        for first in range(world.rank * rows, len(windows), world.size * rows):
            everyones = [length for _, length in windows[first:][: world.size * rows]]
            mine = [stretches.stream.read(start, start + n + 1) for start, n in windows[first : first + rows]]
            for position, x, targets in features_in_pieces(gpt, *padded([Text(ids, 1) for ids in mine])):
                n = targets.shape[1]
                losses = gpt.losses_of(x, targets)
                sums.add(bin_of[None, position : position + n], targets, losses)
                track.advance(sum(max(0, min(n, length - position)) for length in everyones))
    return sums.losses(world)
