"""Whole parts on a GPU: training, resuming, several processes, compiled code. Operators are tested in tests/model.

On the CPU, the tests that need no GPU of their own compare the CPU with itself.
"""

import json

import pytest
import torch
from made_on import suspended
from safetensors.torch import load_file

from model.config import GPTConfig
from model.gpt import GPT
from runtime.checkpoint import find_newest, load_model
from tools import doctor
from trainer.loop import fit

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("restored_torch")]


def losses(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "val_loss") if key in line]


@pytest.mark.parametrize(
    ("attention", "decay"),
    [("log_space", "none"), ("softmax", "none"), ("linear", "none"), ("sliding_window", None)]
    + [(name, "head") for name in ("log_space", "softmax", "linear")],
)
def test_a_gpu_trains_as_the_cpu_does(tiny, tmp_path, device, attention, decay):
    """In float64. Adam divides gradients by their size plus 1e-8, so a rounding of 1e-16 becomes one of 1e-8, and a
    step moves weights by 1e-2 of that: losses after 4 steps are some 1e-9 apart."""
    if device.type == "cpu":
        pytest.skip("compares a GPU with the CPU")
    mechanism = {"name": attention} | ({} if decay is None else {"decay": decay})
    settings = {"model.attention": mechanism, "runtime.dtype": "float64", "runtime.compile": False, "max_steps": 4}
    settings |= {"eval.batches": 1, "model.ngrams": [1, 3] if decay == "head" else []}
    for place in ("cpu", device.type):
        fit(tiny(settings | {"runtime.device": place, "run_dir": tmp_path / place}))
    torch.testing.assert_close(losses(tmp_path / device.type), losses(tmp_path / "cpu"), rtol=0, atol=1e-7)


def test_a_run_goes_on_with_the_same_bits(tiny, tmp_path, device):
    settings = {"runtime.device": device.type, "runtime.dtype": "bfloat16", "runtime.compile": False, "max_steps": 4}
    settings |= {"runtime.deterministic": True, "eval.batches": 1}
    for run, stops in (("whole", [4]), ("parts", [2, 4])):
        for stop_at in stops:
            fit(tiny(settings | {"run_dir": tmp_path / run, "stop_at": stop_at}))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name in ("model", "optimizer", "random"):
        parts = load_file(find_newest(tmp_path / "parts") / f"{name}.safetensors")
        whole = load_file(find_newest(tmp_path / "whole") / f"{name}.safetensors")
        assert all(torch.equal(parts[key], value) for key, value in whole.items())
    gpt, _ = load_model(tmp_path / "parts")
    assert gpt.to(device)(torch.zeros(1, 3, dtype=torch.int64)).isfinite().all()


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_of_torchrun_is_as_none(run_process, tiny_args, tmp_path, strategy):
    """With NCCL. float32 products have 10 bits, as TF32, and may be summed in another order: 2^-11 of a loss of 6."""
    args = ["train.py", *tiny_args, "runtime.device=cuda", "runtime.compile=false"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    run_process([*args, f"run_dir={tmp_path / 'alone'}"])
    run_process([*launcher, *args, f"run_dir={tmp_path / 'launched'}", f"runtime.strategy={strategy}"])
    torch.testing.assert_close(losses(tmp_path / "launched"), losses(tmp_path / "alone"), rtol=0, atol=2e-2)


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("attention", ["log_space", "softmax", "linear"])
def test_compiled_is_eager(attention, device):
    """In float32, by inductor. Gradients are sums over 140 tokens of products of some 100 terms, in another order: each
    is off by up to 14,000 x 2^-24 = 1e-3 of its terms, which are about 1."""
    torch.manual_seed(0)
    parts = {"attention": {"name": attention}, "block": {"name": "mlp"}, "position": {"name": "log_recurrence"}}
    gpt = GPT(GPTConfig(n_vocab=11, n_layer=2, n_head=2, n_embd=32, **parts)).to(device)
    ids = torch.randint(11, (2, 71))
    results = []
    for loss in (gpt.summed_loss, torch.compile(gpt.summed_loss)):
        gpt.zero_grad()
        with suspended():
            value = loss(ids[:, :-1], ids[:, 1:])
            value.backward()
        results.append([value.detach(), *(p.grad.clone() for p in gpt.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("words", [doctor.FLAGSHIP, *doctor.OTHERS], ids=lambda words: words[-1])
def test_the_gradients_of_the_125m_models_are_right(words):
    """Of two blocks: log attention, the log recurrence, the loss and FlexAttention, compiled, in bfloat16."""
    with suspended():
        assert doctor.prove_model(words) == doctor.AGREES


@pytest.mark.gpu(alone=True)
def test_the_flagship_trains_as_it_is_set_up(command, tiny_args, tmp_path):
    """Compiled, in bfloat16, with micro_batch=auto, then evaluated and sampled from."""
    defaults = [word for word in tiny_args if not word.startswith("runtime.")]
    assert command("train", *defaults, "runtime.device=cuda", "runtime.micro_batch=auto", "max_steps=60").status == 0
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 0.5
    assert command("eval", f"checkpoint={tmp_path / 'run'}").status == 0
    result = command("sample", f"checkpoint={tmp_path / 'run'}", "prompt=self", "max_new_tokens=20", "seed=1")
    assert result.status == 0
    assert "self" in result.out
