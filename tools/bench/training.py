"""Training steps of whole models side by side."""

import importlib.util
import resource
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.config_files import CONFIGS
from common.console import say
from common.numbers import ceil_div
from common.settings import JsonDict, UserError, decode
from model.gpt import GPT
from runtime.device import Compute, choose_compute, compile_blocks, peak_flops, should_compile
from runtime.distributed import World
from tools.bench.measuring import call_in_process, call_in_turn, compose_run, time_call
from trainer.config import TrainConfig
from trainer.step import SummedLoss, train_step

_WARM_UP = 3  # steps that get new memory from the system


class Measured(NamedTuple):
    """What a process measures of a model."""

    seconds: list[float]
    """The time of each timed step."""
    peak_gigabytes: float
    """Most memory in use; on a CPU 0.5 GB of it are Python and torch."""
    share_of_peak: float | None
    """MFU at one token per second; None: the device's peak is not known."""


def measure_training(options: Any) -> list[JsonDict]:
    """Measure the models in turn, each in a process of its own; nanoGPT first, if it is there.

    Raises:
        UserError: that folder has no model.py.
    """
    folder = options.nanogpt
    if folder is not None and not (folder / "model.py").is_file():
        raise UserError(f"nanogpt={folder} has no model.py: name the folder of a clone of nanoGPT")
    # What to train, by name: nanoGPT first.
    choices = {} if folder is None else {"nanoGPT": "model=gpt2_124m"}
    for name in options.models:
        is_experiment = (CONFIGS / "experiment" / f"{name}.yaml").is_file()
        choices[name] = f"experiment={name}" if is_experiment else f"model={name}"

    def measure_model(name: str) -> Measured:
        overrides = [choices[name], *options.set, f"runtime.device={options.device}"]
        config = compose_steps(overrides, options.seq_len, options.batch)
        nanogpt = folder if name == "nanoGPT" else None
        result = call_in_process(measure_steps, config, nanogpt, options.steps)
        say(f"{name}: {statistics.median(result.seconds):.4g} s a step")
        return result

    # All models take turns; the median of all their steps counts.
    turns = call_in_turn({name: partial(measure_model, name) for name in choices}, options.rounds)
    rows: list[JsonDict] = []
    for name, results in turns.items():
        seconds = statistics.median(seconds for result in results for seconds in result.seconds)
        rate = options.batch * options.seq_len / seconds
        share = results[0].share_of_peak
        row = {
            "model": name,
            "ms_a_step": 1e3 * seconds,
            "tokens_per_second": rate,
            "peak_gigabytes": max(result.peak_gigabytes for result in results),
            "x": rate / rows[0]["tokens_per_second"] if rows else 1.0,
            "mfu": None if share is None else rate * share,
        }
        rows.append(row)
    return rows


def measure_steps(config: TrainConfig, nanogpt: Path | None, steps: int) -> Measured:
    """Take training steps in this process, and measure the last of them."""
    training = Training(config, config.batch_size, nanogpt)
    seconds = [time_call(training.step) for _ in range(_WARM_UP + steps)]
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_initialized():
        peak_bytes = torch.cuda.max_memory_allocated()
    peak = peak_flops(training.compute.device, training.compute.dtype)
    share = None if peak is None else training.flops_per_token / peak
    return Measured(seconds[_WARM_UP:], peak_bytes / 1e9, share)


def compose_steps(overrides: list[str], seq_len: int, batch: int) -> TrainConfig:
    """Return the configuration of train.py with these options, for steps of `batch` sequences."""
    raw = compose_run(overrides)
    position = raw["model"]["position"]
    if position["name"] == "learned":
        position["max_len"] = max(seq_len, position["max_len"])
    return decode(TrainConfig, raw | {"seq_len": seq_len, "batch_tokens": batch * seq_len})


class Training:
    """Takes training steps of a run on one micro-batch: `sequences` sequences of random tokens."""

    def __init__(self, config: TrainConfig, sequences: int, nanogpt: Path | None = None) -> None:
        self.compute = choose_compute(config.runtime)
        self._grad_clip = config.optim.grad_clip
        torch.manual_seed(config.seed)
        build = _build_ours if nanogpt is None else partial(_build_nanogpt, nanogpt)
        self.summed_loss, self._optimizer, self.flops_per_token = build(config, self.compute)
        generator = torch.Generator().manual_seed(config.seed)
        shape = (sequences, config.seq_len + 1)
        ids = torch.randint(config.model.n_vocab, shape, generator=generator)
        token_ids = ids[:, :-1].contiguous()
        targets = ids[:, 1:].contiguous()
        if self.compute.device.type == "cuda":
            # As in a run: the GPU would be waited for, also with slices.
            token_ids = token_ids.pin_memory()
            targets = targets.pin_memory()
        self.batch = [(token_ids, targets)]

    def step(self) -> None:
        """Take a step of one micro-batch."""
        train_step(
            self.summed_loss, self._optimizer, self.batch, self.compute, grad_clip=self._grad_clip
        )


def measure_rate(config: TrainConfig, micro_batch: int) -> float:
    """Return one device's tokens per second, from the median of a few steps on random tokens.

    A step has one micro-batch. Reading, evaluating and saving are left out.
    """
    training = Training(config, micro_batch)
    steps = {"step": partial(time_call, training.step)}
    seconds = call_in_turn(steps, 2 * _WARM_UP)["step"]
    return micro_batch * config.seq_len / statistics.median(seconds[_WARM_UP:])


def _build_ours(config: TrainConfig, compute: Compute) -> tuple[Any, Any, int]:
    """Return the model's loss, its optimizer, and FLOPs a token."""
    eot_id = config.data.reset_at(config.model.n_vocab - 1)  # in random tokens any id will do
    gpt = GPT(config.model, eot_id).to(compute.device, compute.param_dtype)
    gpt.recompute = config.runtime.recompute
    optimizer = config.optim.build(gpt, World(compute.device), compute.dtype)
    compile_blocks(gpt, should_compile(config.runtime, compute))
    return SummedLoss(gpt), optimizer, gpt.flops_per_token(config.seq_len)


def _build_nanogpt(folder: Path, config: TrainConfig, compute: Compute) -> tuple[Any, Any, int]:
    """Return nanoGPT's loss, the optimizer of its train.py, and FLOPs a token."""
    model = NanoGPT(folder, config).to(compute.device, compute.param_dtype)
    optimizer = model.gpt.configure_optimizers(0.1, 6e-4, (0.9, 0.95), compute.device.type)
    if should_compile(config.runtime, compute):
        model.compile()
    return model, optimizer, model.flops_per_token


class NanoGPT(nn.Module):
    """nanoGPT's model in a configuration's sizes, with the interface of SummedLoss.

    It is read from the model.py of a clone.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        super().__init__()
        spec: Any = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
        nanogpt = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = nanogpt  # torch.compile looks there
        spec.loader.exec_module(nanogpt)
        model = config.model
        sizes = {"n_layer": model.n_layer, "n_head": model.n_head, "n_embd": model.n_embd}
        sizes |= {"block_size": config.seq_len, "vocab_size": 64 * ceil_div(model.n_vocab, 64)}
        self.gpt: Any = nanogpt.GPT(nanogpt.GPTConfig(**sizes, bias=False))
        linear = [module for module in self.gpt.modules() if isinstance(module, nn.Linear)]
        weights = sum(module.weight.numel() for module in linear)
        attention = 2 * model.n_layer * model.n_embd * config.seq_len
        self.flops_per_token = 6 * weights + 3 * attention  # counted as ours

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses. All targets count."""
        loss: Tensor = self.gpt(token_ids, targets.contiguous())[1]
        return loss * targets.numel()
