"""scripts/inspect_dataset.py: shows the sets of a dataset, its text, and what a step read."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from random import randrange

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from rich.table import Table

from common.command_line import Items
from common.console import say, show_table, table_of
from common.settings import UserError, escape_controls
from data.conversations import Ranges
from data.document_index import find_documents
from data.loader import TrainBatches, open_rows
from data.prepare.finish import build_sets_table
from data.shards import TOKENIZER, Manifest, SplitName, TokenStream, read_manifest
from data.tokenizers.build import load_tokenizer
from data.tokenizers.chat import answer_targets
from runtime.checkpoint import open_checkpoint
from runtime.state import TrainState


def inspect_dataset(
    dataset_dir: Path | None,
    split: SplitName,
    window: Items[int],
    random: NonNegativeInt,
    tokens: PositiveInt,
    step: PositiveInt | None,
    run_dir: Path | None,
) -> None:
    """Show what the options of scripts/inspect_dataset.py ask for.

    Raises:
        UserError: there is no such dataset, run or token, or the run was trained on another
            dataset.
    """
    # A run names its dataset.
    if run_dir is not None:
        state = open_checkpoint(run_dir, files=["state.json"]).state
        dataset_dir = dataset_dir or state.own_dataset()
    if dataset_dir is None:
        raise UserError("nothing to inspect: give dataset_dir, or run_dir and step")
    manifest = read_manifest(dataset_dir)
    # What a step of training read.
    if step is not None:
        if run_dir is None:
            raise UserError("step needs a run: give run_dir")
        if step > state.step:
            say(
                f"the run's last checkpoint is of step {state.step}: this is what step {step} "
                "would read"
            )
        batches = _open_batches(run_dir, dataset_dir, manifest, state)
        rows = [batches.rows.ranges(row) for row in batches.numbers(step - 1).tolist()]
        _show(batches.rows.stream, rows, tokens, state.data.loss == "answers")
        return
    # Windows at given places and at random ones, or else the sets.
    stream = TokenStream(dataset_dir, manifest, split)
    starts = window + [randrange(max(1, stream.n_tokens)) for _ in range(random)]
    for start in starts:
        if not 0 <= start < stream.n_tokens:
            raise UserError(
                f"token {start} is not in '{split}', which has {stream.n_tokens:,} tokens: "
                "give a lower number"
            )
        ranges = [(start, min(start + tokens, stream.n_tokens))]
        _show(stream, [ranges], tokens, bool(manifest.tokenizer.markers))
    if not starts:
        show_table(build_sets_table(manifest))


def _open_batches(
    run_dir: Path, dataset_dir: Path, manifest: Manifest, state: TrainState
) -> TrainBatches:
    if state.dataset_fingerprint != manifest.fingerprint:
        raise UserError(
            f"{dataset_dir} is not what {run_dir} was trained on: give "
            f"dataset_dir={state.dataset_dir}, or prepare that again as it was"
        )
    stream = TokenStream(dataset_dir, manifest, "train")
    rows = open_rows(stream, state.seq_len, state.data.loss)
    batches = TrainBatches(rows, state.batch_size, state.seed)
    if state.data.mixture is not None:
        batches.mix(state.data.mixture)
    return batches


def _show(stream: TokenStream, rows: list[Ranges], n_tokens: int, on_answers: bool) -> None:
    """Show the documents behind rows, and the first `n_tokens` of each as text."""
    names = load_tokenizer(stream.dataset_dir / TOKENIZER).tokens
    texts = [row_text(stream, ranges, n_tokens, names, on_answers) for ranges in rows]
    show_table(documents_table(stream, rows))
    if on_answers:
        say("⟦ and ⟧ enclose the targets: the answers that are trained")
    for row, text in enumerate(texts):
        if len(texts) > 1:
            length = sum(stop - start for start, stop in rows[row])
            shown = "all" if length <= n_tokens else f"the first {n_tokens:,}"
            say(f"--- row {row}, {shown} of {length:,} tokens:")
        say(text)


def row_text(
    stream: TokenStream,
    ranges: Ranges,
    n_tokens: int,
    tokens: Sequence[bytes],
    on_answers: bool,
) -> str:
    """Return the text of the first `n_tokens` tokens of a row, with control characters escaped.

    With the loss on answers, ⟦ and ⟧ enclose the targets.

    Args:
        tokens: the bytes of each id; of one without text, its name.
    """
    text = b""
    for start, stop in ranges:
        stop = min(stop, start + n_tokens)
        n_tokens -= stop - start
        marked = np.zeros(stop - start, bool)
        if on_answers:
            marked = _are_targets(stream, start, stop)
        ids = stream.read(start, stop).tolist()
        for is_target, group in groupby(zip(ids, marked, strict=True), itemgetter(1)):
            words = b"".join(tokens[token_id] for token_id, _ in group)
            text += "⟦".encode() + words + "⟧".encode() if is_target else words
    return escape_controls(text.decode(errors="replace"), whitespace="\n\t")


def _are_targets(stream: TokenStream, start: int, stop: int) -> np.ndarray:
    """Return whether tokens [start, stop) of conversations are targets, bool (stop - start,)."""
    are_targets = np.zeros(stop - start, bool)
    for document in find_documents(stream, start, stop):
        stored = stream.read_stored(document.start, min(document.stop, stop))
        ids = np.append(stream.eot_id, stored)
        _, targets = answer_targets(ids, stream.n_vocab)
        first = max(start, document.start)
        are_targets[first - start : document.stop - start] = targets[first - document.start :] >= 0
    return are_targets


def documents_table(stream: TokenStream, rows: list[Ranges]) -> Table:
    """Return a table of the documents in rows of a split, and their inputs."""
    table = table_of(
        ["set", "input"], ["document", "tokens read", "of", "row", "offset in the split"]
    )
    for row, ranges in enumerate(rows):
        for start, stop in ranges:
            for document in find_documents(stream, start, stop):
                begin = max(start, document.start)
                end = min(stop, document.stop)
                table.add_row(
                    escape_controls(document.set_name),
                    escape_controls(document.input),
                    f"{document.number:,}",
                    f"{begin - document.start:,} - {end - document.start:,}",
                    f"{document.stop - document.start:,}",
                    f"{row}",
                    f"{begin:,}",
                )
    return table
