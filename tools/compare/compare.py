"""Every attention mechanism in the same small model, on equal terms: the arms of the comparison, and their runs."""

import bisect
import contextlib
import functools
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from common.console import console, say
from common.files import make_directory, read_json, write_json
from common.settings import UserError, decode, nearest, variant_names
from data.shards import read_manifest
from model.attention import ATTENTION
from model.gpt import GPT, GPTConfig
from trainer.config import TrainConfig
from trainer.loop import fit
from trainer.metrics import read_metrics

Raw = dict[str, Any]
Models = dict[str, GPTConfig]

POSITIONS = ("rotary", "log_recurrence", "none", "learned")
ON_EQUAL_TERMS = ("softmax", "log_space", "log_space_signed")
"""Mechanisms to compare in every block with every position that they can have."""
_WINDOW = {"name": "sliding_window", "window": 64}
OTHERS: dict[str, Raw] = {
    "projection": {"name": "projection"},
    "projection_keys": {"name": "projection", "values": "keys"},
    "projection_learned": {"name": "projection", "learned": True},
    "projection_keys_learned": {"name": "projection", "values": "keys", "learned": True},
    "linear": {"name": "linear"},
    "sliding_window": _WINDOW,
    "dilated_window": {**_WINDOW, "dilation": 1},
    "longformer": {"name": "longformer", "window": 64, "n_global": 4},
    "strided": {"name": "strided", "stride": 16},
    "fixed": {"name": "fixed", "size": 32, "width": 4},
    "gqa": {"name": "softmax", "n_kv_head": 2},
    "mqa": {"name": "softmax", "n_kv_head": 1},
}
"""Settings of attention with rotary positions, without the designs' parts. Mechanisms that are not named have their
defaults. Windows and strides are scaled to the texts of size small."""
_NGRAMS = {"ngrams": [1, 2, 3, 4, 6, 8, 12, 16]}
_OURS = {"name": "log_space", "decay": "head", "product": True, "d_key": 16, "gate": "silu"}
_THEIRS = {"name": "softmax", "decay": "head", "gate": "silu"}


def design(attention: Any, position: str = "none", conv: int = 4) -> Raw:
    """The settings of an arm; a list of attentions is a pattern of layers."""
    layers = {"attention_pattern": attention} if isinstance(attention, list) else {}
    block = {"name": "mlp", "conv": conv}
    return {
        "attention": attention[0] if layers else attention,
        **layers,
        "block": block,
        "position": {"name": position},
    }


DESIGNS: dict[str, Raw] = {
    "softmax_forgets_rotary": design(_THEIRS, "rotary"),
    "log_space_forgets": design(_OURS),
    "log_space_forgets_ngrams": design(_OURS) | _NGRAMS,
    "log_space_forgets_by_feature": design(_OURS | {"decay": "feature"}),
    "log_space_forgets_nothing": design(_OURS | {"decay": "none"}, "log_recurrence"),
    "log_space_forgets_no_gate": design(_OURS | {"gate": "none"}),
    "log_space_forgets_no_product": design(_OURS | {"product": False, "d_key": None}),
    "log_space_forgets_16x16": design(_OURS | {"d_key": 32}),
    "log_space_forgets_no_conv": design(_OURS, conv=0),
    "hybrid_softmax": design([_OURS] * 3 + [_THEIRS]),
    "hybrid_remembers": design([_OURS] * 3 + [_OURS | {"decay": "none"}]),
    "hybrid_window": design([_OURS] * 3 + [_WINDOW | {"gate": "silu"}]),
    "hybrid_second": design([_OURS, _THEIRS, _OURS, _OURS]),
    "hybrid_second_window": design([_OURS, _WINDOW | {"window": 256, "gate": "silu"}, _OURS, _OURS]),
    "hybrid_third": design([_OURS, _OURS, _THEIRS, _OURS]),
    **{f"window_{w}": design(_WINDOW | {"window": w, "gate": "silu"}, "rotary") for w in (1, 8, 32)},
    "linear_forgets": design({"name": "linear", "decay": "feature", "gate": "silu"}),
    "softmax_forgets": design(_THEIRS),
    "softmax_forgets_rotary_ngrams": design(_THEIRS, "rotary") | _NGRAMS,
    "softmax_forgets_rotary_no_conv": design(_THEIRS, "rotary", conv=0),
    "softmax_forgets_rotary_attention_conv": design(_THEIRS | {"conv": 4}, "rotary"),
    "softmax_rotary": design({"name": "softmax", "gate": "silu"}, "rotary"),
}
"""The flagship, its control, what each of their parts is worth, and hybrids."""
CONTROL = "softmax_forgets_rotary"
"""The strongest softmax attention in short runs: FoX (Lin et al. 2025), rotary positions and the flagship's parts.

After about 10 MB, once it copies, the same without rotary positions is stronger: softmax_forgets, as in model=gpt_*."""
_EXTENSIONS = 2  # learning rates beyond the grid
_EVAL_BATCHES = 128


@dataclass(frozen=True)
class Size:
    """The control's sizes, and what a step reads."""

    n_layer: int
    n_head: int
    head_dim: int
    n_embd: int
    seq_len: int
    batch_tokens: int


SIZES = {
    "small": Size(3, 4, 24, 96, 256, 1024),
    "medium": Size(4, 6, 32, 192, 512, 1024),
    "large": Size(6, 8, 32, 256, 1024, 4096),
}


@dataclass(frozen=True)
class Terms:
    """What all runs have in common."""

    dataset: Path
    out: Path
    size: Size
    steps: int
    grid: list[float]
    """Learning rates."""
    seeds: list[int]

    def open(self) -> None:
        """Make the folder.

        Raises:
            UserError: the folder has runs with other settings.
        """
        path = make_directory(self.out, "out") / "terms.json"
        terms = {"dataset": str(self.dataset.resolve()), **asdict(self.size), "steps": self.steps, "grid": self.grid}
        if not path.exists():
            write_json(path, terms)
        elif read_json(path) != terms:
            raise UserError(f"{path} shows that this folder has runs with other options: use those, or another out")

    @property
    def tokens(self) -> int:
        """Tokens of a run."""
        return self.steps * self.size.batch_tokens

    def run_dir(self, name: str, lr: float, seed: int) -> Path:
        """Where a run is."""
        return self.out / "runs" / name.replace(" ", "-") / f"lr{lr:g}-seed{seed}"


def arms() -> dict[str, Raw]:
    """The settings of each arm's model. Arms outside DESIGNS are named "attention block position"."""
    suits = {name: cls.suits_rotary for cls in ATTENTION for name in variant_names(cls)}
    equal = {
        f"{name} {block} {position}": design({"name": name}, position, 0) | {"block": {"name": block}}
        for name, position, block in itertools.product(ON_EQUAL_TERMS, POSITIONS, ("mlp", "glu"))
        if suits[name] or position != "rotary"
    }
    known = {*ON_EQUAL_TERMS, *(value["name"] for value in OTHERS.values())}
    more = {name: {"name": name} for cls in ATTENTION for name in variant_names(cls) if name not in known}
    others = {f"{name} mlp rotary": design(attention, "rotary", 0) for name, attention in (OTHERS | more).items()}
    last = {name: equal.pop(name) for name in list(equal) if name.startswith("log_space_signed")}
    return DESIGNS | equal | others | last


def models_of(dataset: Path, size: Size, names: Collection[str] = ()) -> Models:
    """The models of these arms, or of all if none is named, the control's first; n_vocab is the dataset's.

    Raises:
        UserError: an arm does not exist, or cannot have as many parameters as the control.
    """
    n_vocab, every = read_manifest(dataset).tokenizer.n_vocab, arms()
    for name in names:
        if name not in every:
            raise UserError(f"there is no arm {name!r}: {nearest(name, every)}")
    chosen = [name for name in every if name == CONTROL or name in (names or every)]
    wanted = count(model_of(every[CONTROL], n_vocab, size.n_embd, size))
    return {name: equal_model(name, every[name], n_vocab, wanted, size) for name in chosen}


def equal_model(name: str, arm: Raw, n_vocab: int, wanted: int, size: Size) -> GPTConfig:
    """The arm's model with the n_embd that brings it nearest to the wanted number of parameters.

    Raises:
        UserError: it is not within 1 %.
    """
    parameters = functools.cache(lambda n_embd: count(model_of(arm, n_vocab, n_embd, size)))
    above = bisect.bisect(range(1024), wanted, lo=1, key=parameters)
    best = min(above - 1, above, key=lambda n_embd: abs(parameters(n_embd) - wanted))
    if abs(parameters(best) / wanted - 1) > 0.01:
        raise UserError(f"{name}: {parameters(best):,} parameters are not within 1 % of the control's {wanted:,}")
    return model_of(arm, n_vocab, best, size)


def model_of(arm: Raw, n_vocab: int, n_embd: int, size: Size) -> GPTConfig:
    """The arm's model. Layers of GPT-2's block, or twice as many of the published one, which has no MLP.

    A pattern's last attention is that of the last layer.
    """
    if pattern := arm.get("attention_pattern"):
        layers = [pattern[i % len(pattern)] for i in range(-size.n_layer, 0)]
        arm = arm | {"attention_pattern": layers, "attention": layers[0]}
    glu, learned = arm["block"]["name"] == "glu", arm["position"]["name"] == "learned"
    position = arm["position"] | ({"max_len": size.seq_len} if learned else {})
    sizes = {"n_vocab": n_vocab, "n_head": size.n_head, "head_dim": size.head_dim, "n_embd": n_embd}
    sizes["n_layer"] = size.n_layer * (2 if glu else 1)
    return decode(GPTConfig, arm | {"position": position} | sizes)


def count(model: GPTConfig) -> int:
    """The number of its parameters."""
    with torch.device("meta"):
        return GPT(model).n_params()


def in_processes(work: list[Callable[[], str]], jobs: int) -> None:
    """Do all work in `jobs` processes of one thread, or for one job in this process, and print what comes of it.

    Raises:
        KeyboardInterrupt: the user stopped it; unfinished runs are saved.
    """
    if jobs == 1:
        return _say_all(do() for do in work)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    try:
        futures = [pool.submit(do) for do in work]
        _say_all(future.result() for future in as_completed(futures))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        while workers := multiprocessing.active_children():
            for worker in workers:
                worker.join(5.0)  # a terminal sends Ctrl-C to the workers too, and a second signal would end their save
                worker.terminate()
        raise
    pool.shutdown()


def _say_all(messages: Iterable[str]) -> None:
    for n, message in enumerate(messages, start=1):
        say(f"{time.strftime('%H:%M:%S')} {n}: {message}")


def train_arm(terms: Terms, name: str, model: GPTConfig) -> str:
    """Finish the runs of an arm; returns a message about the outcome."""
    row = follow(functools.partial(train, terms, name, model), terms.grid, terms.seeds)
    if row is None:
        return f"{name}: left out, because it diverges at every learning rate: give lower ones, and another folder"
    return f"{name}: {', '.join(f'{loss:.4f}' for loss in row['losses'])} at {row['lr']:g}"


def follow(loss_of: Callable[[float, int], float], grid: list[float], seeds: list[int]) -> Raw | None:
    """Search for the best learning rate with the first seed, then run the other seeds with it.

    A learning rate that diverges with any seed is not the best; None: all of them do.
    """
    tried = search(lambda lr: loss_of(lr, seeds[0]), grid)
    for lr in sorted(tried, key=lambda lr: tried[lr]):
        losses = [tried[lr], *(loss_of(lr, seed) for seed in seeds[1:])]
        if all(map(math.isfinite, losses)):
            return {
                "lr": lr,
                "at_edge": len(tried) > 1 and lr in (min(tried), max(tried)),
                "losses": losses,
                "tried": tried,
            }
    return None


def search(loss_of: Callable[[float], float], grid: list[float]) -> dict[float, float]:
    """Losses by learning rate, over the grid and, as long as the best is at an edge, up to two steps beyond it.

    One learning rate is not a grid: it is the only one tried.
    """
    grid = sorted(set(grid))
    losses = {lr: loss_of(lr) for lr in grid}
    if len(grid) == 1:
        return losses
    factor = grid[-1] / grid[-2]
    for _ in range(_EXTENSIONS):
        best = min(losses, key=lambda lr: losses[lr])
        if best not in (min(losses), max(losses)):
            break
        further = float(f"{best * factor if best == max(losses) else best / factor:.6g}")
        losses[further] = loss_of(further)
    return losses


def train(terms: Terms, name: str, model: GPTConfig, lr: float, seed: int) -> float:
    """The run's validation loss; starts or resumes the run if it is not finished.

    Raises:
        UserError: the run is of another model.
    """
    run_dir = terms.run_dir(name, lr, seed)
    if (loss := loss_in(run_dir)) is not None:
        if read_json(run_dir / "config.json")["config"]["model"] != model.model_dump(mode="json"):
            raise UserError(f"{run_dir} has another model than {name} now has: give another out")
        return loss
    quiet, console.quiet = console.quiet, True  # hides what the run says
    try:
        fit(config_of(run_dir, terms.dataset, terms.size, model, lr, seed, terms.steps))
    except SystemExit:  # it was asked to stop, and has saved
        raise KeyboardInterrupt from None
    except UserError:
        if loss_in(run_dir) is None:
            raise
    finally:
        console.quiet = quiet
    loss = loss_in(run_dir)
    assert loss is not None
    say(f"  {name}, learning rate {lr:g}, seed {seed}: {loss:.4f}")
    return loss


def loss_in(run_dir: Path) -> float | None:
    """A finished run's validation loss, infinite if it diverged; None: it is not finished."""
    with contextlib.suppress(FileNotFoundError):
        for line in read_metrics(run_dir / "metrics.jsonl"):
            if "val_loss" in line:  # evaluated once, at the end
                return float(line["val_loss"])
        return math.inf if (run_dir / "bad_steps").exists() else None
    return None


def config_of(
    run_dir: Path, dataset: Path, size: Size, model: GPTConfig, lr: float, seed: int, steps: int
) -> TrainConfig:
    """The configuration of a run, as train.py would have it."""
    raw = {
        "run_dir": run_dir,
        "dataset_dir": dataset,
        "seed": seed,
        "seq_len": size.seq_len,
        "batch_tokens": size.batch_tokens,
        "max_steps": steps,
        "model": model.model_dump(),
        "optim": {"name": "adamw", "max_lr": lr},
        "schedule": {"name": "one_cycle", "warmup_steps": max(1, steps // 10)},
        "runtime": {"dtype": "float32", "micro_batch": size.batch_tokens // size.seq_len, "compile": False},
        "checkpoint": {"every": min(steps, 2000)},
        "eval": {"every": steps, "batches": _EVAL_BATCHES},
    }
    return decode(TrainConfig, raw)
