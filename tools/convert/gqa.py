"""From a checkpoint to one with fewer key and value heads (Ainslie et al. 2023, arXiv 2305.13245,
section 2.1)."""

from pathlib import Path

import torch
from torch import Tensor

from common.command_line import overrides
from common.console import say
from common.settings import UserError, decode
from model.gpt import GPT, GPTConfig
from runtime.checkpoint import load_model, open_model
from tools.convert.new_run import begin_with


def convert(checkpoint: Path, run_dir: Path, n_kv_head: int) -> Path:
    """Write the converted model as a run's checkpoint of step 0 and return its path.

    Raises:
        UserError: there is no whole checkpoint, its heads cannot be shared like this, or run_dir
            holds a run.
    """
    opened = open_model(checkpoint)
    before, tokenizer = load_model(opened)
    after = shared(before, n_kv_head)
    state = opened.state
    path = begin_with(
        after, tokenizer, run_dir, state.seq_len, state.batch_tokens, state.dataset_dir
    )
    settings = overrides({"init_from": str(run_dir), "run_dir": f"{run_dir}-trained"})
    say(f"{path}: {before.n_params():,} parameters before, {after.n_params():,} now")
    say(
        "train it with python train.py, the settings of the first run except for its model, and "
        f"{settings}"
    )
    return path


def shared(gpt: GPT, n_kv_head: int) -> GPT:
    """Return the model with n_kv_head key and value heads in every layer that can share them.

    Raises:
        UserError: no layer can, or n_kv_head does not divide the heads of one.
    """
    with torch.device("meta"):
        fewer = GPT(with_n_kv_head(gpt.config, n_kv_head), gpt.eot_id)
    tensors = dict(gpt.state_dict())
    for path, module in fewer.named_modules():
        n_before, n_after = (
            getattr(each, "n_kv_head", 0) for each in (gpt.get_submodule(path), module)
        )
        for name, parameter in module.named_parameters(path) if n_before != n_after else ():
            if parameter.shape != tensors[name].shape:
                width = (
                    4 if name.endswith(".conv") else 1
                )  # weights of one feature, in as many rows of one vector
                rows = tensors[name].unflatten(0, (width, -1)).transpose(0, 1)
                fewer_rows = pooled(
                    rows, len(parameter) // width, n_before, n_after, gpt.config.head_features
                )
                tensors[name] = fewer_rows.transpose(0, 1).flatten(0, 1)
    fewer.load_state_dict(tensors, assign=True)
    return fewer.requires_grad_()


def pooled(rows: Tensor, n_rows: int, n_before: int, n_after: int, head_dim: int) -> Tensor:
    """Return a projection's weight or bias, now n_rows rows, with the means of groups of key and
    value heads.

    The last rows belong to these heads, of keys, values or both; the rows before them, for queries,
    stay. Group g holds heads g r to g r + r - 1 with r = n_before / n_after: those that the group's
    query heads attended to before.
    """
    kinds = (len(rows) - n_rows) // ((n_before - n_after) * head_dim)  # 2: keys and values
    queries, heads = rows.tensor_split([len(rows) - kinds * n_before * head_dim])
    grouped = heads.double().unflatten(0, (kinds, n_after, n_before // n_after, head_dim))
    first = grouped[:, :, :1]
    means = first + (grouped - first).mean(2, keepdim=True)  # exact if the heads are equal
    return torch.cat([queries, means.flatten(0, 3).to(rows.dtype)])


def with_n_kv_head(config: GPTConfig, n_kv_head: int) -> GPTConfig:
    """Return the configuration with n_kv_head key and value heads in every layer that has this
    setting."""
    raw = config.model_dump()
    layers = [
        layer for layer in raw["attention_pattern"] or [raw["attention"]] if "n_kv_head" in layer
    ]
    if {layer["n_kv_head"] or config.n_head for layer in layers} <= {n_kv_head}:
        raise UserError(
            f"n_kv_head={n_kv_head} changes no layer's key and value heads: there is nothing to "
            "convert"
        )
    for layer in layers:
        heads = layer["n_kv_head"] or config.n_head
        if n_kv_head < 1 or heads % n_kv_head:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            what = (
                f"n_kv_head={n_kv_head} does not divide the {heads} key and value heads of "
                f"{layer['name']}"
            )
            raise UserError(f"{what}: use one of {divisors}")
        layer["n_kv_head"] = n_kv_head
    return decode(GPTConfig, raw)
