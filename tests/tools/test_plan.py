"""scripts/plan.py: its figures match those of runs; unknown figures are shown as unknown."""

import math

import pytest
import torch
from printed import assert_one_line

from common.numbers import ceil_div
from common.settings import decode
from data.shards import read_manifest
from runtime.checkpoint import find_newest
from runtime.device import choose_compute
from runtime.gpus import device_of_gpu
from tools.bench.training import Training
from tools.plan import PlanConfig, find_target, format_bytes, format_duration, format_figure, plan_run
from trainer.micro_batch import SPARE

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def tiny_plan(tiny):
    """Builds the PlanConfig of the tiny run."""

    def build(changes=None, **asked):
        return decode(PlanConfig, tiny(changes).model_dump() | asked)

    return build


@pytest.mark.slow
def test_a_table_for_people_fits_a_terminal(command):
    result = command("scripts/plan", "experiment=pile_125m", "device=a100-40gb", "n_device=8", "mfu=0.4")
    assert result.status == 0, result.err
    for text in ("8 x a100-40gb in bfloat16", "124,879,872", "294.9 B", "40.00 GB", "2.6 days"):
        assert text in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert "unknown" not in result.out


@pytest.mark.slow
def test_devices_that_share_unevenly_are_said(command):
    plan = ["scripts/plan", "experiment=pile_125m", "device=h100", "mfu=0.4"]
    said = "480 sequences do not divide among 7 devices, and some wait for those with 69"
    assert said in command(*plan, "n_device=7").out
    assert "do not divide" not in command(*plan, "n_device=8").out


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ("n_device=1000", ["480 sequences, fewer than n_device=1000", "lower n_device"]),
        ("mfu=0.3 tokens_per_second=9", ["mfu and tokens_per_second", "give only one"]),
        ("runtime.device=cuda", ["runtime.device=cuda, but there is no GPU here: name one, such as device=a100-40gb"]),
        ("device=h1000", ["device=h1000 is not known: did you mean 'h100'?"]),
        ("device=xpu", ["device=xpu is not known: allowed: a10,", "h100-pcie"]),
    ],
)
def test_a_mistake_is_one_line(command, arguments, fragments):
    result = command("scripts/plan", "experiment=pile_125m", *arguments.split())
    assert_one_line(result, *fragments)
    assert result.status == (1 if "cuda" in arguments else 2)


def test_the_largest_micro_batch_fits_and_one_micro_batch_less_does_not(tiny_plan):
    sizes = {"batch_tokens": 16 * 4_000_000, "model.n_vocab": 50_257}
    device = {"device": "t4", "n_device": 2}
    largest = plan_run(tiny_plan(sizes, **device))["memory"]["largest_micro_batch"]
    n_micro_batches = ceil_div(2_000_000, largest)
    assert n_micro_batches > 2
    larger = ceil_div(2_000_000, n_micro_batches - 1)
    fits = 16e9 * (1 - SPARE)
    peaks = []
    for micro_batch in (largest, larger):
        planned = plan_run(tiny_plan(sizes | {"runtime.micro_batch": micro_batch}, **device))
        peaks.append(planned["memory"]["peak"])
    assert peaks[0] <= fits < peaks[1]


def test_auto_plans_with_the_largest_micro_batch_and_a_share_is_enough(tiny_plan):
    found = plan_run(tiny_plan({"runtime.micro_batch": "auto"}, device="h100", n_device=3))
    assert found["step"]["micro_batch"] == found["memory"]["largest_micro_batch"] == 2  # of 4 sequences for 3
    assert found["step"]["micro_batches"] == 1


def test_time_follows_from_tokens_and_rate(tiny_plan):
    found = plan_run(tiny_plan({"max_steps": 1000}, tokens_per_second=500, n_device=4))["time"]
    assert (found["tokens"], found["seconds"], found["device_hours"]) == (64_000, 32, 32 * 4 / 3600)
    config = tiny_plan({"max_steps": 1000, "runtime.dtype": "bfloat16"}, device="h100", mfu=0.25, n_device=4)
    found = plan_run(config)["time"]
    assert found["seconds"] == pytest.approx(4 * found["seconds_at_peak"])
    assert found["seconds_at_peak"] == pytest.approx(found["flops"] / (4 * 989e12))
    assert plan_run(tiny_plan({"stop_at": 3}))["time"]["steps"] == 3


def test_the_measured_model_keeps_documents_apart_as_the_run_does(tiny):
    for reset in (False, True):
        training = Training(tiny({"data.document_reset": reset}), 1)
        assert (training.summed_loss.gpt.eot_id is not None) == reset


def test_disk_is_what_a_run_writes(command, tiny_args, tmp_path, tiny_plan, dataset_dir):
    assert command("train", *tiny_args, "checkpoint.keep_every=4", "checkpoint.keep_last=1").status == 0
    weights = {"model.safetensors", "optimizer.safetensors"}
    written = sum(path.stat().st_size for path in find_newest(tmp_path / "run").iterdir() if path.name in weights)
    found = plan_run(tiny_plan({"checkpoint.keep_every": 4, "checkpoint.keep_last": 1}))["disk"]
    assert found["checkpoint"] == pytest.approx(written, rel=0.2)  # a file says what is in it: much, for so few numbers
    checkpoints = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert len(checkpoints) <= found["checkpoints_kept"] <= 3
    assert found["dataset_bytes"] == sum(path.stat().st_size for path in dataset_dir.iterdir())
    assert found["dataset_epochs"] == 6 * 64 / found["dataset_tokens"]


def test_a_plan_warns_of_many_epochs_as_a_run_does(command, tiny_args, dataset_dir):
    args = [arg for arg in tiny_args if not arg.startswith("run_dir=")]
    passes = 64 * 1_000_000 / read_manifest(dataset_dir).splits["train"].total.tokens
    warning = f"warning: the run reads its data for {passes:,.0f} epochs, and learns it by heart"
    assert command("scripts/plan", *args, "device=cpu", "max_steps=1000000").err.startswith(warning)
    assert command("scripts/plan", *args, "device=cpu").err == ""


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_gpus_are_known_by_what_they_call_themselves(gpu, name):
    found = device_of_gpu(gpu)
    assert (found and found.name) == name


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_plan_for_this_cpu_has_the_type_that_a_run_has(tiny_plan, monkeypatch, fast, dtype):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: fast)
    config = tiny_plan({"runtime.device": "cpu", "runtime.dtype": "auto"})
    assert find_target(config).compute.dtype == choose_compute(config.runtime).dtype == dtype


def test_a_gpu_here_is_planned_for_by_itself(tiny_plan, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100-SXM4-40GB")
    auto = {"runtime.device": "auto", "runtime.dtype": "auto"}
    target = find_target(tiny_plan(auto))
    assert (target.name, target.peak, target.compute.device.type) == ("a100-40gb", 312e12, "cuda")
    assert target.compute.dtype == torch.bfloat16
    assert find_target(tiny_plan({"runtime.device": "cpu"})).name == "cpu"
    assert find_target(tiny_plan({"runtime.device": "cpu"}, device="h100")).name == "h100"
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA Tomorrow")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1, 7 * 10**9))
    monkeypatch.setattr("tools.plan.is_bfloat16_fast", lambda device: device.type != "cuda")
    target = find_target(tiny_plan(auto))
    assert target.compute.dtype == torch.float32
    assert (target.name, target.memory) == ("NVIDIA Tomorrow", 7e9)
    assert math.isnan(target.peak)


def test_figures_are_printed_as_people_read_them():
    figures = 12_345, 294_900_000_000, 1_500_000_000_000, 227 * 10**18
    assert [format_figure("tokens", x) for x in figures] == ["12,345", "294.9 B", "1.5 T", "2.27e+20"]
    assert [format_bytes(x) for x in (3_440_000, 40e9)] == ["3.44 MB", "40.00 GB"]
    assert [format_duration(x) for x in (3, 300, 10_000, 1e6)] == [
        "3.0 seconds",
        "5.0 minutes",
        "2.8 hours",
        "11.6 days",
    ]
