"""Whole conversations in rows: each exactly once, as alone, packed as best-fit says."""

import itertools
import json

import numpy as np
import pytest

from common.settings import UserError, decode
from data.conversations import Conversations, pack_rows
from data.loader import TrainBatches, open_eval_batches, open_rows
from data.prepare.dataset import PrepareConfig, prepare_dataset
from data.shards import TokenStream
from data.tokenizers.chat import IGNORED

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
        rows = pack_rows(lengths, seq_len)
        packed = np.bincount(rows, weights=lengths).tolist()
        assert sorted(packed) == naive_pack(lengths.tolist(), seq_len)


@pytest.fixture
def conversations(tmp_path):
    """A dataset of questions and answers of these lengths, and the ids and targets of each by itself."""

    def build(lengths, sets="a"):
        records = []
        alone = []
        for number, (question, answer) in enumerate(lengths):
            pair = {"prompt": chr(97 + number) * question, "completion": "y" * answer}
            records.append(pair | {"meta": {"pile_set_name": sets[number % len(sets)]}})
            ids = [EOT, USER, *[97 + number] * question, ASSISTANT, *[ord("y")] * answer, END]
            targets = [IGNORED] * (question + 2) + ids[question + 3 :]
            alone.append((ids[:-1], targets))
        file = tmp_path / "chat.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in [*records, *records[:1]]))
        raw = {"data": {"name": "chat", "path": str(file)}, "tokenizer": {"name": "bytes"}}
        tokens = sum(len(ids) + 1 for ids, _ in alone)
        out = {"out_dir": str(tmp_path / "out"), "val_tokens": tokens, "workers": 1}
        manifest = prepare_dataset(decode(PrepareConfig, raw | out))
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
    n_long = sum(len(ids) > seq_len for ids, _ in alone)
    n_lost = sum(target >= 0 for _, targets in alone for target in targets[seq_len:])
    assert f"{n_long} of 10 conversations" in rows.summary() or not n_long
    assert f": {n_lost} tokens of answers are left out" in rows.summary() or not n_long
    windows = open_eval_batches(stream, seq_len, loss="answers")
    evaluated = [pieces(*map(np.squeeze, windows.rows(row, row + 1))) for row in range(len(windows))]
    assert evaluated == found, "validation has the same rows"
    batches = TrainBatches(open_rows(stream, seq_len, "answers"), batch_size=len(rows), seed=3)
    token_ids, targets = batches.batch(5)
    assert sorted(map(pieces, token_ids, targets)) == sorted(found), "an epoch has each row once"


def test_sets_are_in_rows_of_their_own_and_ranges_name_the_targets(conversations):
    stream, _ = conversations(LENGTHS, sets="ab")
    rows = Conversations(stream, 32)
    for row, owner in enumerate(rows.owners().tolist()):
        token_ids, targets = rows.read(row)
        read = []
        for start, stop in rows.ranges(row):
            ids = [EOT, *stream.read(start, stop - 1)]
            assert (ids[2] - 97) % 2 == owner, "its question is the letter of its number"
            read += ids
        assert token_ids[: len(read)].tolist() == read
        assert (targets[len(read) :] == IGNORED).all()


def test_no_answer_within_a_row_is_an_error(conversations):
    stream, _ = conversations([(9, 1), (12, 3)])
    with pytest.raises(UserError, match="'val' has no conversation with an answer within seq_len=8: raise seq_len"):
        Conversations(stream, 8)
