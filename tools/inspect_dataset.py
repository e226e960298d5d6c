"""scripts/inspect_dataset.py: shows the sets of a dataset, its text, and what a step read."""

from pathlib import Path
from random import randrange

from pydantic import NonNegativeInt, PositiveInt

from common.command_line import Items
from common.console import say, show_table
from common.settings import UserError
from data.conversations import Spans
from data.loader import TrainBatches, open_rows
from data.prepare.inspect import documents_table, row_text, sets_table
from data.shards import TOKENIZER, Manifest, SplitName, TokenStream, read_manifest
from data.tokenizer import load_tokenizer
from runtime.checkpoint import open_checkpoint
from runtime.state import TrainState


def inspect(
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
    state = None
    if run_dir is not None:
        state = open_checkpoint(run_dir, files=["state.json"]).state
        dataset_dir = dataset_dir or state.own_dataset()
    if dataset_dir is None:
        raise UserError("nothing to inspect: give dataset_dir, or run_dir and step")
    manifest = read_manifest(dataset_dir)
    if step is not None:
        if window or random or split != "train":
            raise UserError(
                "step shows what training read: leave out split, window and random, or step"
            )
        if state is None or run_dir is None:
            raise UserError("step needs a run: give run_dir")
        batches = _batches(run_dir, dataset_dir, manifest, state)
        if step > state.step:
            say(
                f"the run's last checkpoint is of step {state.step}: this is what step {step} "
                "would read"
            )
        rows = [batches.rows.spans(row) for row in batches.numbers(step - 1).tolist()]
        return _show(batches.rows.stream, rows, tokens)
    stream = TokenStream(dataset_dir, manifest, split)
    if stream.has_markers:
        stream.loss = "answers"
    places = window + [randrange(max(1, stream.n_tokens)) for _ in range(random)]
    for token in places:
        if not 0 <= token < stream.n_tokens:
            raise UserError(
                f"token {token} is not in '{split}', which has {stream.n_tokens:,} tokens: "
                "give a lower number"
            )
        _show(stream, [[(token, min(token + tokens, stream.n_tokens))]], tokens)
    if not places:
        show_table(sets_table(manifest))


def _batches(
    run_dir: Path, dataset_dir: Path, manifest: Manifest, state: TrainState
) -> TrainBatches:
    if state.dataset_fingerprint != manifest.fingerprint:
        raise UserError(
            f"{dataset_dir} is not what {run_dir} was trained on: give "
            f"dataset_dir={state.dataset_dir}, or prepare that again as it was"
        )
    stream = TokenStream(dataset_dir, manifest, "train", state.data.loss)
    batches = TrainBatches(open_rows(stream, state.seq_len), state.batch_size, state.seed)
    if state.data.mixture is not None:
        batches.mix(state.data.mixture)
    return batches


def _show(stream: TokenStream, rows: list[Spans], n_tokens: int) -> None:
    """Show the documents behind rows, and the first `n_tokens` of each as text."""
    names = load_tokenizer(stream.dataset_dir / TOKENIZER).tokens
    texts = [row_text(stream, spans, n_tokens, names) for spans in rows]
    show_table(documents_table(stream, rows))
    if stream.loss == "answers":
        say("⟦ and ⟧ enclose the targets: the answers that are trained")
    for row, text in enumerate(texts):
        if len(texts) > 1:
            length = sum(stop - start for start, stop in rows[row])
            shown = "all" if length <= n_tokens else f"the first {n_tokens:,}"
            say(f"--- row {row}, {shown} of {length:,} tokens:")
        say(text)
