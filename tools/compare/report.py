"""What a comparison of attention mechanisms has found, as JSON, as tables and as a picture."""

import io
import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure

from common.console import say
from common.files import read_json, write_atomic, write_json
from model.gpt import GPT, GPTConfig
from tools.compare.compare import (
    CONTROL,
    ON_EQUAL_TERMS,
    POSITIONS,
    SEEDS,
    SEQ_LEN,
    Models,
    Raw,
    Terms,
    count,
    follow,
    loss_in,
)

_ROUNDS = 20  # of timed steps
_COLORS = {"softmax": "dimgray", "log_space": "tab:orange", "log_space_signed": "tab:red"}


def speeds(models: Models, path: Path) -> dict[str, list[float]]:
    """Each arm's median seconds of a training step, and median ratio to it of the control's step right before.

    Written to `path`, where it is looked up the next time.
    """
    known: dict[str, list[float]] = read_json(path) if path.exists() else {}
    if models.keys() <= known.keys():
        return known
    steps = {name: _stepper(model) for name, model in models.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for n, name in itertools.product(range(1 + _ROUNDS), models):
        control, own = steps[CONTROL](), steps[name]()
        times[name] += [(own, control / own)] if n else []  # the first round warms up
    known = {name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in times.items()}
    write_json(path, known)
    return known


def _stepper(model: GPTConfig) -> Callable[[], float]:
    """A function that makes a training step on the CPU and returns its seconds, other programs' left out."""
    torch.manual_seed(1)
    gpt, ids = GPT(model), torch.randint(model.n_vocab, (1, SEQ_LEN + 1))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        started = time.process_time()
        gpt.loss(ids[:, :-1], ids[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started

    return step


def report(models: Models, speed: dict[str, list[float]], terms: Terms, command: str) -> None:
    """Write compare.json, compare.md and compare.png of the arms that are finished."""
    rows = {name: row for name, model in models.items() if (row := row_of(name, model, speed[name], terms))}
    if CONTROL not in rows:
        return
    rows = dict(sorted(rows.items(), key=lambda item: item[1]["mean"]))
    found = {
        "command": command,
        "machine": {"device": platform.processor(), "cores": os.cpu_count(), "torch": torch.__version__},
        "tokens": terms.steps * SEQ_LEN,
        "seeds": SEEDS,
        "control": CONTROL,
        "arms": rows,
    }
    write_json(terms.out / "compare.json", found)
    write_atomic(terms.out / "compare.md", f"{table_of(rows)}\n{equal_terms(rows)}")
    write_atomic(terms.out / "compare.png", picture_of(rows, terms.steps * SEQ_LEN))
    say(f"{len(rows)} of {len(models)} arms are in {terms.out / 'compare.md'}")


def row_of(name: str, model: GPTConfig, speed: list[float], terms: Terms) -> Raw | None:
    """What is known of an arm once all of its runs are finished, unless it diverges at every learning rate."""

    def finished(lr: float, seed: int) -> float:
        if (loss := loss_in(terms.run_dir(name, lr, seed))) is None:
            raise LookupError
        return loss

    try:
        row = follow(finished, terms.grid)
    except LookupError:
        return None
    if row is None:
        return None
    tried = {f"{lr:g}": loss if math.isfinite(loss) else None for lr, loss in sorted(row["tried"].items())}
    sizes = {"parameters": count(model), "n_layer": model.n_layer, "n_embd": model.n_embd}
    rate = {"tokens_per_second": SEQ_LEN / speed[0], "times_as_fast": speed[1]}
    return {**row, "tried": tried, "mean": statistics.mean(row["losses"]), **sizes, **rate}


def table_of(rows: dict[str, Raw]) -> str:
    """All arms, the lowest loss first."""
    columns = [
        "attention, block, position",
        "loss (3 seeds)",
        "above control",
        "learning rate",
        "tokens/s",
        "x control",
    ]
    text = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for name, row in rows.items():
        label = f"**{name}**" if name == CONTROL else name
        more = row["mean"] - rows[CONTROL]["mean"]
        edge = " (edge)" if row["at_edge"] else ""
        speed = f"{row['tokens_per_second']:,.0f} | {row['times_as_fast']:.2f}"
        text += f"| {label} | {_loss(row)} | {more:+.4f} | {row['lr']:g}{edge} | {speed} |\n"
    return text


def equal_terms(rows: dict[str, Raw]) -> str:
    """Log-space attention beside softmax attention with the same block and position."""
    softmax, *others = ON_EQUAL_TERMS
    text = f"| block, position | {softmax} | {' | '.join(others)} |\n|{'---|' * (2 + len(others))}\n"
    for place in (f"{block} {position}" for block in ("mlp", "glu") for position in POSITIONS):
        if control := rows.get(f"{softmax} {place}"):
            found = [rows.get(f"{name} {place}") for name in others]
            cells = [f"{_loss(row)}: {verdict(row['losses'], control['losses'])}" if row else "" for row in found]
            text += f"| {place} | {_loss(control)} | {' | '.join(cells)} |\n"
    return text


def _loss(row: Raw) -> str:
    return f"{row['mean']:.4f} ({min(row['losses']):.4f} to {max(row['losses']):.4f})"


def verdict(losses: list[float], control: list[float]) -> str:
    """Whether every seed is better than the control's best, worse than its worst, or neither."""
    if max(losses) < min(control):
        return "better"
    return "worse" if min(losses) > max(control) else "level"


def picture_of(rows: dict[str, Raw], tokens: int) -> bytes:
    """A PNG: how much more loss than the control every arm has; a dot is a seed."""
    control, names = rows[CONTROL]["mean"], list(rows)
    colors = ["black" if n == CONTROL else _COLORS.get(n.split()[0], "tab:blue") for n in names]
    figure = Figure(figsize=(9, 1.5 + 0.24 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [rows[name]["mean"] - control for name in names], color=colors, alpha=0.5)
    for name, color in zip(names, colors, strict=True):
        axes.plot([loss - control for loss in rows[name]["losses"]], [name] * len(SEEDS), ".", color=color)
    axes.axvline(0, color="black", linewidth=0.8)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == CONTROL else "normal")
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("validation loss (nats per token) above the control's; dots: seeds")
    axes.set_title(f"{tokens:,} tokens a run; the control, {CONTROL}, has {control:.3f}")
    axes.grid(axis="x", alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
