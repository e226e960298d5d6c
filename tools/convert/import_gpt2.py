"""Turns a Hugging Face folder of a GPT2LMHeadModel into a run with one checkpoint, at step 0.

The folder is not trusted: only JSON and safetensors are read; no code runs and no pickle is loaded.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.command_line import overrides
from common.console import say, warn
from common.files import file_size, read_json
from common.settings import JsonDict, UserError
from data.chat import ChatTokenizer
from data.shards import TOKENIZER
from data.tokenizer import Tokenizer
from model.gpt import GPT
from runtime.checkpoint import FLOATS
from runtime.tensor_file import read_header, read_tensors
from tools.convert.hf_tokenizer import read_tokenizer_json
from tools.convert.hugging_face.gpt2 import PREFIX, gpt2_name, read_gpt2_config, turned
from tools.convert.new_run import begin_with

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MASK_TYPES = (torch.bool, torch.uint8, torch.float32)
_PADDING = 128  # rows without an id that are usual, because sizes of a power of 2 are faster
_SEQUENCES = 480  # of a step: the published batch
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
    path = begin_with(gpt, tokenizer, run_dir, seq_len, sizes["batch_tokens"])
    say(
        f"{path}: {gpt.n_params():,} parameters, tokenizer {tokenizer.name} of "
        f"{tokenizer.n_vocab:,} ids"
    )
    if not isinstance(tokenizer, ChatTokenizer):
        options = {"data": "text", "data.path": "notes", "tokenizer": tokenizer.name}
        if tokenizer.name == "hf":
            options["tokenizer.path"] = str(path / TOKENIZER)
        options["out_dir"] = _TO_CHOOSE["dataset_dir"]
        say(f"prepare text for it with python scripts/prepare_data.py {overrides(options)}")
    runs = {"init_from": str(run_dir), "run_dir": f"{run_dir}-trained"}
    say(f"train it with python train.py {overrides({**runs, **sizes, **_TO_CHOOSE})}")
    say(f"{', '.join(_TO_CHOOSE)} are examples: choose your own, and any dataset of this tokenizer")
    return path


def read_gpt2(folder: Path) -> tuple[GPT, Tokenizer]:
    """Return the model and the tokenizer in a folder that `save_pretrained` wrote, or that was
    downloaded.

    Raises:
        UserError: a file is missing or invalid.
    """
    files = _weight_files(folder)
    paths = {
        name: (folder / name).resolve() for name in ("config.json", "tokenizer.json", *files)
    }  # or links
    for name, path in paths.items():
        if file_size(path) is None:
            how = "load model and tokenizer with transformers, and save_pretrained(FOLDER) both"
            raise UserError(f"{folder} has no {name}: {how}")
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
    if config.n_vocab - tokenizer.n_vocab >= _PADDING:
        what = (
            f"the model has rows for {config.n_vocab} ids, and tokenizer.json has "
            f"{tokenizer.n_vocab}"
        )
        warn(f"{folder}: {what}: make sure that it is the model's own")
    with torch.device("meta"):
        gpt = GPT(config)
    gpt.load_state_dict(_weights([paths[name] for name in files], gpt), assign=True)
    return gpt.requires_grad_(), tokenizer


def _weight_files(folder: Path) -> list[str]:
    """Names of the files with the weights: one, or several that an index lists."""
    index = (folder / _INDEX).resolve()
    if file_size((folder / _WEIGHTS).resolve()) is not None or file_size(index) is None:
        return [_WEIGHTS]
    raw = read_json(index, limit=2**20)
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    files = sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []
    if not files or not all(re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) for name in files):
        raise UserError(
            f"{index} must list files such as model-00001-of-00002.safetensors, beside it"
        )
    return files


def _weights(paths: list[Path], gpt: GPT) -> dict[str, Tensor]:
    """Read our weights from GPT-2's files, in float32 unless they are float64."""
    names = {name for path in paths for name in read_header(path)[1]}
    prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
    own = gpt.state_dict()
    theirs = {ours: prefix + gpt2_name(ours) for ours in own}
    expected: dict[str, Any] = {
        name: (turned(name, own[ours]).shape, FLOATS) for ours, name in theirs.items()
    }
    if "lm_head.weight" in names:
        expected["lm_head.weight"] = expected[theirs["embed.weight"]]
    n, layers = gpt.config.max_len or 0, range(gpt.config.n_layer)
    masks = {
        "bias": torch.Size([1, 1, n, n]),
        "masked_bias": torch.Size([]),
    }  # old files store causal masks, too
    of_layers = {
        f"{prefix}h.{i}.attn.{name}": (shape, _MASK_TYPES)
        for i in layers
        for name, shape in masks.items()
    }
    expected |= {name: kind for name, kind in of_layers.items() if name in names}
    stored = read_tensors(paths, expected)
    if bad := next((name for name in theirs.values() if not stored[name].isfinite().all()), None):
        raise UserError(
            f"{paths[0].parent}: {bad} has values that are not finite: such a model computes "
            "nothing"
        )
    embed = stored[theirs["embed.weight"]]
    if not torch.equal(stored.get("lm_head.weight", embed), embed):
        raise UserError(
            f"{paths[0].parent}: lm_head.weight differs from wte.weight, but our output layer is "
            "the embedding"
        )
    weights = {ours: turned(name, stored[name]).contiguous() for ours, name in theirs.items()}
    return {ours: x if x.dtype == torch.float64 else x.float() for ours, x in weights.items()}
