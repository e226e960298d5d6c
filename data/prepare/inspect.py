"""Shows a dataset: a table of its sets, its text, and the documents of a training step."""

import unicodedata
from pathlib import Path

from rich.table import Table

from common.console import table_of
from common.settings import UserError
from data.documents import documents_in
from data.shards import TOKENIZER, Manifest, SplitName, TokenStream
from data.tokenizer import load_tokenizer


def sets_table(manifest: Manifest) -> Table:
    """Return a table of the text in each set of each split, the largest first."""
    table = table_of(["split", "set"], ["documents", "tokens", "share, %", "bytes", "tokens/byte"])
    for name, split in manifest.splits.items():
        largest_first = sorted(split.sets.items(), key=lambda item: -item[1].tokens)
        for set_name, counts in [*largest_first, ("all", split.total)]:
            share = 100 * counts.tokens / max(1, split.total.tokens)
            rate = f"{counts.tokens / counts.utf8_bytes:.3f}" if counts.utf8_bytes else "no text"
            table.add_row(
                name,
                visible(set_name),
                f"{counts.documents:,}",
                f"{counts.tokens:,}",
                f"{share:.2f}",
                f"{counts.utf8_bytes:,}",
                rate,
            )
        table.add_section()
    return table


def window_text(
    dataset_dir: Path, manifest: Manifest, split: SplitName, start: int, n_tokens: int
) -> str:
    """Return the text of up to `n_tokens` tokens from number `start` of a split.

    Control characters are escaped.

    Raises:
        UserError: the split does not have this token.
    """
    stream = TokenStream(dataset_dir, manifest, split)
    if not 0 <= start < stream.n_tokens:
        raise UserError(
            f"token {start} is not in '{split}', which has {stream.n_tokens} tokens: "
            "give a lower number"
        )
    ids = stream.read(start, min(start + n_tokens, stream.n_tokens)).tolist()
    # Not decode_bytes: tokens without text are shown by their names.
    tokens = load_tokenizer(dataset_dir / TOKENIZER).tokens
    return visible(b"".join(tokens[i] for i in ids).decode(errors="replace"), kept="\n\t")


def documents_table(
    dataset_dir: Path, manifest: Manifest, split: SplitName, windows: list[tuple[int, int]]
) -> Table:
    """Return a table of the documents in windows [start, stop) of a split, and their inputs."""
    table = table_of(
        ["set", "input"], ["document", "tokens read", "of", "row", "offset in the split"]
    )
    for row, (start, stop) in enumerate(windows):
        for document in documents_in(dataset_dir, manifest, split, start, stop):
            begin = max(start, document.start)
            end = min(stop, document.stop)
            table.add_row(
                visible(document.set_name),
                visible(document.input),
                f"{document.number:,}",
                f"{begin - document.start:,} - {end - document.start:,}",
                f"{document.stop - document.start:,}",
                f"{row:,}",
                f"{begin:,}",
            )
    return table


def visible(text: str, kept: str = "") -> str:
    """Escape the control characters of a text except `kept`: a terminal would obey them."""
    commands = {c for c in text if unicodedata.category(c)[0] == "C" and c not in kept}
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in commands})
