"""The check of torch.compile, which runs before a GPU trains with it: see model/ops/checks.py."""

import contextlib
import json
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from common.settings import decode
from model.gpt import GPT, GPTConfig
from model.layers import Recompute
from model.ops.checks import Outputs, judge, require_same_bits, separate_compiled_code

_SEQUENCES, _TOKENS = 2, 130


def shortened(config: GPTConfig) -> str:
    """Return the same model with few layers and tokens, as JSON: what `check` compiles."""
    n_layer = min(config.n_layer, max(2, len(config.attention_pattern or [])))
    n_vocab = min(config.n_vocab, 512)
    return json.dumps(
        config.model_dump(mode="json") | {"n_layer": n_layer, "n_vocab": n_vocab}, sort_keys=True
    )


def without_zeros(gpt: GPT) -> GPT:
    """Give parameters that start at 0 random values, so that errors in what they are multiplied with show."""
    for p in gpt.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.02)
    return gpt


def check(
    device: str,
    model: str,
    dtype: str,
    deterministic: bool,
    recompute: Recompute = "none",
    by_block: bool = False,
    documents: bool = False,
    compiled: bool = True,
) -> None:
    """Compare the loss and all gradients of a compiled model with those of the same model in float64 on the CPU.

    Args:
        model: GPTConfig as JSON.
        dtype: bfloat16 is autocast.
        deterministic: whether torch's algorithms are deterministic; then two runs must have the same bits.
        recompute: what backward passes compute again.
        by_block: whether each block is compiled by itself, as with fsdp.
        documents: whether documents don't see each other.
        compiled: False only runs the model as it is, so that its kernels have been checked.

    Raises:
        Wrong: an error is more than twice that of the model that is not compiled, or a second run has other bits.
    """
    torch.use_deterministic_algorithms(deterministic)
    torch.manual_seed(0)
    config = decode(GPTConfig, json.loads(model))
    n_ids = min(config.n_vocab, 16)  # so few that strings occur again
    ids = torch.randint(n_ids, (_SEQUENCES, min(_TOKENS, config.max_len or _TOKENS) + 1))
    truth = without_zeros(
        GPT(config, eot_id=int(ids[0, ids.shape[1] // 2]) if documents else None)
    ).double()
    gpt = deepcopy(truth).to(
        device, torch.float32 if dtype == "bfloat16" else getattr(torch, dtype)
    )
    gpt.recompute = recompute
    own = _loss_and_gradients(gpt, gpt.summed_loss, ids, dtype)
    if not compiled:
        return
    exact = _loss_and_gradients(truth, truth.summed_loss, ids, "float64")
    separate_compiled_code()
    summed_loss = gpt.summed_loss if by_block else torch.compile(gpt.summed_loss)
    for block in gpt.blocks if by_block else []:
        block.compile()
    runs = [_loss_and_gradients(gpt, summed_loss, ids, dtype) for _ in range(2)]
    judge(
        "compiled",
        runs[0],
        own,
        exact,
        4 * torch.finfo(torch.bfloat16).eps if dtype == "bfloat16" else 0.0,
    )
    if deterministic:
        require_same_bits("compiled", *runs)


def _loss_and_gradients(
    gpt: GPT, summed_loss: Callable[..., Tensor], ids: Tensor, dtype: str
) -> Outputs:
    """The mean loss of the tokens, as in a training step."""
    ids = ids.to(gpt.device)
    with (
        torch.autocast(ids.device.type, torch.bfloat16)
        if dtype == "bfloat16"
        else contextlib.nullcontext()
    ):
        loss = summed_loss(ids[:, :-1], ids[:, 1:])
    loss = loss / ids[:, 1:].numel()
    params = dict(gpt.named_parameters())
    gradients = zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)
    return Outputs(
        {"the loss": loss.detach()}, {f"the gradient of {name}": x for name, x in gradients}
    )
