"""What scripts/inspect_dataset.py shows: the sets of a dataset, its text, and what a training step
read."""

from pathlib import Path
from random import randrange

from pydantic import NonNegativeInt, PositiveInt

from common.command_line import Items
from common.console import say, show_table
from common.settings import UserError
from data.loader import TrainBatches
from data.prepare.inspect import documents_table, sets_table, window_text
from data.shards import Manifest, SplitName, TokenStream, read_manifest
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
    state = None if run_dir is None else open_checkpoint(run_dir, files=["state.json"]).state
    dataset_dir = state.own_dataset() if dataset_dir is None and state else dataset_dir
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
        return _show(
            dataset_dir,
            manifest,
            "train",
            batches.starts(step - 1).tolist(),
            batches.seq_len + 1,
            tokens,
        )
    n_tokens = manifest.splits[split].total.tokens
    places = window + [randrange(max(1, n_tokens)) for _ in range(random)]
    for token in places:
        _show(dataset_dir, manifest, split, [token], tokens, tokens)
    if not places:
        show_table(sets_table(manifest))


def _batches(
    run_dir: Path, dataset_dir: Path, manifest: Manifest, state: TrainState
) -> TrainBatches:
    if state.dataset_fingerprint != manifest.fingerprint:
        what = f"{dataset_dir} is not what {run_dir} was trained on"
        raise UserError(
            f"{what}: give dataset_dir={state.dataset_dir}, or prepare that again as it was"
        )
    stream = TokenStream(dataset_dir, manifest, "train")
    batches = TrainBatches(stream, state.seq_len, state.batch_size, state.seed)
    if state.data.mixture is not None:
        batches.mix(dataset_dir, manifest, state.data.mixture)
    return batches


def _show(
    dataset_dir: Path,
    manifest: Manifest,
    split: SplitName,
    starts: list[int],
    length: int,
    n_tokens: int,
) -> None:
    """Show the documents behind windows of `length` tokens of a split, and the first `n_tokens` of
    each as text."""
    shown = min(length, n_tokens)
    texts = [window_text(dataset_dir, manifest, split, start, shown) for start in starts]
    show_table(
        documents_table(dataset_dir, manifest, split, [(start, start + length) for start in starts])
    )
    for row, text in enumerate(texts):
        if len(texts) > 1:
            say(
                f"--- row {row:,}, {'all' if shown == length else f'the first {shown:,}'} of "
                f"{length:,} tokens:"
            )
        say(text)
