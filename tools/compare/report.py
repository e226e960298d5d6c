"""The results of a comparison of attention mechanisms, as JSON, tables and a picture."""

import math
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from common.console import say
from common.figures import png
from common.files import read_json, write_atomic, write_json
from model.gpt import GPTConfig
from tools.bench.harness import command_line, in_turn, machine, markdown, speedup, timed
from tools.bench.train import Training
from tools.compare import compare
from tools.compare.compare import CONTROL, SIZES, Models, Raw, Terms

_ROUNDS = 20  # of timed steps
_COLORS = {"softmax": "C7", "log_space_signed": "C1", "log_space": "C4"}


def run(
    dataset_dir: Path,
    out: Path,
    arms: list[str],
    size: str,
    steps: int,
    learning_rates: list[float],
    seeds: list[int],
    jobs: int,
) -> None:
    """Measure speed, train the unfinished arms, and report the finished ones."""
    torch.set_num_threads(1)  # the products are small, and the bits of a result depend on the number of threads
    terms = Terms(dataset_dir, out / size, SIZES[size], steps, learning_rates, seeds)
    models = compare.models_of(dataset_dir, terms.size, arms)
    terms.open()
    parameters = compare.count(models[CONTROL])
    say(f"{len(models)} arms of {parameters:,} parameters, {terms.tokens:,} tokens a run")
    speed = speeds(models, terms)
    try:
        compare.in_processes([partial(compare.train_arm, terms, name, model) for name, model in models.items()], jobs)
    finally:
        report(models, speed, terms)


def speeds(models: Models, terms: Terms) -> dict[str, list[float]]:
    """Each arm's median CPU seconds of a training step, and how many times as fast as the control's step that is.

    Written to speed.json, where the next call finds it.
    """
    path = terms.out / "speed.json"
    known: dict[str, list[float]] = read_json(path) if path.exists() else {}
    if not (missing := models.keys() - known.keys()):
        return known
    places = terms.out, terms.out, terms.size
    configs = {
        name: compare.config_of(*places, model, 1e-4, seed=1, steps=1)
        for name, model in models.items()
        if name in missing | {CONTROL}
    }
    steps = {name: timed(Training(config, 1).step, clock=time.process_time) for name, config in configs.items()}
    times = in_turn(steps, _ROUNDS, warm_up=1)
    known |= {name: [statistics.median(own), speedup(own, times[CONTROL])[0]] for name, own in times.items()}
    write_json(path, known)
    return known


def report(models: Models, speed: dict[str, list[float]], terms: Terms) -> None:
    """Write compare.json, compare.md and compare.png of the arms that are finished."""
    rows = {name: row for name, model in models.items() if (row := row_of(name, model, speed[name], terms))}
    if CONTROL not in rows:
        return
    rows = dict(sorted(rows.items(), key=lambda item: item[1]["mean"]))
    found = {
        "command": command_line(),
        "machine": machine(),
        "tokens": terms.tokens,
        "seq_len": terms.size.seq_len,
        "learning_rates": terms.grid,
        "seeds": terms.seeds,
        "control": CONTROL,
        "arms": rows,
    }
    write_json(terms.out / "compare.json", found)
    draw(terms.out.parent)


def draw(out: Path) -> None:
    """Write compare.json, compare.md and compare.png of all sizes from the compare.json of each."""
    sizes = {size: read_json(path) for size in SIZES if (path := out / size / "compare.json").exists()}
    write_json(out / "compare.json", sizes)
    write_atomic(out / "compare.md", "\n".join(tables_of(found) for found in sizes.values()))
    write_atomic(out / "compare.png", picture_of(sizes))
    say(f"{', '.join(sizes)}: results are in {out / 'compare.md'}")


def row_of(name: str, model: GPTConfig, speed: list[float], terms: Terms) -> Raw | None:
    """The results of an arm; None unless all its runs are finished and it converges at some learning rate."""

    def finished(lr: float, seed: int) -> float:
        if (loss := compare.loss_in(terms.run_dir(name, lr, seed))) is None:
            raise LookupError
        return loss

    try:
        row = compare.follow(finished, terms.grid, terms.seeds)
    except LookupError:
        return None
    if row is None:
        return None
    tried = {f"{lr:g}": loss if math.isfinite(loss) else None for lr, loss in sorted(row["tried"].items())}
    sizes = {"parameters": compare.count(model), "n_layer": model.n_layer, "n_embd": model.n_embd}
    rate = {"tokens_per_second": terms.size.batch_tokens / speed[0], "times_as_fast": speed[1]}
    return {**row, "tried": tried, "mean": statistics.mean(row["losses"]), **sizes, **rate}


def tables_of(found: Raw) -> str:
    """The tables of a size: all arms, the lowest loss first, and mechanisms on equal terms."""
    rows = found["arms"]
    parameters = f"{rows[CONTROL]['parameters']:,} parameters"
    title = f"{parameters}, {found['tokens']:,} tokens a run in texts of {found['seq_len']:,}"
    return "\n".join([f"{title}\n", table_of(rows), equal_terms(rows)])


def table_of(rows: dict[str, Raw]) -> str:
    """All arms, the lowest loss first."""
    cells = []
    for name, row in rows.items():
        label = f"**{name}**" if name == CONTROL else name
        above, edge = row["mean"] - rows[CONTROL]["mean"], " (edge)" if row["at_edge"] else ""
        speed = [f"{row['tokens_per_second']:,.0f}", f"{row['times_as_fast']:.2f}"]
        cells.append([label, _loss(row), f"{above:+.4f}", f"{row['lr']:g}{edge}", *speed])
    columns = ["arm", "loss (range of seeds)", "above control", "learning rate"]
    return markdown([*columns, "tokens/s", "x control"], cells)


def equal_terms(rows: dict[str, Raw]) -> str:
    """Log-space attention beside softmax attention with the same block and position, where both are among the arms."""
    softmax, *others = compare.ON_EQUAL_TERMS
    cells = []
    for place in (f"{block} {position}" for block in ("mlp", "glu") for position in compare.POSITIONS):
        if control := rows.get(f"{softmax} {place}"):
            found = [rows.get(f"{name} {place}") for name in others]
            verdicts = [f"{_loss(row)}: {verdict(row['losses'], control['losses'])}" if row else "" for row in found]
            cells.append([place, _loss(control), *verdicts])
    return markdown(["block, position", *compare.ON_EQUAL_TERMS], cells) if cells else ""


def _loss(row: Raw) -> str:
    return f"{row['mean']:.4f} ({min(row['losses']):.4f} to {max(row['losses']):.4f})"


def verdict(losses: list[float], control: list[float]) -> str:
    """Whether every seed is better than the control's best, worse than its worst, or neither."""
    if max(losses) < min(control):
        return "better"
    return "worse" if min(losses) > max(control) else "level"


def picture_of(sizes: dict[str, Raw]) -> bytes:
    """A PNG: how much more loss than the control every arm has, a panel for each size; a dot is a seed."""
    heights = [len(found["arms"]) for found in sizes.values()]
    figure = Figure(figsize=(9, 1 + 0.8 * len(sizes) + 0.24 * sum(heights)))
    panels = figure.subplots(len(sizes), 1, squeeze=False, height_ratios=[height + 1 for height in heights])[:, 0]
    for axes, found in zip(panels, sizes.values(), strict=True):
        rows = found["arms"]
        control, names = rows[CONTROL]["mean"], list(rows)
        kinds = [next((kind for kind in _COLORS if name.startswith(kind)), "") for name in names]
        colors = ["black" if n == CONTROL else _COLORS.get(k, "C0") for n, k in zip(names, kinds, strict=True)]
        axes.barh(names, [rows[name]["mean"] - control for name in names], color=colors, alpha=0.5)
        for name, color in zip(names, colors, strict=True):
            losses = [loss - control for loss in rows[name]["losses"]]
            axes.plot(losses, [name] * len(losses), ".", color=color)
        axes.axvline(0, color="black", linewidth=0.8)
        for label in axes.get_yticklabels():
            label.set_fontweight("bold" if label.get_text() == CONTROL else "normal")
        axes.invert_yaxis()
        axes.margins(y=0.01)
        parameters = f"{rows[CONTROL]['parameters']:,} parameters"
        axes.set_title(f"{parameters}, {found['tokens']:,} tokens: the control has {control:.3f}")
        axes.grid(axis="y", visible=False)
    panels[-1].set_xlabel("validation loss (nats per token) above the control's; dots: seeds")
    return png(figure)
