"""The tables that eval.py prints, and eval.png."""

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from common.console import say, show_table, table_of, warn
from common.figures import encode_png
from common.numbers import plus_minus
from common.settings import JsonDict

# Beside long contexts, tokens before it are not drawn: their high loss would flatten the curves.
_FIRST_POSITION = 16
# Largest share of q, k or log_v beyond the bounds of log-space attention without a warning.
_BEYOND_BOUNDS = 0.001


def show_evaluation(result: JsonDict, checkpoint: str) -> None:
    """Print a line of totals, a table of the sets, and a table of the contexts.

    There is no table of one set, and none without contexts. Warn if much is beyond the bounds of
    log-space attention.
    """
    totals = f"{_loss(result)}, perplexity {_number(result['perplexity'], 3)}"
    if result["bytes"]:
        totals += f", {_with_error(result, 'bits_per_byte')} bits per byte"
    part = "" if result["batches"] is None else f", batches={result['batches']:,}"
    text = f"{result['dataset_dir']} ({result['split']}, {result['tokens']:,} tokens{part})"
    say(f"{checkpoint} on {text}: {totals}")
    if len(result["sets"]) > 1:
        show_table(_table("set", result["sets"]))
    if result["contexts"]:
        show_table(_table("context", {f"{row['context']:,}": row for row in result["contexts"]}))
    beyond = []
    for name, share in (result["beyond_bounds"] or {}).items():
        if share > _BEYOND_BOUNDS:
            beyond.append(f"{100 * share:.3g} % of {name}")
    if beyond:
        warn(
            f"{' and '.join(beyond)} are beyond the bounds of log-space attention, and are "
            "clamped to them: the learning rate was probably too high, so train with a lower "
            "optim.max_lr"
        )


def _table(first: str, rows: dict[str, JsonDict]) -> Table:
    table = table_of([first], ["tokens", "loss", "perplexity", "bits per byte"])
    for name, row in rows.items():
        numbers = ["no answer"] * 3
        if row["tokens"]:
            bits = _with_error(row, "bits_per_byte") if row["bytes"] else "no text"
            numbers = [_with_error(row, "loss"), _number(row["perplexity"], 3), bits]
        # In a Text, brackets are not markup.
        table.add_row(Text(name), f"{row['tokens']:,}", *numbers)
    return table


def _loss(result: JsonDict) -> str:
    of_answers = " on answers" if result["loss_of"] == "answers" else ""
    return f"loss{of_answers} {_with_error(result, 'loss')} nats per token"


def _with_error(row: JsonDict, key: str) -> str:
    return _number(row[key]) + plus_minus(row[f"{key}_stderr"])


def _number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def draw_evaluation(result: JsonDict, trained_on: int) -> bytes:
    """Draw the loss at each position, and the mean over each context, as a PNG.

    Args:
        result: the content of eval.json.
        trained_on: tokens of a training sequence.
    """
    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_subplot()
    title = f"{result['run']} {result['checkpoint']} on {result['dataset_dir']} ({result['split']})"
    figure.suptitle(f"{_loss(result)}: {title}")
    # A line for windows, and one for each length of context: the loss at each position.
    lines = {f"windows of {result['seq_len']:,} tokens": result["by_position"]}
    for row in result["contexts"]:
        lines[f"contexts of {row['context']:,} tokens"] = row["by_position"]
    first = _FIRST_POSITION if result["contexts"] else 0
    for label, bins in lines.items():
        rows = [row for row in bins if row["loss"] is not None and row["stop"] > first]
        middles = [(row["start"] + row["stop"] + 1) / 2 for row in rows]
        axes.plot(middles, [row["loss"] for row in rows], marker="o", markersize=3, label=label)
    # The mean over each context, at its length.
    means = [row for row in result["contexts"] if row["loss"] is not None]
    if means:
        contexts = [row["context"] for row in means]
        losses = [row["loss"] for row in means]
        axes.plot(contexts, losses, "s--", color="black", label="mean over a context")
    axes.axvline(trained_on, color="C7", linestyle=":", label=f"trained on {trained_on:,}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    without = f" (the first {first} are left out)" if first else ""
    axes.set(xlabel=f"tokens read so far{without}", ylabel="loss (nats per token)")
    axes.legend()
    return encode_png(figure)
