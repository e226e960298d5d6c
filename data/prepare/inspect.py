"""Shows a dataset: a table of its sets, its text, and the documents of a training step."""

import unicodedata
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from common.console import table_of
from data.chat import answer_targets
from data.conversations import Spans
from data.documents import documents_in
from data.shards import Manifest, TokenStream


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


def row_text(stream: TokenStream, spans: Spans, n_tokens: int, tokens: Sequence[bytes]) -> str:
    """Return the text of the first `n_tokens` tokens of a row, with control characters escaped.

    With the loss on answers, ⟦ and ⟧ enclose the targets.

    Args:
        tokens: the bytes of each id; of one without text, its name.
    """
    text = b""
    for start, stop in spans:
        stop = min(stop, start + n_tokens)
        n_tokens -= stop - start
        marked = np.zeros(stop - start, bool)
        if stream.loss == "answers":
            marked = _are_targets(stream, start, stop)
        open_before = False
        for token_id, is_target in zip(stream.read(start, stop).tolist(), marked, strict=True):
            if is_target != open_before:
                text += ("⟦" if is_target else "⟧").encode()
            text += tokens[token_id]
            open_before = is_target
        text += "⟧".encode() if open_before else b""
    return visible(text.decode(errors="replace"), kept="\n\t")


def _are_targets(stream: TokenStream, start: int, stop: int) -> np.ndarray:
    """Return whether tokens [start, stop) of conversations are targets, bool (stop - start,)."""
    are_targets = np.zeros(stop - start, bool)
    for document in documents_in(stream, start, stop):
        ids = np.append(stream.eot_id, stream.read(document.start, min(document.stop, stop)))
        _, targets = answer_targets(ids, stream.n_vocab)
        first = max(start, document.start)
        are_targets[first - start : document.stop - start] = targets[first - document.start :] >= 0
    return are_targets


def documents_table(stream: TokenStream, rows: list[Spans]) -> Table:
    """Return a table of the documents in rows of a split, and their inputs."""
    table = table_of(
        ["set", "input"],
        ["document", "tokens read", "of", "row", "offset in the split"],
    )
    for row, spans in enumerate(rows):
        for start, stop in spans:
            for document in documents_in(stream, start, stop):
                begin = max(start, document.start)
                end = min(stop, document.stop)
                table.add_row(
                    visible(document.set_name),
                    visible(document.input),
                    f"{document.number:,}",
                    f"{begin - document.start:,} - {end - document.start:,}",
                    f"{document.stop - document.start:,}",
                    f"{row}",
                    f"{begin:,}",
                )
    return table


def visible(text: str, kept: str = "") -> str:
    """Escape the control characters of a text except `kept`: a terminal would obey them."""
    commands = {c for c in text if unicodedata.category(c)[0] == "C" and c not in kept}
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in commands})
