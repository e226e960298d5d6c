"""Spans: the shards of a dataset, each written once; `finish` renames them.

    out_dir.partial/
        plan.json         what the dataset is made of
        tokenizer.json
        lock              held by the process that writes here
        span-00012/       train.bin train.idx val.bin val.idx span.json; an empty split has no files
        span-00013.tmp/   a span that is being written

A span is a sequence of documents. It ends with the document that brings its tokens (of both splits
together) to shard_tokens, or with the input.

The bytes of a span depend on the plan alone. A span gets its final name when all of it is on the
disk, so a stopped run loses at most the span that it was writing, and the next run continues after
the last complete span.
"""

import contextlib
import errno
import itertools
import math
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from common.files import (
    hold_lock,
    new_directory,
    read_json,
    sha256_file,
    sync_directory,
    write_json,
)
from common.settings import JsonDict, Settings, UserError, decode, find_differences
from data.prepare.encode import Encoded, Item, Skipped
from data.prepare.files import list_some
from data.prepare.items import Position
from data.shards import (
    RECORD,
    TOKENIZER,
    Counts,
    Shard,
    Split,
    SplitName,
    TokenizerId,
    build_header,
)
from data.tokenizers.build import save_tokenizer
from data.tokenizers.interface import Tokenizer

PLAN = "plan.json"
SPAN = "span.json"
_PARTIAL_NAMES = re.compile(r"(plan|tokenizer)\.json|lock|span-.*|dataset|.*\.tmp")
_RANKS = "sha256 of the tokenizer's ranks"
# In a corpus of fewer documents, none may fall into validation by chance: one is then chosen.
_FEW_DOCUMENTS = 4096
ValidationRule = Callable[[Encoded, int], bool]
"""Whether a document is for validation, given the number of tokens of the input before it."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Plan(Settings):
    """The settings and inputs of a dataset. All bytes written depend on them alone."""

    prepared: JsonDict
    """The settings that decide what the dataset holds, and its input files with their sizes."""
    tokenizer: TokenizerId

    @property
    def val_fraction(self) -> float:
        """Documents whose split_hash is below this are for validation; 0: another rule."""
        return self.prepared.get("val_fraction", 0.0)

    @property
    def shard_tokens(self) -> int:
        """A span ends with the document that brings its tokens to this number."""
        return self.prepared["shard_tokens"]

    def changes(self, now: "Plan") -> str:
        """Describe what differs, after "made with" in a message; empty if nothing does."""
        old = {**self.prepared, _RANKS: self.tokenizer.sha256}
        new = {**now.prepared, _RANKS: now.tokenizer.sha256}
        different = find_differences(old, new)
        return list_some(
            [f"{key}={before!r} (now {after!r})" for key, (before, after) in different.items()]
        )


class Span(Settings):
    """What span.json says."""

    last: Position | None
    """Where its last item stands in the input; None: it has no items.

    The next span begins after it.
    """
    is_last: bool
    """Whether the input ends with it."""
    set_names: list[str]
    """The names of the sets that its indexes have numbers of."""
    splits: dict[SplitName, Split]
    """Those with documents, each with one shard."""
    skipped: dict[str, tuple[int, str]]
    """Skipped items by reason: their number, and the place of the first."""
    unread: dict[str, int]
    """How many conversations have a key that is not read."""

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(split.total.tokens for split in self.splits.values())


def spans_error(folder: Path, error: object) -> UserError:
    """Build the error for a folder of spans that cannot be used any more."""
    return UserError(
        f"{folder} is damaged: delete it and run the command that made it again ({error})"
    )


def partial_dir(out_dir: Path) -> Path:
    """Return where a dataset is written before it is whole."""
    out_dir = out_dir.resolve()
    return out_dir.with_name(out_dir.name + ".partial")


@contextlib.contextmanager
def lock_spans(folder: Path) -> Iterator[None]:
    """Create `folder` if need be and hold its lock.

    Remove the folder at the end if it has no spans then.

    Raises:
        UserError: the folder is another's, another process holds the lock, or the disk is full.
    """
    foreign = [
        path.name for path in folder.glob("[!.]*") if not _PARTIAL_NAMES.fullmatch(path.name)
    ]
    if foreign:
        raise UserError(
            f"{folder}, where this dataset would be written, holds {foreign[0]}: rename that folder"
        )
    refusal = f"{folder} is being written by another process: wait until it is done"
    with new_directory(folder, "out_dir"), hold_lock(folder / "lock", lambda: refusal):
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise UserError(
                f"{folder} cannot be written ({os.strerror(error.errno)}): free some space on its "
                "disk, then repeat the command: it continues from what is written"
            ) from None
        finally:
            if not any(folder.glob("span-*")):
                remove_spans(folder)


def remove_spans(folder: Path) -> None:
    """Remove a folder of spans, the plan first: without a plan, leftovers of a kill are ignored."""
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def begin_spans(folder: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Start writing spans into `folder`, or check that its spans have the same plan.

    Raises:
        UserError: the plan differs or is damaged.
    """
    if not (folder / PLAN).exists():
        for path in folder.iterdir():
            if path.is_dir():  # of no plan
                shutil.rmtree(path)
        write_json(folder / PLAN, plan.model_dump(mode="json"))
    try:
        begun = decode(Plan, read_json(folder / PLAN))
    except UserError as error:
        raise spans_error(folder, error) from None
    changes = begun.changes(plan)
    if changes:
        raise UserError(
            f"{folder} was started with {changes}: use the same again, or delete it to start over"
        )
    save_tokenizer(tokenizer, folder / TOKENIZER)


def span_dir(folder: Path, number: int) -> Path:
    """Return the folder of the span with this number."""
    return folder / f"span-{number:05}"


def read_spans(folder: Path) -> list[Span]:
    """Read the existing spans, from the first.

    Raises:
        UserError: one is damaged.
    """
    spans: list[Span] = []
    while not is_whole(spans):
        path = span_dir(folder, len(spans)) / SPAN
        if not path.exists():
            break
        try:
            spans.append(decode(Span, read_json(path)))
        except UserError as error:
            raise spans_error(folder, error) from None
    return spans


def is_whole(spans: list[Span]) -> bool:
    """Whether these spans are all."""
    return bool(spans) and spans[-1].is_last


def write_spans(folder: Path, plan: Plan, spans: list[Span], items: Iterator[Item]) -> list[Span]:
    """Write the spans of `items`, which follow the first `spans`; return all spans."""
    is_val = _validation_rule(plan)
    if not spans and plan.val_fraction > 0:
        is_val, items = _enough_to_validate(plan, items)
    while not is_whole(spans):
        target = span_dir(folder, len(spans))
        directory = target.with_name(target.name + ".tmp")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        n_before = sum(span.tokens for span in spans)
        try:
            span = _write_span(directory, plan, items, n_before, is_val)
            shutil.rmtree(target, ignore_errors=True)  # if an earlier span was lost
            os.rename(directory, target)
        finally:  # after an error
            shutil.rmtree(directory, ignore_errors=True)
        sync_directory(folder)
        spans = [*spans, span]
    return spans


def _enough_to_validate(plan: Plan, items: Iterator[Item]) -> tuple[ValidationRule, Iterator[Item]]:
    """Choose at least one document of a small corpus for validation, and none that is most of it.

    A corpus is small if it is one span of few documents. Its documents of more than val_fraction
    of all tokens are for training, unless all are so long.

    Returns:
        The rule for all documents, and all items from the first.
    """
    start: list[Item] = []
    hashes: list[tuple[int, float]] = []
    n_tokens = 0
    for item in items:
        start.append(item)
        if isinstance(item, Encoded):
            n_tokens += item.ids.size
            hashes.append((item.ids.size, item.split_hash))
        if len(start) == _FEW_DOCUMENTS or n_tokens >= plan.shard_tokens:
            return _validation_rule(plan), itertools.chain(start, items)
    shortest = min((size for size, _ in hashes), default=0)
    longest = max(plan.val_fraction * n_tokens, shortest)
    lowest = min((split_hash for size, split_hash in hashes if size <= longest), default=0)
    below = max(plan.val_fraction, math.nextafter(lowest, 2.0))
    return lambda item, _: item.ids.size <= longest and item.split_hash < below, iter(start)


def _validation_rule(plan: Plan) -> ValidationRule:
    """Return the rule of the plan: val_tokens, val_inputs or val_fraction."""
    if "val_tokens" in plan.prepared:
        return lambda item, n_before: n_before < plan.prepared["val_tokens"]
    if "val_inputs" in plan.prepared:
        val_inputs = set(plan.prepared["val_inputs"])
        return lambda item, n_before: item.position.input in val_inputs
    return lambda item, n_before: item.split_hash < plan.val_fraction


def _write_span(
    directory: Path,
    plan: Plan,
    items: Iterator[Item],
    n_before: int,
    is_val: ValidationRule,
) -> Span:
    """Write the next documents into an empty folder, synced to the disk.

    Args:
        n_before: tokens of the input before them.
    """
    # Records of an index hold numbers of inputs and of sets in place of their names.
    header = build_header(plan.tokenizer.n_vocab)
    inputs = {name: number for number, name in enumerate(plan.prepared["input"])}
    set_names: dict[str, int] = {}
    skipped: dict[str, tuple[int, str]] = {}
    unread: Counter[str] = Counter()
    last: Position | None = None
    n_tokens = 0
    shards: dict[SplitName, _ShardWriter] = {}
    with contextlib.ExitStack() as closing:
        for item in items:
            last = item.position
            if isinstance(item, Skipped):
                n_skipped, first = skipped.get(item.reason, (0, item.where))
                skipped[item.reason] = (n_skipped + 1, first)
                continue
            # A shard is opened by the first document that it gets.
            unread.update(item.unread)
            split: SplitName = "val" if is_val(item, n_before + n_tokens) else "train"
            if split not in shards:
                shards[split] = _ShardWriter(directory / f"{split}.bin", header, closing)
            set_number = set_names.setdefault(item.set_name, len(set_names))
            shards[split].add(item, inputs[last.input], set_number)
            n_tokens += item.ids.size
            if n_tokens >= plan.shard_tokens:
                break
        # The span's own file comes last: it says that the shards are complete.
        splits = {split: shard.finish() for split, shard in shards.items()}
    span = Span(
        last=last,
        is_last=n_tokens < plan.shard_tokens,
        set_names=list(set_names),
        splits=splits,
        skipped=skipped,
        unread=unread,
    )
    write_json(directory / SPAN, span.model_dump(mode="json"))
    return span


class _ShardWriter:
    """Writes a new shard and its index."""

    def __init__(self, path: Path, header: bytes, closing: contextlib.ExitStack) -> None:
        """`header`: of the index. `closing` closes the files."""
        self.ids = closing.enter_context(open(path, "xb"))  # noqa: SIM115
        self.index = closing.enter_context(open(path.with_suffix(".idx"), "xb"))  # noqa: SIM115
        self.index.write(header)
        self.end = 0
        self.sets: dict[str, Counter[str]] = defaultdict(Counter)
        """What Counts has, for each set."""

    def add(self, item: Encoded, input_number: int, set_number: int) -> None:
        """Add a document."""
        self.end += item.ids.size
        self.sets[item.set_name].update(
            tokens=item.ids.size, documents=1, utf8_bytes=item.utf8_bytes
        )
        self.ids.write(item.ids.tobytes())
        record = np.array((self.end, input_number, item.position.number, set_number), RECORD)
        self.index.write(record.tobytes())

    def finish(self) -> Split:
        """Sync the files to the disk, and return what they hold."""
        for file in (self.ids, self.index):
            file.flush()
            os.fsync(file.fileno())
        shard = Shard(
            file=os.path.basename(self.ids.name),
            tokens=self.end,
            documents=sum(amounts["documents"] for amounts in self.sets.values()),
            sha256=sha256_file(Path(self.ids.name)),
            index_sha256=sha256_file(Path(self.index.name)),
            sets=[],
        )
        sets = {name: Counts(**amounts) for name, amounts in self.sets.items()}
        return Split(sets=sets, shards=[shard])
