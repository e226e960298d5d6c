"""The loss at contexts of any length: the text goes through the model in pieces, and the state is carried along."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.console import Track
from data.loader import IGNORED, EvalBatches
from data.shards import TokenStream
from model.gpt import GPT, GPTState
from model.ops.linear_cross_entropy import token_losses
from trainer.distributed import World
from trainer.losses import Loss, Sums
from trainer.runtime import Runtime

_PIECE = 512  # tokens of a window that go through the model at once: bounds memory for windows of any length

Window = tuple[int, int]
"""Where a window begins, as its first token's number in the split, and how many targets it has."""


def position_bins(length: int) -> list[int]:
    """Where bins of positions begin, two an octave, and `length`, where the last ends: 0 1 2 3 4 6 8 12 16 24 ..."""
    powers = [2**k for k in range(length.bit_length())]
    return [0, *sorted(n for n in {*powers, *(3 * n // 2 for n in powers)} if n < length), length]


def bin_of_positions(bins: list[int]) -> Tensor:
    """The bin of each position, int64 (length,)."""
    return torch.bucketize(torch.arange(bins[-1]), torch.tensor(bins), right=True) - 1


def context_windows(stretches: EvalBatches, context: int) -> list[Window]:
    """The stretches of text, each cut into windows of `context` targets: the same targets whatever the context."""
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
        stretches: which text.
        byte_lengths: (n_vocab,), UTF-8 bytes of each token id.
        batch_tokens: about as many tokens, in windows side by side, are remembered by a mechanism that remembers all.
    """
    windows = context_windows(stretches, context)
    rows = max(1, batch_tokens // context)
    bins = position_bins(context)
    sums, bin_of = Sums(len(bins) - 1, byte_lengths), bin_of_positions(bins)
    gpt.eval()
    with Track(f"context {context:,}: tokens", sum(n for _, n in windows)) as track:
        for first in range(world.rank * rows, len(windows), world.size * rows):
            mine = windows[first : first + rows]
            for position, targets, losses in _pieces(gpt, stretches.stream, mine, runtime, world):
                n = targets.shape[1]
                sums.add(bin_of[None, position : position + n], targets, losses)
                everyone = sum(max(0, min(n, length - position)) for _, length in windows[first:][: world.size * rows])
                track.advance(everyone)
    gpt.train()
    return sums.losses(world)


def _pieces(
    gpt: GPT, stream: TokenStream, windows: list[Window], runtime: Runtime, world: World
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The windows side by side, piece by piece: the position of its first, targets (B, T) and their losses (B, T)."""
    state: GPTState | None = None
    longest = max(length for _, length in windows)
    for position in range(0, longest, _PIECE):
        token_ids, targets = _read(stream, windows, position, min(position + _PIECE, longest))
        token_ids, targets = token_ids.to(world.device), targets.to(world.device)
        with torch.no_grad(), runtime.autocast():
            x, state = gpt.features(token_ids, state, return_state=True)
            losses = token_losses(x.flatten(0, 1), gpt.embed.weight, targets.flatten()).view_as(targets)
        yield position, targets, losses


def _read(stream: TokenStream, windows: list[Window], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Positions [start, stop) of the windows: token_ids and targets, int64 (B, stop - start); a short one is filled."""
    token_ids = torch.full((len(windows), stop - start), stream.eot_id)
    targets = torch.full((len(windows), stop - start), IGNORED)
    for row, (begin, length) in enumerate(windows):
        n = min(stop, length) - start
        if n > 0:
            tokens = torch.from_numpy(stream.read(begin + start, begin + start + n + 1))
            token_ids[row, :n], targets[row, :n] = tokens[:-1], tokens[1:]
    return token_ids, targets
