"""Whole conversations in rows: each exactly once, as alone, packed as best-fit says."""

import itertools
import json

import numpy as np
import pytest

from common.settings import UserError, decode
from data.chat import IGNORED
from data.conversations import Conversations, pack
from data.loader import TrainBatches, eval_batches, open_rows
from data.prepare.dataset import PrepareConfig, prepare
from data.shards import TokenStream, read_manifest

USER, ASSISTANT, END, EOT = 258, 259, 260, 256  # of bytes


def naive_pack(lengths, seq_len):
    """Best-fit, from its definition: the tokens in each row."""
    rows = []
    for length in lengths:
        fitting = [row for row in rows if sum(row) + length <= seq_len]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return sorted(map(sum, rows))


@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
def test_rows_are_filled_best_fit(seq_len):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, seq_len + 1, rng.integers(1, 60))
        rows = pack(lengths, seq_len)
        packed = np.bincount(rows, weights=lengths).tolist()
        assert sorted(packed) == naive_pack(lengths.tolist(), seq_len)


@pytest.fixture
def conversations(tmp_path):
    """A dataset of questions and answers of these lengths, and the ids and targets of each by itself."""

    def build(lengths, sets=("a",)):
        records, alone = [], []
        names = itertools.cycle(sets)
        for number, (question, answer) in enumerate(lengths):
            texts = chr(97 + number % 26) * question, "y" * answer
            pair = dict(zip(("prompt", "completion"), texts, strict=True))
            records.append(pair | {"meta": {"pile_set_name": next(names)}})
            ids = [EOT, USER, *texts[0].encode(), ASSISTANT, *texts[1].encode(), END]
            targets = [IGNORED] * (question + 2) + ids[question + 3 :]
            alone.append((ids[:-1], targets))
        file = tmp_path / "chat.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in [*records, *records[:1]]))
        raw = {"data": {"name": "chat", "path": str(file)}, "tokenizer": {"name": "bytes"}, "workers": 1}
        tokens = sum(len(ids) + 1 for ids, _ in alone)
        prepare(decode(PrepareConfig, raw | {"out_dir": str(tmp_path / "out"), "val_tokens": tokens}))
        manifest = read_manifest(tmp_path / "out")
        return TokenStream(tmp_path / "out", manifest, "val"), alone

    return build


def pieces(token_ids, targets):
    """The conversations of a row, cut at each <|endoftext|>, without the padding."""
    starts = [*np.flatnonzero(token_ids == EOT).tolist(), len(token_ids)]
    found = [(token_ids[a:b].tolist(), targets[a:b].tolist()) for a, b in itertools.pairwise(starts)]
    return [piece for piece in found if len(piece[0]) > 1]


LENGTHS = [(1, 1), (5, 2), (3, 9), (1, 4), (7, 7), (2, 2), (6, 1), (1, 1), (4, 3), (2, 11)]


@pytest.mark.parametrize("seq_len", [8, 16, 17, 64])
def test_every_conversation_is_in_one_row_as_it_is_alone(conversations, seq_len):
    """One that is too long keeps its beginning, and is left out if that has no answer."""
    stream, alone = conversations(LENGTHS)
    cut = [(ids[:seq_len], targets[:seq_len]) for ids, targets in alone]
    wanted = sorted(piece for piece in cut if any(target >= 0 for target in piece[1]))
    rows = Conversations(stream, seq_len)
    found = [pieces(*rows.read(row)) for row in range(len(rows))]
    assert sorted(itertools.chain(*found)) == wanted
    lost = sum(target >= 0 for ids, targets in alone for target in targets[seq_len:])
    n_long = sum(len(ids) > seq_len for ids, _ in alone)
    said = (
        f"; {n_long} of 10 conversations {'is' if n_long == 1 else 'are'} longer than seq_len={seq_len}: {lost} tokens"
    )
    assert (said in rows.summary()) == (n_long > 0)
    windows = eval_batches(stream, seq_len, loss="answers")
    evaluated = [pieces(*map(np.squeeze, windows.rows(row, row + 1))) for row in range(len(windows))]
    assert evaluated == found, "validation has the same rows"
    assert windows.rows(2, 2)[0].shape == (0, seq_len)
    batches = TrainBatches(open_rows(stream, seq_len, "answers"), batch_size=len(rows), seed=3)
    token_ids, targets = batches.batch(5)
    assert sorted(map(pieces, token_ids, targets)) == sorted(found), "an epoch has each row once"


def test_sets_are_in_rows_of_their_own_and_ranges_name_the_targets(conversations):
    stream, _ = conversations(LENGTHS, sets=("a", "b"))
    rows = Conversations(stream, 32)
    for row, owner in enumerate(rows.owners().tolist()):
        token_ids, targets = rows.read(row)
        ranges = rows.ranges(row)
        read = [np.append(EOT, stream.read(start, stop))[:-1] for start, stop in ranges]
        assert token_ids[: sum(map(len, read))].tolist() == np.concatenate(read).tolist()
        letters = {chr(ids[2]) for ids in read}
        assert {(ord(letter) - 97) % 2 for letter in letters} == {owner}
        assert (targets[sum(map(len, read)) :] == IGNORED).all()


def test_no_answer_within_a_row_is_an_error(conversations):
    stream, _ = conversations([(9, 1), (12, 3)])
    with pytest.raises(UserError, match="'val' has no conversation with an answer within seq_len=8: raise seq_len"):
        Conversations(stream, 8)
