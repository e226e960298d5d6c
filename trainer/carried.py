"""Carried state (data.carry_state): each sequence of a batch goes on from the state that the last step left.

A process holds the states of its own sequences, as one state with a row for each.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from model.gpt import GPTState
from model.state import cat_states, select_rows, tensors_of
from trainer.distributed import World


def restarted_rows(state: GPTState, begins: Tensor, empty: GPTState) -> GPTState:
    """Replace the rows where `begins` (rows,), bool, by `empty`, a state of one row: they begin the corpus again."""
    if not begins.any():
        return state
    rows = torch.arange(len(begins)).masked_fill(begins, len(begins))
    return select_rows(cat_states([state, empty]), rows.tolist())


def split_rows(state: GPTState, counts: Sequence[int]) -> list[GPTState]:
    """Split a state into micro-batches of these numbers of rows, which are views."""
    ends = itertools.accumulate(counts, initial=0)
    return [select_rows(state, slice(first, stop)) for first, stop in itertools.pairwise(ends)]


def gathered(state: GPTState | None, world: World, counts: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of all processes by name, on the CPU, in the main process. Every process must call this.

    Args:
        counts: how many rows each process has.
    """
    whole = {}
    for name, (own, _) in tensors_of(state, "carried"):
        same_size = torch.cat([own, own.new_zeros(max(counts) - len(own), *own.shape[1:])]).to(world.device)
        rows = [part[:n] for part, n in zip(world.gather(same_size), counts, strict=True)]
        if world.is_main:
            whole[name] = torch.cat(rows).cpu()
    return whole
