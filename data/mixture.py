"""Mixtures: sets of a dataset are drawn exactly in proportion to their weights.

Any step can be computed alone.

owners        A window belongs to the set that most of its tokens are from, computed at the start
              from the indexes of the shards. In memory, a window takes at most four bytes, and more
              during the start.
quotas        Sequences of each set in a period. A set's share of the sequences is its weight times
              the number of its windows, divided by the sum over sets.
order_fairly  The set of each sequence, such that every count is always less than 1 off its share: a
              table of one period, after which every count equals its share and the order repeats.
shuffle       The window of a set's n-th draw: each window once before any repeats, in a new order
              every time.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np

from common.console import Track, warn
from common.numbers import ceil_div
from common.settings import UserError
from data.config import Weights
from data.document_index import read_ends
from data.permutation import shuffle_places
from data.shards import TokenStream

PERIOD = 1_000_000
"""The order of sets repeats after about this many sequences, or fewer.

Shares without such a small common denominator are rounded to millionths.
"""
_MANY_EPOCHS = 20


def format_epochs(passes: float) -> str:
    """Return in words how often data is read: "0.25 epochs", "1,200 epochs"."""
    return f"{passes:.3g} epochs" if passes < 1000 else f"{passes:,.0f} epochs"


def warn_of_epochs(passes: float) -> None:
    """Warn if a run reads its data too often."""
    if passes > _MANY_EPOCHS:
        warn(
            f"the run reads its data for {format_epochs(passes)}, and learns it by heart: "
            "give epochs=3, fewer max_steps, or more data"
        )


class Mixture:
    """Assigns a window to each sequence of a run."""

    def __init__(
        self, owners: np.ndarray, set_names: list[str], weights: Weights, seed: int
    ) -> None:
        """Mix windows that belong to the sets `owners` (n_windows,), numbers into `set_names`.

        Raises:
            UserError: a set with a weight has no windows, or all weights are 0.
        """
        self.names = set_names
        self.seed = seed
        counts = np.bincount(owners, minlength=len(set_names))
        by_set = np.argsort(owners, kind="stable").astype(np.min_scalar_type(owners.size))
        self._windows = np.split(by_set, np.cumsum(counts)[:-1])
        """The windows of each set, in order."""
        sizes = dict(zip(set_names, counts.tolist(), strict=True))
        for name, weight in weights.items():
            if weight and not sizes[name]:
                raise UserError(
                    f"data.mixture gives {name!r} the weight {weight:g}, but no window consists "
                    "mostly of it: lower seq_len, raise it if no answer fits, or leave it out"
                )
        amounts = [Fraction(str(weights.get(name, 1))) * size for name, size in sizes.items()]
        if not any(amounts):
            raise UserError(
                "data.mixture leaves nothing to train on: give at least one set a weight above 0"
            )
        self.quotas = np.array(round_quotas(amounts))
        """Sequences of each set in a period."""
        self._order, self._rank = order_fairly(self.quotas.tolist())

    def shares(self, n: int) -> str:
        """Return each set's share of the first n sequences of a run, and its epochs, in words."""
        shares = (self.quotas / self.quotas.sum()).tolist()
        descriptions = []
        for name, share, windows in zip(self.names, shares, self._windows, strict=True):
            if share:
                descriptions.append(
                    f"{name} {share:.3%} ({format_epochs(n * share / windows.size)})"
                )
        return ", ".join(descriptions)

    def rows(self, sequences: np.ndarray) -> np.ndarray:
        """Return the window of each sequence, counted from the run's first: int64 (n,)."""
        periods, places = np.divmod(sequences, self._order.size)
        sets = self._order[places]
        draws = periods * self.quotas[sets] + self._rank[places]
        windows = np.empty_like(sequences)
        for number in np.unique(sets).tolist():
            is_drawn = sets == number
            set_windows = self._windows[number]
            key = f"{self.seed}/{self.names[number]}"
            windows[is_drawn] = set_windows[shuffle_places(draws[is_drawn], set_windows.size, key)]
        return windows


def find_owners(stream: TokenStream, n_windows: int, seq_len: int) -> np.ndarray:
    """Return the set that most tokens of each window of a split are from, (n_windows,).

    Raises:
        UserError: an index is damaged.
    """
    n_documents = stream.manifest.splits[stream.split].total.documents
    with Track("finding the sets of windows, documents", n_documents) as track:

        def documents() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for ends, sets in read_ends(stream):
                yield ends, sets
                track.advance(ends.size)

        return compute_owners(documents(), len(stream.manifest.set_names), n_windows, seq_len)


def compute_owners(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], n_sets: int, n_windows: int, seq_len: int
) -> np.ndarray:
    """Return the set that most tokens of each window are from, (n_windows,).

    Of sets with equally many tokens, it is the one with the highest number.

    Args:
        documents: ends (n,), in tokens from the first, and sets (n,) of documents in order, int64,
            many at a time.
    """
    owners = np.empty(n_windows, np.uint8 if n_sets <= 2**8 else np.uint16)
    # The tokens of each pair of a window and a set are counted. A pair is window * n_sets + set.
    # The last window may go on in the next documents, so its pairs are counted again with those.
    last_pairs = np.empty(0, np.int64)
    last_tokens = np.empty(0, np.int64)
    begin = 0
    for ends, sets in documents:
        borders = np.arange((begin // seq_len + 1) * seq_len, ends[-1], seq_len)
        # Between two cuts, all tokens are of one document and one window.
        cuts = np.union1d(ends, borders)
        windows = (cuts - 1) // seq_len
        pairs = windows * n_sets + sets[np.searchsorted(ends, cuts)]
        pairs = np.concatenate([last_pairs, pairs])
        n_tokens = np.concatenate([last_tokens, np.diff(cuts, prepend=begin)])
        # Add up the tokens of equal pairs.
        pairs, index = np.unique(pairs, return_inverse=True)
        n_tokens = np.bincount(index, weights=n_tokens)
        is_last = pairs // n_sets == windows[-1]
        last_pairs = pairs[is_last]
        last_tokens = n_tokens[is_last]
        # The largest set of a window is written last, and remains. The rest of the split after
        # the last whole window has no owner.
        pairs = pairs[np.argsort(n_tokens, kind="stable")]
        pairs = pairs[pairs < n_windows * n_sets]
        owners[pairs // n_sets] = pairs % n_sets
        begin = int(ends[-1])
    return owners


def round_quotas(amounts: list[Fraction]) -> list[int]:
    """Return integers in the ratio of `amounts`, with a sum of at most about PERIOD.

    An amount above 0 gives at least 1.
    """
    denominator = math.lcm(*(amount.denominator for amount in amounts))
    integers = [int(amount * denominator) for amount in amounts]
    divisor = math.gcd(*integers)
    integers = [n // divisor for n in integers]
    total = sum(integers)
    if total <= PERIOD:
        return integers
    return [max(1, round(Fraction(n * PERIOD, total))) if n else 0 for n in integers]


def order_fairly(quotas: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Order sum(quotas) draws, quotas[s] of them from set s: each set has its share at any time.

    After any n draws, the count of s is n * quotas[s] / sum(quotas) rounded up or down: the j-th
    draw of s, from 0, must not come before its share exceeds j, nor after it reaches j + 1. Of the
    draws that may come, the one with the earliest deadline comes first, and none is late. Such an
    order exists (Tijdeman, The chairman assignment problem, 1980), and this rule finds it if it
    exists (Glover, Maximum matching in a convex bipartite graph, 1967).

    Returns:
        the set of each draw, and the number of earlier draws of this set.
    """
    total = sum(quotas)
    order = np.empty(total, np.int64)
    rank = np.empty(total, np.int64)
    # Entries are (place, set, draws of it so far). The next draw of a set waits until its earliest
    # place, and is then due before its deadline.
    waiting = [(0, number, 0) for number, quota in enumerate(quotas) if quota]
    due: list[tuple[int, int, int]] = []
    for place in range(total):
        while waiting and waiting[0][0] <= place:
            _, number, n_drawn = heapq.heappop(waiting)
            deadline = ceil_div((n_drawn + 1) * total, quotas[number])
            heapq.heappush(due, (deadline, number, n_drawn))
        _, number, n_drawn = heapq.heappop(due)
        order[place] = number
        rank[place] = n_drawn
        n_drawn += 1
        if n_drawn < quotas[number]:
            heapq.heappush(waiting, (n_drawn * total // quotas[number], number, n_drawn))
    return order, rank
