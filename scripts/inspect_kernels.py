"""Compile the GPU kernels of log attention, without a GPU, and show how many GPU resources they use.

python scripts/inspect_kernels.py                  # types and head sizes side by side, for compute capability 9.0
python scripts/inspect_kernels.py capability=80 dtype=bfloat16 head_dim=32 gates=head,feature
"""

from importlib.util import find_spec
from typing import Literal

from pydantic import PositiveInt

from common.command import Items, run_script
from common.settings import Settings, UserError


class Options(Settings):
    capability: PositiveInt = 90
    """compute capability, times ten"""
    dtype: Items[Literal["bfloat16", "float16", "float32", "float64"]] = ["bfloat16", "float16", "float32", "float64"]
    """types of the inputs"""
    head_dim: Items[PositiveInt] = [32, 64, 128]
    """sizes of a head"""
    gates: Items[Literal["none", "head", "feature"]] = ["none"]
    """kernels without gates, with one for a head or with one for each feature"""


def run(options: Options) -> None:
    if find_spec("triton") is None:
        raise UserError("the package triton is not installed: pip install triton")
    from tools.bench.kernels import inspect  # imports torch and triton, which --help does not need

    inspect(list(options.dtype), options.head_dim, list(options.gates), options.capability)


if __name__ == "__main__":
    run_script(__doc__, Options, run)
