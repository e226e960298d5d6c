"""Showing a dataset: its sets as a table and a chart, its text, and the documents behind a training step."""

import unicodedata
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from common.files import write_atomic
from common.settings import UserError
from data.documents import documents_in
from data.shards import TOKENIZER, Manifest, SplitName, TokenStream
from data.tokenizer import load_tokenizer

_BARS = 40


def sets_table(manifest: Manifest) -> Table:
    """Return a table of the text in each set of each split, the largest first."""
    table = _table(["split", "set"], ["documents", "tokens", "share, %", "bytes", "tokens/byte"])
    for name, split in manifest.splits.items():
        largest_first = sorted(split.sets.items(), key=lambda item: -item[1].tokens)
        for set_name, counts in [*largest_first, ("all", split.total)]:
            share = 100 * counts.tokens / max(1, split.total.tokens)
            rate = counts.tokens / max(1, counts.utf8_bytes)
            numbers = f"{counts.documents:,}", f"{counts.tokens:,}", f"{share:.2f}", f"{counts.utf8_bytes:,}"
            _add_row(table, name, visible(set_name), *numbers, f"{rate:.3f}")
        table.add_section()
    return table


def draw_sets(manifest: Manifest, path: Path, title: str) -> None:
    """Draw the tokens of each set as bars, the largest on top, into the PNG file `path`."""
    names, tokens = bars(manifest)
    from matplotlib.figure import Figure  # here, because importing it is slow

    from common.figures import png, short_count

    def short(n: int) -> str:
        return short_count(float(f"{n:.3g}"), 0)

    figure = Figure(figsize=(9, 1.6 + 0.3 * len(names)))
    axes = figure.subplots()
    begins = np.zeros(len(names))
    for split, widths, color in zip(manifest.splits, tokens, ("C0", "C1"), strict=True):
        label = f"{split}, {short(int(widths.sum()))} tokens"
        drawn = axes.barh(names, widths, left=begins, color=color, label=label)
        begins += widths
    axes.bar_label(drawn, [f" {short(int(n))}, {n / tokens.sum():.1%}" for n in begins], fontsize=9)
    axes.margins(x=0.2, y=0.01)
    axes.xaxis.set_major_formatter(short_count)
    axes.set_xlabel("tokens")
    axes.set_title(title)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    write_atomic(path, png(figure))


def bars(manifest: Manifest) -> tuple[list[str], np.ndarray]:
    """Return labels (n,) and tokens (splits, n) of the bars, the largest last; many small sets become one bar."""
    splits = manifest.splits.values()
    sizes = [[split.sets[name].tokens if name in split.sets else 0 for split in splits] for name in manifest.set_names]
    by_size = sorted(zip(sizes, manifest.set_names, strict=True), key=lambda bar: sum(bar[0]))
    names = [visible(name) for _, name in by_size]
    tokens = np.array([numbers for numbers, _ in by_size]).T
    if (small := len(by_size) - _BARS) > 0:
        names = [f"{small + 1:,} other sets", *names[small + 1 :]]
        tokens = np.concatenate([tokens[:, : small + 1].sum(axis=1, keepdims=True), tokens[:, small + 1 :]], axis=1)
    return names, tokens


def window_text(dataset_dir: Path, manifest: Manifest, split: SplitName, start: int, n_tokens: int) -> str:
    """Return the text of up to `n_tokens` tokens from number `start` of a split, with control characters escaped.

    Raises:
        UserError: the split does not have this token.
    """
    stream = TokenStream(dataset_dir, manifest, split)
    if not 0 <= start < stream.n_tokens:
        raise UserError(f"token {start} is not in '{split}', which has {stream.n_tokens} tokens: give a lower number")
    ids = stream.read(start, min(start + n_tokens, stream.n_tokens)).tolist()
    return visible(load_tokenizer(dataset_dir / TOKENIZER).decode_bytes(ids).decode(errors="replace"), kept="\n\t")


def documents_table(dataset_dir: Path, manifest: Manifest, split: SplitName, windows: list[tuple[int, int]]) -> Table:
    """Return a table of the documents behind windows [start, stop) of a split, and where they were read from."""
    table = _table(["set", "input"], ["number", "its tokens", "of", "row", "at token of the split"])
    for row, (start, stop) in enumerate(windows):
        for place in documents_in(dataset_dir, manifest, split, start, stop):
            begin, end = max(start, place.start), min(stop, place.stop)
            part = f"{begin - place.start:,} - {end - place.start:,}", f"{place.stop - place.start:,}"
            _add_row(table, visible(place.set_name), visible(place.input), place.number, *part, row, begin)
    return table


def visible(text: str, kept: str = "") -> str:
    """Escape the control characters of a text, which a terminal would obey, except those in `kept`."""
    commands = {c for c in text if unicodedata.category(c)[0] == "C" and c not in kept}
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in commands})


def _table(texts: list[str], numbers: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in texts:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _add_row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))  # brackets in a Text are not markup
