"""Look into a dataset: its sets, its text, and which documents a training step is made of.

python scripts/inspect_dataset.py datasets/pile --chart sets.png             # table and picture of the sets
python scripts/inspect_dataset.py datasets/pile --random 3 --window 123456   # text at random places, and at a given one
python scripts/inspect_dataset.py datasets/pile --step 100 --run runs/demo   # the documents behind a step of a run
python scripts/inspect_dataset.py datasets/pile --step 100 --seed 1 --seq-len 1024 --batch-tokens 491520
"""

import argparse
import random
import sys
from pathlib import Path

from common.command import parser_of, positive, run_script
from common.console import say, show_table
from common.settings import UserError
from data.loader import TrainBatches, step_windows
from data.mixture import open_mixture
from data.prepare.inspect import documents_table, draw_sets, sets_table, window_text
from data.shards import Manifest, TokenStream, read_manifest


def options() -> argparse.ArgumentParser:
    """What the command line may say."""
    parser = parser_of(__doc__)
    parser.add_argument("dataset_dir", type=Path, help="what scripts/prepare_data.py made")
    parser.add_argument("--chart", type=Path, metavar="PNG", help="draw the tokens of the sets into this file")
    parser.add_argument("--split", choices=["train", "val"], default="train", help="whose text to show")
    parser.add_argument(
        "--window", type=int, nargs="+", default=[], metavar="TOKEN", help="show text from these places"
    )
    parser.add_argument("--random", type=positive, default=0, metavar="N", help="show text from N random places")
    parser.add_argument("--tokens", type=positive, default=128, metavar="N", help="length of the text shown")
    parser.add_argument("--step", type=positive, help="show the documents behind this training step; the first is 1")
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="the run whose step it is; or give its settings:")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seq-len", type=positive)
    parser.add_argument("--batch-tokens", type=positive)
    return parser


def batches_of(args: argparse.Namespace, manifest: Manifest) -> TrainBatches:
    """The batches of the run that --run names, or that has the settings given."""
    seed, seq_len, batch_tokens, mixture = args.seed, args.seq_len, args.batch_tokens, None
    if args.run is not None:
        from trainer.checkpoint import open_checkpoint  # here, because torch takes its time

        state = open_checkpoint(args.run, files=["state.json"]).state
        if state.dataset_fingerprint != manifest.fingerprint:
            raise UserError(f"{args.run} was trained on {state.dataset_dir}, not on {args.dataset_dir}: inspect that")
        seed, seq_len, batch_tokens, mixture = state.seed, state.seq_len, state.batch_tokens, state.data.mixture
    elif None in (seed, seq_len, batch_tokens):
        raise UserError("--step is a step of which run? Give --run RUN_DIR, or --seed, --seq-len and --batch-tokens")
    if batch_tokens % seq_len:
        raise UserError(f"--batch-tokens {batch_tokens} is not a multiple of --seq-len {seq_len}: no run has these")
    stream = TokenStream(args.dataset_dir, manifest, "train")
    batches = TrainBatches(stream, seq_len, batch_tokens // seq_len, seed)
    if mixture is not None:
        batches.mixture = open_mixture(args.dataset_dir, manifest, mixture, seq_len, seed)
    return batches


def inspect(args: argparse.Namespace) -> None:
    """Show what is asked for."""
    manifest = read_manifest(args.dataset_dir)
    if args.step is not None:
        windows = step_windows(batches_of(args, manifest), args.step)
        show_table(documents_table(args.dataset_dir, manifest, "train", windows))
        return
    n_tokens = manifest.splits[args.split].total.tokens
    places = args.window + [random.randrange(max(1, n_tokens)) for _ in range(args.random)]
    for token in places:
        text = window_text(args.dataset_dir, manifest, args.split, token, args.tokens)
        show_table(documents_table(args.dataset_dir, manifest, args.split, [(token, token + args.tokens)]))
        say(text)
    if not places:
        show_table(sets_table(manifest))
    if args.chart:
        draw_sets(manifest, args.chart, f"{args.dataset_dir}: tokens of its sets")
        say(f"drawn into {args.chart}")


if __name__ == "__main__":
    sys.exit(run_script(options(), inspect))
