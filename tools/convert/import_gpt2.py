"""Turns a Hugging Face folder of a GPT2LMHeadModel into a run with one checkpoint, at step 0.

The folder is not trusted: only JSON and safetensors are read; no code runs and no pickle is loaded.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.command_line import format_options
from common.console import say
from common.files import file_size, read_json
from common.settings import JsonDict, UserError
from data.shards import TOKENIZER
from data.tokenizers.build import Tokenizer
from data.tokenizers.chat import ChatTokenizer
from model.gpt import GPT
from runtime.checkpoint import FLOATS
from runtime.tensor_file import load_tensors, read_header
from tools.convert.hf_tokenizer import read_tokenizer_json
from tools.convert.hugging_face.gpt2 import PREFIX, name_in_gpt2, read_gpt2_config, transpose_weight
from tools.convert.new_run import begin_run

_WEIGHTS = "model.safetensors"
_MASK_TYPES = (torch.bool, torch.uint8, torch.float32)
_SEQUENCES = 480  # sequences of a step: the published batch
_TO_CHOOSE: JsonDict = {
    "dataset_dir": "datasets/notes",
    "optim.max_lr": 6e-5,
    "max_steps": 1000,
    "schedule.warmup_steps": 100,
}
"""Suggested settings: a short training at a tenth of the usual rate."""


def import_gpt2(folder: Path, run_dir: Path) -> Path:
    """Write a run's checkpoint of step 0 and return its path.

    Raises:
        UserError: the folder does not hold such a model, or run_dir holds a run.
    """
    gpt, tokenizer = read_gpt2(folder)
    seq_len = gpt.config.max_len or 1
    sizes = {"seq_len": seq_len, "batch_tokens": _SEQUENCES * seq_len}
    path = begin_run(gpt, tokenizer, run_dir, **sizes)
    say(
        f"{path}: {gpt.n_params():,} parameters, tokenizer {tokenizer.name} of "
        f"{tokenizer.n_vocab:,} ids"
    )
    if not isinstance(tokenizer, ChatTokenizer):
        options = {"data": "text", "data.path": "notes", "tokenizer": tokenizer.name}
        if tokenizer.name == "hf":
            options["tokenizer.path"] = str(path / TOKENIZER)
        options["out_dir"] = _TO_CHOOSE["dataset_dir"]
        say(f"prepare text for it with python scripts/prepare_data.py {format_options(options)}")
    runs = {"init_from": str(run_dir), "run_dir": f"{run_dir}-trained"}
    say(f"train it with python train.py {format_options({**runs, **sizes, **_TO_CHOOSE})}")
    say(f"{', '.join(_TO_CHOOSE)} are examples: choose your own, and any dataset of this tokenizer")
    return path


def read_gpt2(folder: Path) -> tuple[GPT, Tokenizer]:
    """Return the model and the tokenizer in a folder of `save_pretrained`, or a downloaded one.

    Raises:
        UserError: a file is missing or invalid.
    """
    # The files may be links, as in a hub's cache.
    names = ("config.json", "tokenizer.json", _WEIGHTS)
    paths = {name: (folder / name).resolve() for name in names}
    for name, path in paths.items():
        if file_size(path) is None:
            raise UserError(
                f"{folder} has no {name}: load model and tokenizer with transformers, and "
                "save_pretrained(FOLDER) both, with max_shard_size='100GB' if the model is in "
                "several files"
            )
    # Its architecture must be GPT-2's, and its tokenizer one of ours.
    try:
        config = read_gpt2_config(read_json(paths["config.json"], limit=2**20))
    except UserError as error:
        raise UserError(
            f"{folder / 'config.json'} does not describe a GPT2LMHeadModel like GPT-2: {error}"
        ) from None
    tokenizer = read_tokenizer_json(paths["tokenizer.json"])
    if tokenizer.n_vocab > config.n_vocab:
        raise UserError(
            f"{folder} has a tokenizer with {tokenizer.n_vocab} ids, but the model has only "
            f"{config.n_vocab}"
        )
    with torch.device("meta"):
        gpt = GPT(config)
    gpt.load_state_dict(_weights(paths[_WEIGHTS], gpt), assign=True)
    return gpt.requires_grad_(), tokenizer


def _weights(path: Path, gpt: GPT) -> dict[str, Tensor]:
    """Read our weights from GPT-2's file, in float32 unless they are float64."""
    stored_names = read_header(path)[1].keys()
    prefix = PREFIX if any(name.startswith(PREFIX) for name in stored_names) else ""
    parameters = gpt.state_dict()
    stored_name_of = {name: prefix + name_in_gpt2(name) for name in parameters}
    expected: dict[str, Any] = {}
    for name, stored_name in stored_name_of.items():
        expected[stored_name] = (transpose_weight(stored_name, parameters[name]).shape, FLOATS)
    if "lm_head.weight" in stored_names:
        expected["lm_head.weight"] = expected[stored_name_of["embed.weight"]]
    max_len = gpt.config.max_len or 0
    # Old files store causal masks, too.
    masks = {"bias": torch.Size([1, 1, max_len, max_len]), "masked_bias": torch.Size([])}
    for layer in range(gpt.config.n_layer):
        for name, shape in masks.items():
            mask = f"{prefix}h.{layer}.attn.{name}"
            if mask in stored_names:
                expected[mask] = (shape, _MASK_TYPES)
    stored = load_tensors([path], expected)
    weights = {}
    for name, stored_name in stored_name_of.items():
        if not stored[stored_name].isfinite().all():
            raise UserError(
                f"{path.parent}: {stored_name} has values that are not finite: such a model "
                "computes nothing"
            )
        weight = transpose_weight(stored_name, stored[stored_name]).contiguous()
        weights[name] = weight if weight.dtype == torch.float64 else weight.float()
    embed = stored[stored_name_of["embed.weight"]]
    if not torch.equal(stored.get("lm_head.weight", embed), embed):
        raise UserError(
            f"{path.parent}: lm_head.weight differs from wte.weight, but our output layer is the "
            "embedding"
        )
    return weights
