"""Mixtures: each set of a dataset is drawn exactly in proportion to its weight, and any step can be computed alone.

owners      A window belongs to the set that most of its tokens are from, computed at the start from the indexes of the
            shards. In memory, a window takes about five bytes, and eight more during the start.
parts       A set's share of the sequences is its weight times the number of its windows, divided by the sum over sets.
fair_order  The set of each sequence, such that every count is always less than 1 off its share: a table of one period,
            after which every count equals its share and the order repeats.
shuffled    The window of a set's n-th draw: each window once before any repeats, in a new order every time.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from common.console import Track
from common.settings import Settings, UserError
from data.documents import read_index
from data.permutation import shuffled
from data.shards import Manifest

PERIOD = 1_000_000
"""The order of sets repeats after at most this many sequences: shares without such a small common denominator are
rounded to millionths."""

Weights = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class DataConfig(Settings, defaults="train:data"):
    """How training reads the dataset."""

    mixture: Weights | None
    """Weights of the dataset's sets, such as {Pile-CC: 2, Github: 0.5}. A set's share of the sequences is its weight
    times its windows, divided by the sum of that over all sets. Sets that are not named have weight 1; 0 leaves a set
    out. A window of seq_len tokens belongs to the set that most of its tokens are from. null: the corpus as it is,
    every window once an epoch."""
    document_reset: bool
    """Whether the documents of a window don't see each other: the <|endoftext|> that ends one begins the next."""

    loss: Literal["all", "answers"]
    """Which tokens are targets: all, or, in conversations, those of the assistant and <|end|> after them."""

    def reset_at(self, eot_id: int) -> int | None:
        """The id of <|endoftext|> if documents are kept apart (document_reset), else None."""
        return eot_id if self.document_reset else None


def epochs(passes: float) -> str:
    """Return in words how often data is read: "0.25 epochs", "1,200 epochs"."""
    return f"{passes:.3g} epochs" if passes < 1000 else f"{passes:,.0f} epochs"


class Mixture:
    """Assigns a window to each sequence of a run."""

    def __init__(
        self, owners: np.ndarray, set_names: list[str], weights: Weights, seed: int
    ) -> None:
        """Mix windows that belong to the sets `owners` (n_windows,), which are numbers into `set_names`.

        Raises:
            UserError: a set with a weight has no windows, or all weights are 0.
        """
        self.names, self.seed = set_names, seed
        counts = np.bincount(owners, minlength=len(set_names))
        by_set = np.argsort(owners, kind="stable").astype(np.min_scalar_type(owners.size))
        self._windows = np.split(by_set, np.cumsum(counts)[:-1])
        """The windows of each set, in order."""
        sizes = dict(zip(set_names, counts.tolist(), strict=True))
        for name, weight in weights.items():
            if weight and not sizes[name]:
                given = f"data.mixture gives {name!r} the weight {weight:g}"
                raise UserError(
                    f"{given}, but no window consists mostly of it: lower seq_len, or leave it out"
                )
        amounts = [Fraction(str(weights.get(name, 1))) * size for name, size in sizes.items()]
        if not any(amounts):
            raise UserError(
                "data.mixture leaves nothing to train on: give at least one set a weight above 0"
            )
        self.parts = np.array(whole_parts(amounts))
        """Sequences of each set in a period."""
        self._order, self._rank = fair_order(self.parts.tolist())

    def shares(self, n: int) -> str:
        """Each set's share of the first n sequences of a run, and its epochs."""
        of_all = (self.parts / self.parts.sum()).tolist()
        shares = zip(self.names, of_all, self._windows, strict=True)
        sets = [(name, share, n * share / own.size) for name, share, own in shares if share]
        return ", ".join(f"{name} {share:.3%} ({epochs(passes)})" for name, share, passes in sets)

    def windows(self, sequences: np.ndarray) -> np.ndarray:
        """Return the window of each sequence of the run, counted from its first: int64 (n,) -> int64 (n,)."""
        periods, within = np.divmod(sequences, self._order.size)
        sets = self._order[within]
        draws = periods * self.parts[sets] + self._rank[within]
        windows = np.empty_like(sequences)
        for number in np.unique(sets).tolist():
            now = sets == number
            own = self._windows[number]
            windows[now] = own[
                shuffled(draws[now], own.size, key=f"{self.seed}/{self.names[number]}")
            ]
        return windows


def open_mixture(
    dataset_dir: Path, manifest: Manifest, weights: Weights, seq_len: int, seed: int
) -> Mixture:
    """Open the mixture of a dataset's training split.

    Raises:
        UserError: a set does not exist, all weights are 0, or an index is damaged.
    """
    split = manifest.splits["train"]
    if unknown := sorted(weights.keys() - split.sets.keys()):
        what = f"data.mixture gives a weight to {unknown[0]!r}, which is not a set of dataset_dir={dataset_dir}"
        raise UserError(f"{what}: its sets are {', '.join(sorted(split.sets))}")
    n_windows = (split.total.tokens - 1) // seq_len
    documents = _documents(dataset_dir, manifest)
    owners = owners_of_windows(documents, len(manifest.set_names), n_windows, seq_len)
    return Mixture(owners, manifest.set_names, weights, seed)


def _documents(dataset_dir: Path, manifest: Manifest) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ends of the training documents in their split, and their sets, a shard at a time."""
    begin, split = 0, manifest.splits["train"]
    with Track("finding the sets of windows, documents", split.total.documents) as track:
        for shard in split.shards:
            records = read_index(dataset_dir, manifest, shard)
            yield (
                begin + records["end"].astype(np.int64),
                np.array(shard.sets)[records["set"]],
            )
            track.advance(records.size)
            begin += shard.tokens


def owners_of_windows(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], n_sets: int, n_windows: int, seq_len: int
) -> np.ndarray:
    """Return the set that most tokens of each window are from, (n_windows,); ties go to the highest number.

    Args:
        documents: ends (n,), in tokens from the first, and sets (n,) of documents in order, int64, many at a time.
    """
    owners = np.empty(n_windows, np.uint8 if n_sets <= 2**8 else np.uint16)
    begin = 0
    unfinished = np.empty(
        (0, 2), np.int64
    )  # (window and set, tokens) of the window that the last documents end in
    for ends, sets in documents:
        borders = np.arange((begin // seq_len + 1) * seq_len, ends[-1], seq_len)
        cuts = np.union1d(
            ends, borders
        )  # each piece between cuts is in one document and one window
        windows = (cuts - 1) // seq_len
        pairs = windows * n_sets + sets[np.searchsorted(ends, cuts)]
        pieces = np.stack([pairs, np.diff(cuts, prepend=begin)], axis=1)
        pieces = np.concatenate([unfinished, pieces])
        unfinished = pieces[pieces[:, 0] // n_sets == windows[-1]]
        pairs, which = np.unique(pieces[:, 0], return_inverse=True)
        pairs = pairs[np.argsort(np.bincount(which, weights=pieces[:, 1]), kind="stable")]
        pairs = pairs[pairs < n_windows * n_sets]
        owners[pairs // n_sets] = (
            pairs % n_sets
        )  # the largest set of a window comes last and remains
        begin = int(ends[-1])
    return owners


def whole_parts(amounts: list[Fraction]) -> list[int]:
    """Integers in the ratio of `amounts`, with a sum of at most about PERIOD; an amount above 0 gives at least 1."""
    denominator = math.lcm(*(amount.denominator for amount in amounts))
    whole = [int(amount * denominator) for amount in amounts]
    divisor = math.gcd(*whole)
    total = sum(whole) // divisor
    if total <= PERIOD:
        return [n // divisor for n in whole]
    return [max(1, round(Fraction(n // divisor * PERIOD, total))) if n else 0 for n in whole]


def fair_order(parts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Order sum(parts) draws, parts[s] of them from set s, such that each set has its share at any time.

    After any n draws, the count of s is n * parts[s] / sum(parts) rounded up or down: the j-th draw of s, from 0, must
    not come before its share exceeds j, nor after it reaches j + 1. Of the draws that may come, the one with the
    earliest deadline comes first, and none is late (such an order exists: Tijdeman, The chairman assignment problem,
    1980; this rule finds it if it exists: Glover, Maximum matching in a convex bipartite graph, 1967).

    Returns:
        the set of each draw, and the number of earlier draws of this set.
    """
    total = sum(parts)
    order, rank = np.empty(total, np.int64), np.empty(total, np.int64)
    waiting = [
        (0, number, 0) for number, part in enumerate(parts) if part
    ]  # (earliest place, set, its draws so far)
    due: list[tuple[int, int, int]] = []  # (the place it must come before, set, its draws so far)
    for place in range(total):
        while waiting and waiting[0][0] <= place:
            _, number, done = heapq.heappop(waiting)
            heapq.heappush(due, (-(-(done + 1) * total // parts[number]), number, done))
        _, number, done = heapq.heappop(due)
        order[place], rank[place] = number, done
        if done + 1 < parts[number]:
            heapq.heappush(waiting, ((done + 1) * total // parts[number], number, done + 1))
    return order, rank
