"""Whole conversations packed into rows of seq_len tokens, with the answers as targets.

A row is <|endoftext|> and a conversation, then the next, and <|endoftext|> as padding. Every
conversation starts as it does in sampling, after <|endoftext|>, at which document_reset hides all
before it. So its loss is the same in a row as alone.
"""

import bisect
from collections import defaultdict

import numpy as np

from common.settings import UserError
from data.document_index import read_ends
from data.shards import TokenStream
from data.tokenizers.chat import IGNORED, answer_targets

Ranges = list[tuple[int, int]]
"""Tokens [start, stop) of a split."""


def pack_rows(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the row of each item, int64 (n,): rows of seq_len tokens, filled best-fit.

    Each item goes into the row with the least room that is enough, or into a new row. Items are not
    sorted, which would fill 2 % more and give rows of equal lengths, which are often of one kind.

    Args:
        lengths: (n,), none above seq_len.
    """
    rows = np.empty(len(lengths), np.int64)
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    """The rows with a room, a number of free tokens."""
    rooms: list[int] = []
    """The rooms that rows have, in order."""
    n_rows = 0
    for item, length in enumerate(lengths.tolist()):
        smallest = bisect.bisect_left(rooms, length)
        if smallest < len(rooms):
            room = rooms[smallest]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[smallest]
        else:
            room = seq_len
            row = n_rows
            n_rows += 1
        rows[item] = row
        room -= length
        if room and not with_room[room]:
            bisect.insort(rooms, room)
        with_room[room].append(row)
    return rows


class Conversations:
    """The conversations of a split, in rows that depend only on the dataset and seq_len.

    One that is longer than a row is cut at its end, and left out if none of its answers remains.
    Conversations of different sets are in different rows.
    """

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        """Read the indexes of the split, and the conversations that are longer than a row.

        Raises:
            UserError: the dataset has no conversations, an index is damaged, or no answer fits into
                a row.
        """
        if not stream.manifest.tokenizer.markers:
            raise UserError(
                f"data.loss=answers needs conversations, and dataset_dir={stream.dataset_dir} has "
                "none: prepare it with data=chat, or use data.loss=all"
            )
        self.stream = stream
        self.seq_len = seq_len
        # Where each conversation is in the split, without its <|endoftext|>, and its set.
        shards = [(np.empty(0, np.int64), np.empty(0, np.int64)), *read_ends(stream)]
        ends, sets = map(np.concatenate, zip(*shards, strict=True))
        starts = np.append(0, ends)[:-1]
        stops = ends - 1
        self.n_conversations = len(starts)
        # Read those that are cut: what is lost, and which of them have no answer left.
        is_long = stops - starts > seq_len
        self.n_long = int(is_long.sum())
        self.n_lost_targets = 0
        """Tokens of answers that are cut off."""
        has_answer = np.ones(len(starts), bool)
        for number in np.flatnonzero(is_long).tolist():
            _, targets = self._read(int(starts[number]), int(stops[number]))
            self.n_lost_targets += int((targets[seq_len:] >= 0).sum())
            has_answer[number] = (targets[:seq_len] >= 0).any()
        # Leave these out, and cut the others.
        starts = starts[has_answer]
        stops = np.minimum(stops[has_answer], starts + seq_len)
        sets = sets[has_answer]
        if not len(starts):
            raise UserError(
                f"split '{stream.split}' has no conversation with an answer within {seq_len=}: "
                "raise seq_len, or prepare more conversations"
            )
        rows, self._sets = _pack_sets(stops - starts, sets, seq_len)
        # Sort by row, so that the conversations of a row are a slice.
        order = np.argsort(rows, kind="stable")
        self._starts = starts[order]
        self._stops = stops[order]
        self._firsts = np.searchsorted(rows[order], np.arange(len(self._sets) + 1))
        """The first conversation of each row, and the end of the last."""

    def __len__(self) -> int:
        return len(self._sets)

    def owners(self) -> np.ndarray:
        """Return the set of each row, a number into the manifest's set_names, (n_rows,)."""
        return self._sets

    def ranges(self, row: int) -> Ranges:
        """Return where the conversations of a row are in the split. Targets are among them."""
        numbers = slice(self._firsts[row], self._firsts[row + 1])
        return list(zip(self._starts[numbers].tolist(), self._stops[numbers].tolist(), strict=True))

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and targets of a row, int64 (seq_len,)."""
        token_ids = np.full(self.seq_len, self.stream.eot_id, np.int64)
        targets = np.full(self.seq_len, IGNORED, np.int64)
        begin = 0
        for start, stop in self.ranges(row):
            end = begin + stop - start
            token_ids[begin:end], targets[begin:end] = self._read(start, stop)
            begin = end
        return token_ids, targets

    def _read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return <|endoftext|> with tokens [start, stop - 1), and the targets after each."""
        ids = np.append(self.stream.eot_id, self.stream.read_stored(start, stop))
        return answer_targets(ids, self.stream.n_vocab)

    def summary(self) -> str:
        """Return in words what the rows hold, and what is left out."""
        words = f"{self.n_conversations:,} conversations in {len(self):,} rows"
        if self.n_long:
            are = "is" if self.n_long == 1 else "are"
            words += (
                f"; {self.n_long:,} of {self.n_conversations:,} conversations {are} longer than "
                f"seq_len={self.seq_len}: {self.n_lost_targets:,} tokens of answers are left out"
            )
        return words


def _pack_sets(
    lengths: np.ndarray, sets: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of each item (n,), and the set of each row: items of a set share rows."""
    rows = np.empty(len(lengths), np.int64)
    sets_of_rows = []
    n_rows = 0
    for number in np.unique(sets).tolist():
        is_in_set = sets == number
        packed = pack_rows(lengths[is_in_set], seq_len)
        rows[is_in_set] = n_rows + packed
        n_new = int(packed.max()) + 1
        sets_of_rows.append(np.full(n_new, number))
        n_rows += n_new
    return rows, np.concatenate(sets_of_rows)
