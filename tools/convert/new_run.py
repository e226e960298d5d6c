"""A run that begins with a converted model."""

import secrets
from pathlib import Path
from typing import Any

import torch

from common.files import make_directory
from common.settings import UserError, decode
from data.tokenizer import Tokenizer
from model.gpt import GPT
from trainer.checkpoint import TrainState, newest, save_checkpoint
from trainer.optim import AdamWConfig, named_state
from trainer.randomness import RANDOM, random_state, seed_process
from trainer.resume import own_run


def begin_with(gpt: GPT, tokenizer: Tokenizer, run_dir: Path, **of_run: Any) -> Path:
    """Start a run with a converted model: write its checkpoint of step 0, with a fresh optimizer, and return its path.

    Args:
        of_run: seed, sizes and data of the run, as in TrainState.

    Raises:
        UserError: run_dir holds a run.
    """
    run_id = secrets.token_hex(4)
    state = decode(TrainState, {"step": 0, "run_id": run_id, "model": gpt.config, **of_run})
    make_directory(run_dir, "run_dir")
    with own_run(run_dir):
        if newest(run_dir) is not None:
            raise UserError(f"run_dir={run_dir} holds a run: choose another one for the converted model")
        seed_process(f"{state.seed} 0 0")
        tensors = {
            "model": gpt.state_dict(),
            "optimizer": named_state(gpt, decode(AdamWConfig, {"name": "adamw"}).build(gpt)),
            "random": {RANDOM: random_state(torch.device("cpu")).unsqueeze(0)},
        }
        return save_checkpoint(run_dir, tensors, state, tokenizer)
