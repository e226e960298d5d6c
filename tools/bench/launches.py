"""Launch settings of log attention's kernels, side by side."""

import itertools
from functools import partial
from typing import Any
from unittest.mock import patch

from torch.nn.functional import logsigmoid
from triton.errors import TritonError

from common.console import say
from model.ops.log_attention import log_attention
from model.ops.log_attention import triton as launcher
from tools.bench.harness import Row, benchmark
from tools.bench.operators import DTYPES, attention_inputs, device_named, medians, time_passes

WIDTH = 768  # features of all heads
ROUNDS = 5


@benchmark("medians; the first row of each kind has the settings in use")
def bench(options: Any) -> Row:
    """Measure every combination of settings for every kind of head."""
    rows: list[Row] = []
    settings = [None, *itertools.product(options.warps, options.stages, options.registers)]
    for d, gates, setting in itertools.product(options.head_dim, options.gates, settings):
        row = {"d": d, "gates": gates} | measured(options, d, gates, setting)
        say(", ".join(f"{key} {value}" for key, value in row.items()))
        rows.append(row)
    return {"rows": rows}


def measured(options: Any, d: int, gates: str, setting: tuple[int, int, int] | None) -> Row:
    """Times with these warps, stages and registers; None: with those in use. Why not, if the GPU cannot run them."""
    device = device_named("auto").type
    leaves, weights = attention_inputs((options.batch, max(1, WIDTH // d), options.tokens, d), device, DTYPES[device])
    if gates != "none":
        log_f = logsigmoid(leaves[0].detach()[..., : 1 if gates == "head" else d] + 4)
        leaves.append(log_f.requires_grad_())
    run = {"kernels": partial(log_attention, backend="triton")}
    if setting is None:
        return {"warps": None, "stages": None, "registers": None} | medians(
            time_passes(run, leaves, weights, ROUNDS)["kernels"]
        )
    warps, stages, registers = setting
    constants = launcher._constants
    row: Row = {"warps": warps, "stages": stages, "registers": registers}
    with (
        patch.object(launcher, "_launch", lambda P: {"num_warps": warps, "maxnreg": registers}),
        patch.object(launcher, "_constants", lambda *a, **k: constants(*a, **k)._replace(STAGES=stages)),
    ):
        try:
            return row | medians(time_passes(run, leaves, weights, ROUNDS)["kernels"])
        except (TritonError, RuntimeError) as error:  # a compiler or a GPU that refuses is a result
            return row | {"refused": str(error).splitlines()[0][:60]}
