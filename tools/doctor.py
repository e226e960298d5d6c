"""Examines this machine: versions, checks and a training step; prints them, and what to do."""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from common.console import count, say
from common.memory import is_out_of_memory
from common.numbers import ceil_div
from common.settings import JsonDict, UserError, decode
from model.gpt import GPT
from runtime.device import (
    Compute,
    choose_compute,
    compile_blocks,
    should_compile,
    triton_version,
    why_gpu_is_unseen,
)
from runtime.distributed import World
from tools.bench.measuring import call_in_process, compose_run, describe_machine, print_table
from tools.bench.training import measure_rate
from tools.plan import format_bytes, format_duration, largest_micro_batch
from trainer.config import TrainConfig
from trainer.start import prove_micro_batch

FLAGSHIP = ["experiment=pile_125m", "model=flagship_125m"]
OTHERS = (
    ["model=heinsen_125m"],
    ["model=softmax_125m"],
    ["model=gpt2_124m", "model/attention=sliding_window"],
)
"""Models that use, with the flagship, all operators that have kernels."""
AGREES = "agree with plain torch"
# Bytes for the checkpoints of a run of the flagship, and a dataset of its first hours.
_LEAST_DISK = 20e9


def examine_machine(training: bool) -> None:
    """Print a table of this machine and lines of what to do.

    Raises:
        UserError: something does not work.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = decode(TrainConfig, compose_run([*FLAGSHIP, f"runtime.device={device}"]))
    compute = choose_compute(config.runtime)
    problems: list[str] = []

    def attempt(name: str, work: Callable[[], JsonDict]) -> JsonDict:
        """Return the rows that `work` finds; an error becomes a problem."""
        say(f"{name} ...")
        try:
            return work()
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            if is_out_of_memory(error):
                reason = "out of memory, use a machine with more, or a smaller model"
            problems.append(f"{name} fails ({type(error).__name__}): {reason}")
            return {}

    # Each part may fail, and the others go on.
    rows = attempt("versions", find_versions)
    if device == "cuda":
        for name, outcome in attempt("gradients", prove_models).items():
            rows[f"gradients of {name}"] = outcome
            if outcome != AGREES:
                problems.append(f"{name}: {outcome}")
    if training:
        rows |= attempt("a training step", lambda: time_training(config, compute))
    # What was found, and what to do about it.
    lines = [*find_faults(), *problems]
    if rows:
        found = [{"what": name, "found": value} for name, value in rows.items()]
        print_table("this machine", found)
    for line in lines or ["nothing is wrong"]:
        say(f"- {line}")
    if problems:
        raise UserError(
            f"{count(len(problems), 'part')} of this did not work: the last lines say why"
        )


def prove_models() -> JsonDict:
    """Prove the first gradient of several models, and return the outcome of each.

    Each has a process of its own, which a kernel may crash.
    """
    models = {words[-1].partition("=")[2]: words for words in (FLAGSHIP, *OTHERS)}

    def prove_alone(words: list[str]) -> str:
        try:
            return call_in_process(prove_model, words)
        except (UserError, RuntimeError) as error:
            return f"{error}: train with runtime.kernels=false"

    with ThreadPoolExecutor(len(models)) as threads:  # they compile, each on one core
        return dict(zip(models, threads.map(prove_alone, models.values()), strict=True))


def prove_model(words: list[str]) -> str:
    """Prove the gradient of a model of two blocks on random tokens, and return the outcome."""
    config = decode(TrainConfig, compose_run([*FLAGSHIP, *words]))
    compute = choose_compute(config.runtime)
    n_vocab = config.model.n_vocab
    model = config.model.model_copy(update={"n_layer": 2})
    gpt = GPT(model, config.data.reset_at(n_vocab - 1)).to(compute.device, compute.param_dtype)
    ids = torch.randint(min(n_vocab, 500), (8, config.seq_len + 1))  # strings occur again
    world = World(compute.device)
    compile_blocks(gpt, should_compile(config.runtime, compute))
    is_right = prove_micro_batch(gpt, ids[:, :-1], ids[:, 1:], compute, world)
    return AGREES if is_right else "are right only without kernels and torch.compile"


def time_training(config: TrainConfig, compute: Compute) -> JsonDict:
    """Return tokens per second of one device in a run of the flagship, and the run's time."""
    n_device = max(1, torch.cuda.device_count())
    size = 1  # on a CPU, one sequence takes seconds
    if compute.device.type == "cuda":
        with torch.device("meta"):
            gpt = GPT(config.model)
        memory = torch.cuda.mem_get_info()[1]
        most = largest_micro_batch(gpt, config, compute, n_device, memory)
        size = max(1, ceil_div(most, 2))  # half of what should fit
    rate = measure_rate(config, size)
    tokens = config.tokens(config.last_step)
    dtype = str(compute.dtype).removeprefix("torch.")
    return {
        "training": f"flagship_125m in {dtype}, {config.seq_len:,} tokens in a sequence",
        "tokens per second": rate,
        "a whole run": f"{format_duration(tokens / (rate * n_device))} for {tokens:,} tokens",
    }


def find_versions() -> JsonDict:
    """Return system, processor, versions and GPUs; nothing names the host or its user."""
    about = describe_machine()
    rows: JsonDict = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f}",
        "python": platform.python_version(),
        "torch": about["torch"],
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "driver": driver_version(),
        "commit": about["git_commit"],
        "memory": format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "free disk": format_bytes(shutil.disk_usage(".").free),
    }
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 1e9:.0f} GB"
        rows[f"gpu {index}"] = f"{gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}"
    return rows


def driver_version(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of the NVIDIA driver that is loaded, or None."""
    words = proc.read_text().partition("\n")[0].split() if proc.is_file() else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def find_faults(dev: Path = Path("/dev")) -> Iterator[str]:
    """Yield lines that say what is wrong and what to do."""
    reason = why_gpu_is_unseen(dev)
    if torch.cuda.is_available():
        yield from _find_gpu_faults()
    elif reason:
        yield f"torch does not see the GPU: {reason}"
    elif any(dev.glob("nvidia[0-9]*")):
        yield "CUDA_VISIBLE_DEVICES hides the GPU: unset it to train there"
    free = shutil.disk_usage(".").free
    if free < _LEAST_DISK:
        yield f"only {free / 1e9:.1f} GB are free here: give train.py a run_dir on a larger disk"


def _find_gpu_faults() -> Iterator[str]:
    gpu = torch.cuda.get_device_properties(0)
    built = torch.cuda.get_arch_list()
    if not any(name.startswith(f"sm_{gpu.major}") for name in built):
        yield (
            f"torch {torch.__version__} has no kernels for {gpu.name} ({', '.join(built)}): "
            "install a build with them"
        )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield f"{gpu.name} emulates bfloat16, which is slow: runtime.dtype=auto takes float32 here"
    if triton_version() is None:
        yield (
            "triton is not installed, so kernels and torch.compile are not used: install the "
            "extra triton"
        )
