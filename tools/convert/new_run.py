"""Makes runs of converted models; other runs can start from their weights."""

import secrets
from pathlib import Path

from common.settings import UserError, decode
from data.tokenizer import Tokenizer
from model.gpt import GPT
from runtime.checkpoint import newest, save_checkpoint
from runtime.state import NO_DATASET, TrainState
from trainer.run_dir import check_folder, own_run


def begin_with(
    gpt: GPT,
    tokenizer: Tokenizer,
    run_dir: Path,
    seq_len: int,
    batch_tokens: int,
    dataset_dir: Path = NO_DATASET,
) -> Path:
    """Make a run of a converted model, for `init_from`: write its checkpoint of step 0, and return
    its path.

    `seq_len`, `batch_tokens` and `dataset_dir` are what eval.py reads unless it is told otherwise.

    Raises:
        UserError: run_dir holds a run, or is another's.
    """
    run = {"step": 0, "run_id": secrets.token_hex(4), "model": gpt.config, "seed": 1}
    sizes = {"seq_len": seq_len, "batch_tokens": batch_tokens}
    data = {
        "dataset_dir": dataset_dir,
        "dataset_fingerprint": "",
        "data": {"document_reset": gpt.eot_id is not None},
    }
    state = decode(TrainState, run | sizes | data)
    check_folder(run_dir)
    with own_run(run_dir):
        if newest(run_dir) is not None:
            raise UserError(
                f"run_dir={run_dir} holds a run: choose another one for the converted model"
            )
        return save_checkpoint(
            run_dir, {"model": gpt.state_dict(), "optimizer": {}, "random": {}}, state, tokenizer
        )
