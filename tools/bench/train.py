"""Training steps of whole models side by side."""

import importlib.util
import resource
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.config_files import CONFIGS
from common.console import Track, say
from common.settings import UserError, decode
from model.gpt import GPT
from runtime.device import compile_blocks, compiles, open_runtime, peak_flops
from runtime.distributed import World
from tools.bench.harness import Row, attempt, composed, in_own_process, in_turn, profiled, timed
from trainer.config import TrainConfig
from trainer.step import SummedLoss, accumulate_gradients, train_step

_WARM_UP = 3  # steps that get new memory from the system
_SECONDS, _FEWEST, _MOST = 5.0, 3, 100  # of passes in which a rate is measured


def measure(options: Any) -> dict[str, list[Row]]:
    """Measure the models in turn, and nanoGPT first if its folder is given; each measurement in its
    own process.

    Raises:
        UserError: that folder has no model.py.
    """
    folder = options.nanogpt
    if folder is not None and not (folder / "model.py").is_file():
        raise UserError(f"nanogpt={folder} has no model.py: name the folder of a clone of nanoGPT")
    overrides = [*options.set, f"runtime.device={options.device}"]
    runs: dict[str, tuple[TrainConfig, Path | None]] = {
        name: (
            config_of([f"{_group(name)}={name}", *overrides], options.seq_len, options.batch),
            None,
        )
        for name in options.models
    }
    if folder is not None:
        like = next(
            (name for name, (ours, _) in runs.items() if ours.model.attention.name == "softmax"),
            "gpt2_124m",
        )
        config = config_of([f"{_group(like)}={like}", *overrides], options.seq_len, options.batch)
        runs = {"nanoGPT": (config, folder)} | runs

    def measured(name: str) -> tuple[list[float], float, float | None, list[Row]]:
        found = in_own_process(seconds_and_peak, *runs[name], options.steps, options.profile)
        say(f"{name}: {statistics.median(found[0]):.4g} s a step")
        return found

    turns = in_turn(
        {name: partial(attempt, name, partial(measured, name)) for name in runs}, options.rounds
    )
    results = {
        name: kept for name, found in turns.items() if (kept := [one for one in found if one])
    }
    rows: list[Row] = []
    for name, found in results.items():
        seconds = statistics.median(one for steps, *_ in found for one in steps)
        rate, peak, share = (
            options.batch * options.seq_len / seconds,
            max(peak for _, peak, *_ in found),
            found[0][2],
        )
        row = {
            "model": name,
            "ms_a_step": 1e3 * seconds,
            "tokens_per_second": rate,
            "peak_gigabytes": peak,
        }
        row["x"] = rate / (rows or [row])[0]["tokens_per_second"]
        rows.append(row | ({} if share is None else {"mfu": rate * share}))
    profiles = {
        f"a step of {name}": found[-1][3] for name, found in results.items() if options.profile
    }
    return {"train": rows, **profiles}


def seconds_and_peak(
    config: TrainConfig, nanogpt: Path | None, steps: int, profile: bool
) -> tuple[list[float], float, float | None, list[Row]]:
    """Seconds of each timed step, peak memory of this process in GB, MFU at a token a second, and a
    profile.

    On a CPU 0.5 GB of the memory are Python and torch.
    """
    training = Training(config, config.batch_size, nanogpt)
    seconds = [timed(training.step)() for _ in range(_WARM_UP + steps)][_WARM_UP:]
    on_gpu = torch.cuda.is_initialized()
    peak = (
        torch.cuda.max_memory_allocated()
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    flops, most = (
        training.flops_per_token,
        peak_flops(training.runtime.device, training.runtime.dtype),
    )
    return seconds, peak / 1e9, most and flops / most, profiled(training.step) if profile else []


def _group(name: str) -> str:
    """The folder of configs/ that has this model, or this experiment with its own optimizer."""
    return "experiment" if (CONFIGS / "experiment" / f"{name}.yaml").is_file() else "model"


def config_of(overrides: list[str], seq_len: int, batch: int) -> TrainConfig:
    """The configuration of train.py with these options, for steps of `batch` sequences of any
    length."""
    raw = composed(overrides)
    position = raw["model"]["position"]
    if position["name"] == "learned":
        position["max_len"] = max(seq_len, position["max_len"])
    return decode(TrainConfig, raw | {"seq_len": seq_len, "batch_tokens": batch * seq_len})


class Training:
    """Takes training steps of a run on one micro-batch: `sequences` sequences of random tokens."""

    def __init__(self, config: TrainConfig, sequences: int, nanogpt: Path | None = None) -> None:
        self.runtime, self.grad_clip = open_runtime(config.runtime), config.optim.grad_clip
        device, compiled = self.runtime.device, config.runtime.compile
        torch.manual_seed(config.seed)
        self.summed_loss: SummedLoss | NanoGPT
        if nanogpt is None:
            eot_id = config.data.reset_at(
                config.model.n_vocab - 1
            )  # in random tokens any id will do
            gpt = GPT(config.model, eot_id).to(device, self.runtime.param_dtype)
            gpt.recompute = config.runtime.recompute
            self.optimizer = config.optim.build(gpt, World(device), self.runtime.dtype)
            self.summed_loss, self.flops_per_token = (
                SummedLoss(gpt),
                gpt.flops_per_token(config.seq_len),
            )
            compile_blocks(gpt, compiles(config.runtime, self.runtime))
        else:
            self.summed_loss = NanoGPT(nanogpt, config).to(device, self.runtime.param_dtype)
            self.optimizer = self.summed_loss.optimizer(device.type)
            self.flops_per_token = self.summed_loss.flops_per_token
            if compiled is True or (compiled == "auto" and device.type == "cuda"):
                self.summed_loss.compile()
        shape, generator = (
            (sequences, config.seq_len + 1),
            torch.Generator().manual_seed(config.seed),
        )
        ids = torch.randint(config.model.n_vocab, shape, generator=generator)
        batch = ids[:, :-1], ids[:, 1:]
        if (
            device.type == "cuda"
        ):  # in pinned memory, as in a run: what is on the GPU would have to be waited for
            batch = batch[0].pin_memory(), batch[1].pin_memory()
        self.batch = [batch]

    def step(self) -> None:
        """Take a step of one micro-batch."""
        train_step(
            self.summed_loss, self.optimizer, self.batch, self.runtime, grad_clip=self.grad_clip
        )

    def one_more(self) -> None:
        """Take one more micro-batch of a step: a forward and a backward pass."""
        world, scale = World(self.runtime.device), 1 / self.batch[0][1].numel()
        loss = accumulate_gradients(self.summed_loss, self.batch, self.runtime, world, scale=scale)
        assert loss is not None, "nobody asked to abandon it"
        loss.item()


def measure_rate(config: TrainConfig, micro_batch: int, sequences: int) -> float:
    """Measure one device's tokens per second, for steps of `sequences` sequences.

    Runs on random tokens: reading, evaluating and saving are left out. Takes the medians of a few
    steps of one micro-batch and of a few passes over one more.
    """
    training = Training(config, micro_batch)
    step, one_more = timed(training.step), timed(training.one_more)
    passes: list[float] = []
    with Track("measuring: tokens", None) as track:
        step()  # compiles, and allocates the memory that later steps use again
        steps = [step() for _ in range(_FEWEST)]
        while len(passes) < _FEWEST or (sum(passes) < _SECONDS and len(passes) < _MOST):
            passes.append(one_more())
            track.advance(micro_batch * config.seq_len)
    seconds = statistics.median(steps) + (sequences / micro_batch - 1) * statistics.median(passes)
    return sequences * config.seq_len / seconds


class NanoGPT(nn.Module):
    """nanoGPT's model, from the model.py of a clone, in a configuration's sizes, with the interface
    of SummedLoss."""

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        super().__init__()
        spec: Any = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
        sys.modules[spec.name] = nanogpt = importlib.util.module_from_spec(
            spec
        )  # torch.compile looks there
        spec.loader.exec_module(nanogpt)
        sizes = {key: getattr(config.model, key) for key in ("n_layer", "n_head", "n_embd")}
        sizes |= {"block_size": config.seq_len, "vocab_size": -(-config.model.n_vocab // 64) * 64}
        self.gpt: Any = nanogpt.GPT(nanogpt.GPTConfig(**sizes, bias=False))
        weights = sum(m.weight.numel() for m in self.gpt.modules() if isinstance(m, nn.Linear))
        attention = 2 * config.model.n_layer * config.model.n_embd * config.seq_len
        self.flops_per_token = 6 * weights + 3 * attention  # counted as ours

    def optimizer(self, device: str) -> Any:
        """Return nanoGPT's own optimizer, with the settings of nanoGPT's train.py."""
        return self.gpt.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses. All targets count."""
        loss: Tensor = self.gpt(token_ids, targets.contiguous())[1]
        return loss * targets.numel()
