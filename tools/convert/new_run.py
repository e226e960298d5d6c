"""Makes a run of a converted model, from whose weights other runs can start."""

import secrets
from pathlib import Path

from common.settings import UserError, decode
from data.tokenizers.build import Tokenizer
from model.gpt import GPT
from runtime.checkpoint import find_newest, save_checkpoint
from runtime.state import NO_DATASET, TrainState
from trainer.records.run_dir import check_folder, own_run


def begin_run(
    gpt: GPT, tokenizer: Tokenizer, run_dir: Path, seq_len: int, batch_tokens: int
) -> Path:
    """Write a run's checkpoint of step 0 with a converted model, for `init_from`; return its path.

    `seq_len` and `batch_tokens` are what eval.py reads unless it is told otherwise.

    Raises:
        UserError: run_dir holds a run, or is another's.
    """
    settings = {
        "step": 0,
        "run_id": secrets.token_hex(4),
        "model": gpt.config,
        "seed": 1,
        "seq_len": seq_len,
        "batch_tokens": batch_tokens,
        "dataset_dir": NO_DATASET,
        "dataset_fingerprint": "",
        "data": {"document_reset": gpt.eot_id is not None},
    }
    state = decode(TrainState, settings)
    check_folder(run_dir)
    with own_run(run_dir):
        if find_newest(run_dir) is not None:
            raise UserError(
                f"run_dir={run_dir} holds a run: choose another one for the converted model"
            )
        tensors = {"model": gpt.state_dict(), "optimizer": {}, "random": {}}
        return save_checkpoint(run_dir, tensors, state, tokenizer)
