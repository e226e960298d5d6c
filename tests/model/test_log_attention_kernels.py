"""The GPU kernels of log attention against the definition, in Triton's interpreter."""

import agreement
import pytest
import torch
from gradients import FORMS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter; test_kernels.py is for GPUs")

BFLOAT16, FLOAT16, FLOAT32 = ([dtype] * 3 for dtype in (torch.bfloat16, torch.float16, torch.float32))


@pytest.mark.parametrize(
    ("form", "dtypes", "sizes"),
    [
        ("log_space", [*FLOAT32, torch.float32], (16, 16, 24, 1)),
        ("linear", [*BFLOAT16, torch.float32], (20, 20, 16, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("log_space", BFLOAT16, (64, 64, 32)),
                ("log_space", [*BFLOAT16, torch.float32], (128, 128, 128, 1)),
                ("log_space", [torch.bfloat16, torch.float32, *BFLOAT16[:2]], (40, 40, 16, 1)),
                ("signed", [*FLOAT16, torch.float32], (32, 32, 20, 1)),
                ("signed", FLOAT32, (20, 20, 100)),
                ("linear", FLOAT16, (64, 64, 64)),
            ]
        ),
    ],
)
def test_the_operator_agrees_with_the_definition(form, dtypes, sizes):
    agreement.compare_log_attention("cpu", dtypes, sizes, lengths=(65, 33), form=FORMS[form])
