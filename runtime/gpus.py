"""Memory and peak performance of GPUs, from NVIDIA's data sheets and architecture papers.

Nothing is guessed for GPUs not in the table. Figures given "with sparsity" are halved.
"""

import re
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """A GPU model."""

    name: str
    """The name that users give."""
    pattern: str
    """Regular expression found in the name that the GPU reports."""
    memory: float
    """GB (1e9 bytes) in the data sheet; the GPU may have a few percent more."""
    bfloat16: float | None
    """Peak of dense bfloat16 products with float32 sums, TFLOP/s; None: not supported."""
    float32: float
    """Peak in float32 as the trainer uses it, TFLOP/s: TF32 where it is supported."""

    def peak(self, dtype: torch.dtype) -> float | None:
        """Peak of matrix products in this dtype, FLOP/s; None: unknown."""
        tera = {torch.bfloat16: self.bfloat16, torch.float32: self.float32}.get(dtype)
        return None if tera is None else tera * 1e12


DEVICES = (
    Device("b200", r"\bB200\b", 180, 2250, 1125),
    Device("h200-nvl", r"\bH200 NVL\b", 141, 835, 417),
    Device("h200", r"\bH200\b", 141, 989, 494),
    Device("gh200-144gb", r"\bGH200 144G", 144, 989, 494),
    Device("gh200-96gb", r"\bGH200\b", 96, 989, 494),
    Device("h100-pcie", r"\bH100 PCIe\b", 80, 756, 378),
    Device("h100-nvl", r"\bH100 NVL\b", 94, 835, 417),
    Device("h100", r"\bH100\b", 80, 989, 494),
    Device("a100-80gb", r"\bA100\b.*\b80GB\b", 80, 312, 156),
    Device("a100-40gb", r"\bA100\b", 40, 312, 156),
    Device("a800-80gb", r"\bA800\b", 80, 312, 156),
    Device("a40", r"\bA40\b", 48, 149.7, 74.8),
    Device("a30", r"\bA30\b", 24, 165, 82),
    Device("a10g", r"\bA10G\b", 24, 70, 35),
    Device("a10", r"\bA10\b", 24, 125, 62.5),
    Device("l40s", r"\bL40S\b", 48, 362, 183),
    Device("l40", r"\bL40\b", 48, 181, 90.5),
    Device("l4", r"\bL4\b", 24, 121, 60),
    Device("v100-32gb", r"\bV100-SXM2-32GB", 32, None, 15.7),
    Device("v100-16gb", r"\bV100-SXM2-16GB", 16, None, 15.7),
    Device("t4", r"\bT4\b", 16, None, 8.1),
    Device("rtx-5090", r"\bRTX 5090$", 32, 209.5, 104.8),
    Device("rtx-4090", r"\bRTX 4090$", 24, 165.2, 82.6),
    Device("rtx-3090", r"\bRTX 3090$", 24, 71, 35.6),
)


def device_by_name(name: str) -> Device | None:
    """The device with a user's name for it, such as "a100-40gb" or "A100 40GB", or None."""
    return next((device for device in DEVICES if _plain(device.name) == _plain(name)), None)


def device_of_gpu(gpu: str) -> Device | None:
    """The device with the name that a GPU reports, such as "NVIDIA A100-SXM4-40GB".

    None: not in the table, as slices of a GPU (MIG). The first match in the table counts.
    """
    if "MIG" in gpu:
        return None
    return next((device for device in DEVICES if re.search(device.pattern, gpu)), None)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
