"""Accuracy of small models on recall tasks, over the difficulty of the task and the size of the state."""

import itertools
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.console import say
from common.figures import png
from common.files import make_directory, read_json, write_atomic, write_json
from common.settings import UserError, decode, nearest
from data.loader import IGNORED, EvalBatches, TrainBatches
from data.prepare.dataset import PrepareConfig, prepare
from data.prepare.tasks import TaskSource
from data.shards import TokenStream, read_manifest
from inference.scoring import features_in_pieces
from model.gpt import GPT, GPTConfig
from tools.bench.harness import command_line, machine
from tools.bench.train import Training
from tools.compare import compare
from tools.compare.compare import Raw, Size

DIFFICULTY = {"mqar": "n_pairs", "selective_copy": "n_letters", "induction": "length", "passkey": "length"}
"""The setting of each task that is varied."""
_N_VOCAB = 257  # of tokenizer=bytes
_BATCH = 32  # documents of a step
_TESTED = 512  # about as many documents are held out
_LEAST_TESTED, _TESTED_CHARACTERS = 16, 2**21  # of documents of another difficulty than in training
_EVALUATIONS = 10  # of a run
_LEARNED = 0.99  # this accuracy ends a run


@dataclass(frozen=True)
class Case:
    """One run."""

    task: str
    difficulty: int
    arm: str
    head_dim: int
    lr: float
    steps: int
    seed: int
    tested_at: str = ""

    def dataset(self, out: Path) -> PrepareConfig:
        """Its dataset: enough documents for each to be seen once.

        Raises:
            UserError: the task cannot be this difficult.
        """
        n_documents = self.steps * _BATCH + _TESTED
        settings = {DIFFICULTY[self.task]: self.difficulty, "n_documents": n_documents, "seed": self.seed}
        folder = "-".join([self.task, *(f"{key}={value}" for key, value in settings.items())])
        raw = {"data": {"name": self.task, **settings}, "tokenizer": {"name": "bytes"}}
        return decode(PrepareConfig, raw | {"val_fraction": _TESTED / n_documents, "out_dir": out / "data" / folder})

    @property
    def source(self) -> TaskSource:
        """The task."""
        task = self.dataset(Path()).data
        assert isinstance(task, TaskSource)
        return task

    @property
    def places(self) -> list[int]:
        """Which targets of a document are answers; targets are one token ahead."""
        return [place - 1 for place in self.source.answers]

    def tests(self) -> "list[Case]":
        """The same task with the other difficulties at which the model is tested."""
        return [replace(self, difficulty=int(n), tested_at="") for n in self.tested_at.split()]

    def model(self) -> tuple[Size, GPTConfig]:
        """Its model, and its sizes: a sequence is a document and its <|endoftext|>.

        Raises:
            UserError: there is no such arm, or it does not fit head_dim.
        """
        if self.arm not in (every := compare.arms()):
            raise UserError(f"there is no arm {self.arm!r}: {nearest(self.arm, every)}")
        seq_len = self.places[-1] + 3
        size = Size(4, 2, self.head_dim, 64, seq_len, _BATCH * seq_len)
        return size, compare.model_of(every[self.arm], _N_VOCAB, size.n_embd, size)

    def result(self, out: Path) -> Path:
        """Where its result is written."""
        return out / "runs" / f"{'-'.join(filter(None, map(str, asdict(self).values()))).replace(' ', '-')}.json"


def run(
    task: str,
    difficulties: list[int],
    arms: list[str],
    head_dim: list[int],
    tested_at: list[int],
    out: Path,
    steps: int,
    learning_rates: list[float],
    seed: int,
    jobs: int,
) -> None:
    """Finish every run, and report what there is."""
    torch.set_num_threads(1)  # the products are small
    varied = itertools.product(sorted(difficulties), head_dim, arms, learning_rates)
    tests = " ".join(map(str, tested_at))
    cases = [Case(task, n, arm, d, lr, steps, seed, tests) for n, d, arm, lr in varied]
    for case in cases:  # refuses mistakes before anything is made
        for each in (case, *case.tests()):
            each.model()
    make_directory(out / "runs", "out")
    for config in {case.difficulty: case.dataset(out) for case in cases}.values():
        prepare(config)
    try:
        compare.in_processes([partial(train, case, out) for case in cases if not case.result(out).exists()], jobs)
    finally:
        report(cases, out)


def train(case: Case, out: Path) -> str:
    """Train a model on the answers of a task, as in Arora et al. 2023; writes its accuracy, and returns it in words."""
    folder, places, (size, model) = case.dataset(out).out_dir, case.places, case.model()
    manifest = read_manifest(folder)
    config = compare.config_of(out, folder, size, model, case.lr, case.seed, case.steps)
    training = Training(config, sequences=1)
    gpt = training.summed_loss.gpt
    batches = TrainBatches(TokenStream(folder, manifest, "train"), size.seq_len, _BATCH, case.seed)
    held_out = EvalBatches(TokenStream(folder, manifest, "val"), size.seq_len)
    tested = only_answers(*held_out.rows(0, len(held_out)), places)
    evaluations = {case.steps * i // _EVALUATIONS for i in range(1, _EVALUATIONS + 1)}
    for step in range(case.steps):
        training.batch = [only_answers(*batches.batch(step), places)]
        config.optim.schedule(training.optimizer, config.schedule.factor(step, case.steps), step / case.steps)
        training.step()
        if step + 1 in evaluations and (right := accuracy(gpt, *tested)) >= _LEARNED:
            break
    found = {"accuracy": right, "steps": step + 1, "state": state_size(gpt, tested[0])}
    others = [(test.difficulty, accuracy(gpt, *unseen(test))) for test in case.tests()]
    write_json(case.result(out), asdict(case) | found | {"tested": others, "parameters": compare.count(model)})
    shares = "".join(f", {share:.3f} at {n}" for n, share in others)
    return f"{case.difficulty}, {case.arm}, head_dim {case.head_dim}, learning rate {case.lr:g}: {right:.3f}{shares}"


def only_answers(ids: np.ndarray, targets: np.ndarray, places: list[int]) -> tuple[Tensor, Tensor]:
    """Documents and their targets, both (B, T), of which all but those in `places` do not count."""
    answers = np.full_like(targets, IGNORED)
    answers[:, places] = targets[:, places]
    return torch.from_numpy(ids), torch.from_numpy(answers)


def unseen(case: Case) -> tuple[Tensor, Tensor]:
    """Documents of a difficulty for which no dataset was prepared, and their answers, both (B, T)."""
    task = case.source
    n_documents = max(_LEAST_TESTED, min(_TESTED, _TESTED_CHARACTERS // (task.answers[-1] + 1)))
    texts = [task.text(Random(f"{case.seed} unseen {number}")) for number in range(n_documents)]
    ids = np.array([[*text.encode()] for text in texts], dtype=np.int64)
    return only_answers(ids[:, :-1], ids[:, 1:], case.places)


@torch.no_grad()
def accuracy(gpt: GPT, ids: Tensor, answers: Tensor) -> float:
    """The share of the answers that are the most likely token, given all tokens before them; reads in pieces."""
    right = 0
    for rows in zip(ids.split(_BATCH), answers.split(_BATCH), strict=True):
        for x, wanted in features_in_pieces(gpt, *rows):
            right += int((gpt.logits(x[wanted >= 0]).argmax(-1) == wanted[wanted >= 0]).sum())
    return right / int((answers >= 0).sum())


@torch.no_grad()
def state_size(gpt: GPT, ids: Tensor) -> int:
    """How many numbers the model keeps of a document, the first of (B, T)."""
    _, state = gpt.features(ids[:1].to(gpt.embed.weight.device), return_state=True)
    return sum(leaf.numel() for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def report(cases: list[Case], out: Path) -> None:
    """Write recall.json and recall.png of the runs that are finished."""
    results = [read_json(path) for case in cases if (path := case.result(out)).exists()]
    best: dict[tuple[int, str, int], Raw] = {}
    for found in results:  # of the learning rates
        key = found["head_dim"], found["arm"], found["difficulty"]
        best[key] = max(best.get(key, found), found, key=lambda row: row["accuracy"])
    if best:
        about = {"command": command_line(), "machine": machine()}
        write_json(out / "recall.json", about | {"best": list(best.values()), "runs": results})
        write_atomic(out / "recall.png", picture_of(list(best.values())))
        say(f"{len(results)} of {len(cases)} runs are in {out / 'recall.json'} and drawn in {out / 'recall.png'}")


def picture_of(rows: list[Raw]) -> bytes:
    """A PNG: accuracy over difficulty, a line for each arm, a panel for each head_dim; dotted: not trained there."""
    sizes, task = sorted({row["head_dim"] for row in rows}), rows[0]["task"]
    figure = Figure(figsize=(1 + 5 * len(sizes), 6))
    for axes, head_dim in zip(figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0], sizes, strict=True):
        for arm in dict.fromkeys(row["arm"] for row in rows):
            line = [row for row in rows if (row["arm"], row["head_dim"]) == (arm, head_dim)]
            kept = f"{line[-1]['state']:,}" if line else ""
            own = [[row["difficulty"], row["accuracy"]] for row in line]
            (drawn,) = axes.plot(*np.transpose(own or [[np.nan, np.nan]]), "o-", label=f"{arm}: {kept}")
            for trained_at, row in zip(own, line, strict=True):
                axes.plot(*np.transpose(sorted([trained_at, *row.get("tested", [])])), ".:", color=drawn.get_color())
        axes.set(xscale="log", xlabel=f"{task}: {DIFFICULTY[task]}", title=f"head_dim {head_dim}", ylim=(-0.02, 1.02))
        shown = {row["difficulty"] for row in rows} | {n for row in rows for n, _ in row.get("tested", [])}
        axes.xaxis.set(major_locator=FixedLocator(sorted(shown)))
        axes.xaxis.set(minor_locator=NullLocator())
        axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
        axes.legend(title="numbers kept of the longest document of training", **below)
    figure.axes[0].set_ylabel("share of answers that are right")
    return png(figure)
