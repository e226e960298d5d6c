"""Look into a dataset: its sets, its text, and which documents a training step is made of.

python scripts/inspect_dataset.py dataset_dir=datasets/pile chart=sets.png           # table and picture of the sets
python scripts/inspect_dataset.py dataset_dir=datasets/pile random=3 window=123456   # text at random and given places
python scripts/inspect_dataset.py dataset_dir=datasets/pile step=100 run_dir=runs/demo    # the documents behind a step
python scripts/inspect_dataset.py dataset_dir=datasets/pile step=100 seed=1 seq_len=1024 batch_tokens=491520
"""

import random
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from common.command import Items, Settings, run_script
from common.console import say, show_table
from common.settings import UserError
from data.loader import TrainBatches, step_windows
from data.mixture import open_mixture
from data.prepare.inspect import documents_table, draw_sets, sets_table, window_text
from data.shards import Manifest, TokenStream, read_manifest


class Options(Settings):
    dataset_dir: Path
    """what scripts/prepare_data.py made"""
    chart: Path | None = None
    """a .png file: draws the tokens of the sets into it"""
    split: Literal["train", "val"] = "train"
    """train or val: whose text to show"""
    window: Items[int] = []
    """tokens of the split: shows the text from these places on"""
    random: NonNegativeInt = 0
    """shows text from this many random places"""
    tokens: PositiveInt = 128
    """length of each text shown, in tokens"""
    step: PositiveInt | None = None
    """shows the documents behind this training step; the first is 1"""
    run_dir: Path | None = None
    """the run that the step belongs to; or give its settings:"""
    seed: int | None = None
    """seed of that run"""
    seq_len: PositiveInt | None = None
    """tokens of a sequence in that run"""
    batch_tokens: PositiveInt | None = None
    """tokens of a step in that run"""


def batches_of(options: Options, manifest: Manifest) -> TrainBatches:
    """Return the batches of the run in run_dir, or of a run with the given settings."""
    run: Any = options
    if options.run_dir is not None:
        from trainer.checkpoint import open_checkpoint  # imports torch, which --help does not need

        run = open_checkpoint(options.run_dir, files=["state.json"]).state
        if run.dataset_fingerprint != manifest.fingerprint:
            raise UserError(
                f"{options.run_dir} was trained on {run.dataset_dir}, not on {options.dataset_dir}: "
                f"use dataset_dir={run.dataset_dir}"
            )
    seed, seq_len, batch_tokens = run.seed, run.seq_len, run.batch_tokens
    if None in (seed, seq_len, batch_tokens):
        raise UserError("step needs a run: give run_dir, or seed, seq_len and batch_tokens")
    if batch_tokens % seq_len:
        raise UserError(f"batch_tokens={batch_tokens} is not a multiple of seq_len={seq_len}: no run has these")
    stream = TokenStream(options.dataset_dir, manifest, "train")
    batches = TrainBatches(stream, seq_len, batch_tokens // seq_len, seed)
    if options.run_dir is not None and run.data.mixture is not None:
        batches.mixture = open_mixture(options.dataset_dir, manifest, run.data.mixture, seq_len, seed)
    return batches


def run(options: Options) -> None:
    manifest = read_manifest(options.dataset_dir)
    if options.step is not None:
        windows = step_windows(batches_of(options, manifest), options.step)
        return show_table(documents_table(options.dataset_dir, manifest, "train", windows))
    n_tokens = manifest.splits[options.split].total.tokens
    places = options.window + [random.randrange(max(1, n_tokens)) for _ in range(options.random)]
    for token in places:
        text = window_text(options.dataset_dir, manifest, options.split, token, options.tokens)
        show_table(documents_table(options.dataset_dir, manifest, options.split, [(token, token + options.tokens)]))
        say(text)
    if not places:
        show_table(sets_table(manifest))
    if options.chart:
        draw_sets(manifest, options.chart, f"{options.dataset_dir}: tokens of its sets")
        say(f"drawn into {options.chart}")


if __name__ == "__main__":
    run_script(__doc__, Options, run)
