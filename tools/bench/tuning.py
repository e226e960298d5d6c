"""Times log attention by launch parameters. Those in use depend on types and sizes alone: a resume keeps its bits."""

import itertools
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import logsigmoid

from common.settings import UserError
from model.ops.kernels import why_not_triton
from model.ops.log_attention import log_attention
from tools.bench.harness import Row
from tools.bench.operators import DTYPES, Operator, random_inputs, times_of

WARPS, STAGES, CHUNKS = (4, 8), (1, 2), (64, 32)


def measure(options: Any) -> dict[str, list[Row]]:
    """Time log attention with float32 gates, first as it is used, then for all combinations of parameters."""
    if reason := why_not_triton(options.device, None):
        raise UserError(f"what=tuning: backend='triton' {reason}")
    from model.ops.log_attention import triton as kernels  # importing triton is slow, and it may be missing

    shape = options.batch, options.heads, options.lengths[0], options.head_dim
    leaves, weights = random_inputs(shape, options.device, DTYPES[options.device])

    def run(parameters: dict[str, int], q: Tensor, k: Tensor, log_v: Tensor) -> Tensor:
        kernels.trial.clear()
        kernels.trial.update(parameters)  # the backward pass needs them, too
        log_f = logsigmoid(k[..., :1].float() + 4)
        return log_attention(q, k, log_v, log_f, backend="triton")  # type: ignore[return-value]

    contenders: dict[str, Operator] = {"as used": partial(run, {})}
    for warps, stages, chunk in itertools.product(WARPS, STAGES, CHUNKS):
        parameters = {"warps": warps, "stages": stages, "chunk": chunk}
        contenders[f"{warps} warps, {stages} stages, chunks of {chunk}"] = partial(run, parameters)
    try:
        rows = times_of(contenders, leaves, weights, options)
    finally:
        kernels.trial.clear()
    return {"tuning": [{"parameters": name} | row for name, row in rows.items()]}
