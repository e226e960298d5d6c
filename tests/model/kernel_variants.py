"""Counts the variants of kernels that prompts of many lengths need on a GPU, which need not be present.

python tests/model/kernel_variants.py prints a line of JSON: the number of variants by kernel. Triton compiles one for
each set of properties that it specializes for, such as lengths that are multiples of 16. Nothing is compiled here.
"""

import json
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from model.ops.log_attention.naive_attention import LOG_SPACE, empty_state
from model.ops.log_attention.triton_attention import triton_log_attention
from model.ops.log_recurrence import triton_recurrence

variants: dict[str, set[Any]] = defaultdict(set)


def count(kernel: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
    """In place of Triton's compilation: a kernel that does nothing."""
    variants[kernel.__name__].add(key)
    kernels, *_ = kernel.device_caches[device]
    kernels[key] = SimpleNamespace(
        run=lambda *_, **__: None, function=None, packed_metadata=None, launch_metadata=lambda *_: None
    )
    return kernels[key]


def read_prompts(n_texts: int, n_tokens: int) -> None:
    """A forward pass of both operators, as models call them: over parts of a projection."""
    parts = torch.empty(n_texts, n_tokens, 14, 3 * 64, dtype=torch.bfloat16).transpose(1, 2).split(64, dim=-1)
    log_f = torch.empty(n_texts, n_tokens, 14, 1).transpose(1, 2)
    triton_log_attention(*parts, log_f, form=LOG_SPACE, state=empty_state(parts[0], parts[2]))
    log_p, h = torch.empty(n_texts, n_tokens, 2 * 768, dtype=torch.bfloat16).chunk(2, dim=-1)
    triton_recurrence.forward(log_p, h, torch.empty(n_texts, 768))


def main() -> None:
    gpu = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: gpu
        )
    )
    rng = random.Random(0)
    with patch.object(JITFunction, "_do_compile", count), torch.inference_mode():
        for n_tokens in (1, 2, 16, 17, 2048, *(rng.randrange(2, 2049) for _ in range(200))):
            read_prompts(rng.choice([1, 1, 3, 8]), n_tokens)
    print(json.dumps({name: len(keys) for name, keys in variants.items()}))


if __name__ == "__main__":
    main()
