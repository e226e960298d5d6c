"""Compile the Triton kernels, without a GPU, and show how many GPU resources they use.

python scripts/inspect_kernels.py                  # types and head sizes side by side, for compute capability 9.0
python scripts/inspect_kernels.py capability=80 dtype=bfloat16 head_dim=32 gates=head,feature state=true
python scripts/inspect_kernels.py operator=loss,log_recurrence capability=120
"""

from typing import Literal

from pydantic import PositiveInt

from common.command import Items, Settings, run_script


class Options(Settings):
    capability: PositiveInt = 90
    """compute capability, times ten"""
    operator: Items[Literal["log_attention", "loss", "log_recurrence"]] = ["log_attention", "loss", "log_recurrence"]
    """whose kernels"""
    dtype: Items[Literal["bfloat16", "float16", "float32", "float64"]] = ["bfloat16", "float16", "float32", "float64"]
    """types of the inputs"""
    head_dim: Items[PositiveInt] = [32, 64, 128]
    """sizes of a head, for log_attention"""
    gates: Items[Literal["none", "head", "feature"]] = ["none"]
    """kernels of log_attention without gates, with one for a head or with one for each feature"""
    state: Items[bool] = [False]
    """kernels of log_attention that continue from a state, and return the one after"""


if __name__ == "__main__":
    run_script(__doc__, Options, "tools.bench.kernels:inspect")
