"""Spans: the shards of a dataset, each written once; `finish` renames them.

    out_dir.partial/
        plan.json                       what the dataset is made of; every task has the same plan
        tokenizer.json
        task-00003.lock                 held while the task with this task_index runs
        finish.lock                     held while the dataset is put together
        span-00012-00003/               train.bin train.idx val.bin val.idx span.json; an empty split has no files
        span-00012-00004.HOST-PID.tmp/  a span that is being written

A group is a sequence of whole input files. It ends with the file that brings it to 1 GiB on the disk.
A span is a sequence of documents of a group. It ends with the document that brings its tokens (of both splits together)
to shard_tokens, or with its group. span-00012-00003 is span 3 of group 12.

The bytes of a span depend on the plan alone. A span gets its final name when all of it is on the disk, so a stopped run
loses at most the span that it was writing, and the next run continues after the last complete span.
"""

import contextlib
import errno
import hashlib
import itertools
import math
import os
import re
import shutil
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path

import numpy as np

from common.console import count
from common.files import make_directory, owned, read_json, sync_directory, write_json
from common.settings import JsonDict, Settings, UserError, decode, differences
from data.prepare.encode import Encoded, Item, Skipped
from data.prepare.files import some_of
from data.prepare.items import Position
from data.shards import (
    MAX_SETS,
    RECORD,
    TOKENIZER,
    Counts,
    Shard,
    Split,
    SplitName,
    TokenizerId,
    index_header,
)
from data.tokenizer import Tokenizer, save_tokenizer

PLAN, SPAN = "plan.json", "span.json"
_OWN = re.compile(
    r"(plan|tokenizer)\.json|(task-\d+|finish)\.lock|span-.*|dataset|.*\.tmp"
)  # names in out_dir.partial
_RANKS = "sha256 of the tokenizer's ranks"
_GROUP_BYTES = 2**30
_SMALL = 4096  # so many documents by chance have a fair split: at least 20 are expected to be for validation
_FAIR = 0.25  # how far from val_fraction the share of a small corpus may be, as a part of it
_SHORTEST_PIECE, _LONGEST_PIECE = 256, 16_384  # characters
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Unfair(Exception):
    """Documents must be cut into pieces of about `piece` characters for a fair split."""

    def __init__(self, piece: int) -> None:
        self.piece = piece


class Plan(Settings):
    """The settings and inputs of a dataset. All bytes written depend on them alone."""

    prepared: JsonDict
    """The settings that decide what the dataset holds, and its input files with their sizes."""
    tokenizer: TokenizerId
    piece: int | None = None
    """About how many characters long documents are cut into; None: not cut. In pieces, the whole input is one span."""

    @property
    def val_tokens(self) -> int:
        """Documents of group 0 that start before this token are for validation; 0: a hash of the text decides."""
        return self.prepared.get("val_tokens", 0)

    def groups(self) -> list[list[str]]:
        """Return the names of the inputs of each group."""
        groups: list[list[str]] = [[]]
        size = 0
        for name, n_bytes in self.prepared["input"].items():
            if size >= _GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += n_bytes or 0
        return groups

    def changes(self, now: "Plan") -> str:
        """Describe what differs, after "made" in a message; empty if nothing does."""
        before, after = ({**plan.prepared, _RANKS: plan.tokenizer.sha256} for plan in (self, now))
        different = differences(before, after)
        if {"data.name", "data.path"} & different.keys():
            data = before["data"]
            return f"from data={data['name']}" + (
                f" data.path={data['path']}" if "path" in data else ""
            )
        files = [key.removeprefix("input.") for key in different if key.startswith("input.")]
        settings = [
            f"{key}={there!r} (now {here!r})"
            for key, (there, here) in different.items()
            if "input." not in key
        ]
        which = (
            f"before {count(len(files), 'input file')} changed, such as {files[0]}" if files else ""
        )
        return " and ".join(filter(None, [f"with {some_of(settings)}" if settings else "", which]))


class Span(Settings):
    """What span.json says."""

    last: Position | None
    """Where its last item stands in the input; the next span begins after it. None: it has no items."""
    is_last: bool
    """Whether its group ends with it."""
    set_names: list[str]
    """The names of the sets that its indexes have numbers of."""
    splits: dict[SplitName, Split]
    """Those with documents, each with one shard."""
    skipped: dict[str, tuple[int, str]]
    """Skipped items by reason: their number, and the place of the first."""

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return sum(split.total.tokens for split in self.splits.values())


def damaged(folder: Path, error: object) -> UserError:
    """Build the error for a folder of spans that cannot be used any more."""
    return UserError(
        f"{folder} is damaged: delete it and run the command that made it again ({error})"
    )


def partial_dir(out_dir: Path) -> Path:
    """Return where a dataset is written before it is whole."""
    out_dir = out_dir.resolve()
    return out_dir.with_name(out_dir.name + ".partial")


def _mine(path: Path) -> Path:
    """Return a temporary name for `path` that no other process uses."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


@contextlib.contextmanager
def writing(folder: Path, task_index: int) -> Iterator[None]:
    """Create `folder` if need be and hold the lock of a task. Remove the folder if it then has no spans.

    Raises:
        UserError: the folder is another's, another process holds the lock, or the disk is full.
    """
    if foreign := [path.name for path in folder.glob("[!.]*") if not _OWN.fullmatch(path.name)]:
        raise UserError(
            f"{folder}, where this dataset would be written, holds {foreign[0]}: rename that folder"
        )
    make_directory(folder, "out_dir")
    taken = f"{folder} is being written by another process with task_index={task_index}: wait until it is done"
    with owned(folder / f"task-{task_index:05}.lock", lambda: taken):
        try:
            _remove_abandoned(folder)
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            remedy = "free some space on its disk, then repeat the command: it continues from what is written"
            raise UserError(
                f"{folder} cannot be written ({os.strerror(error.errno)}): {remedy}"
            ) from None
        finally:
            if not any(folder.glob("span-*")) and len([*folder.glob("task-*.lock")]) <= 1:
                remove(folder)


def _remove_abandoned(folder: Path) -> None:
    """Remove the spans that killed processes of this machine were writing."""
    for path in folder.glob(f"span-*.{socket.gethostname()}-*.tmp"):
        try:
            os.kill(int(path.suffixes[-2].rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(path)
        except PermissionError:  # it runs, as another user
            pass


def remove(folder: Path) -> None:
    """Remove a folder of spans, the plan first: without a plan, leftovers of a kill are ignored."""
    (folder / PLAN).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def begin(folder: Path, plan: Plan, tokenizer: Tokenizer) -> Plan:
    """Start writing spans into `folder`, or check that its spans have the same plan; return the plan in use.

    Raises:
        UserError: the plan differs or is damaged.
    """
    make_directory(folder, "out_dir")
    here = [path for path in folder.iterdir() if path.is_dir()]
    if not (folder / PLAN).exists():  # so what was here before belongs to no plan
        for path in here:
            shutil.rmtree(path)
        write_json(mine := _mine(folder / PLAN), plan.model_dump(mode="json"))
        try:
            os.link(mine, folder / PLAN)
        except FileExistsError:  # another task was first
            pass
        except OSError:  # a file system without links
            os.replace(mine, folder / PLAN)
        mine.unlink(missing_ok=True)
        sync_directory(folder)
    try:
        begun = decode(Plan, read_json(folder / PLAN))
    except UserError as error:
        raise damaged(folder, error) from None
    if changes := begun.changes(plan):
        raise UserError(
            f"{folder} was started {changes}: use the same again, or delete it to start over"
        )
    save_tokenizer(
        tokenizer, mine := _mine(folder / TOKENIZER)
    )  # equal to the plan's: others may read it meanwhile
    os.replace(mine, folder / TOKENIZER)
    return begun


def span_dir(folder: Path, group: int, number: int) -> Path:
    """Return the folder of a group's span with this number."""
    return folder / f"span-{group:05}-{number:05}"


def read_spans(folder: Path, group: int) -> list[Span]:
    """Read the existing spans of a group, from the first.

    Raises:
        UserError: one is damaged.
    """
    spans: list[Span] = []
    while not is_whole(spans) and (path := span_dir(folder, group, len(spans)) / SPAN).exists():
        try:
            spans.append(decode(Span, read_json(path)))
        except UserError as error:
            raise damaged(folder, error) from None
    return spans


def is_whole(spans: list[Span]) -> bool:
    """Whether these spans are their whole group."""
    return bool(spans) and spans[-1].is_last


def write_group(
    folder: Path, plan: Plan, group: int, spans: list[Span], items: Iterator[Item]
) -> None:
    """Write what follows the first `spans` of a group: the spans of `items`.

    Raises:
        Unfair: the corpus is small, and its documents are too long for a fair split.
        UserError: a span has too many sets.
    """
    by_place: Iterator[list[Item]] = (
        list(same) for _, same in itertools.groupby(items, lambda item: item.position)
    )
    chosen: set[float] | None = None
    if not spans and len(plan.groups()) == 1 and "val_fraction" in plan.prepared:
        start = list(_start(plan, by_place))
        if (rest := next(by_place, None)) is None:
            chosen = _fair(
                plan, [item for same in start for item in same if isinstance(item, Encoded)]
            )
        by_place = itertools.chain(start, [rest] if rest else [], by_place)
    while not is_whole(spans):
        target = span_dir(folder, group, len(spans))
        shutil.rmtree(directory := _mine(target), ignore_errors=True)
        directory.mkdir()
        try:
            before = (
                plan.val_tokens if group else sum(span.tokens for span in spans)
            )  # group 0 has at least so many
            span = _write_span(directory, plan, by_place, before, chosen)
            try:
                os.rename(directory, target)
            except OSError:
                if not (target / SPAN).exists():
                    raise
        finally:  # after an error, or if another process has written the same span
            shutil.rmtree(directory, ignore_errors=True)
        sync_directory(folder)
        spans = [*spans, span]


def _start(plan: Plan, by_place: Iterator[list[Item]]) -> Iterator[list[Item]]:
    """Yield what a small corpus may have: one span of few documents. Pieces are all in one span."""
    tokens, most = 0, plan.prepared["shard_tokens"]
    for number, same in enumerate(by_place, start=1):
        tokens += sum(item.ids.size for item in same if isinstance(item, Encoded))
        yield same
        if not plan.piece and (number == _SMALL or tokens >= most):
            break


def _fair(plan: Plan, documents: list[Encoded]) -> set[float]:
    """Return the places of the documents of a small corpus that are for validation.

    They are those below val_fraction, if their share of the tokens is near it. Else each, in the order of places, that
    brings the share nearer, and not too far above.

    Raises:
        Unfair: this is not near either, and shorter pieces can be.
    """
    sizes: Counter[float] = Counter()
    for item in documents:
        sizes[item.place] += item.ids.size
    fraction, total = plan.prepared["val_fraction"], sizes.total()
    smaller = min(fraction, 1 - fraction)
    target, off = fraction * total, _FAIR * smaller * total
    lengths = [item.utf8_bytes or item.ids.size for item in documents]
    wanted = int(smaller * sum(lengths))
    chosen = {place for place in sizes if place < fraction}
    if not wanted or abs(sum(sizes[place] for place in chosen) - target) <= off:
        return chosen
    chosen, tokens = set(), 0
    for place, size in sorted(sizes.items())[:-1]:  # the last is for training in any case
        if tokens + max(size / 2, size - off) <= target or (plan.piece and not chosen):
            chosen.add(place)
            tokens += size
    piece = min(max(wanted // 4, _SHORTEST_PIECE), _LONGEST_PIECE)
    if (
        abs(tokens - target) > off
        and max(lengths) > piece
        and not plan.piece
        and not plan.tokenizer.markers
    ):
        raise Unfair(piece)
    return chosen or {*sorted(sizes)[:-1][:1]}


def _write_span(
    directory: Path, plan: Plan, items: Iterator[list[Item]], before: int, chosen: set[float] | None
) -> Span:
    """Write the next documents into an empty folder, synced to the disk.

    Args:
        items: those of each position, which stay together.
        before: tokens of the input before them.
        chosen: places of the documents for validation; None: those below val_fraction, or the first val_tokens.
    """
    header, most = (
        index_header(plan.tokenizer.n_vocab),
        math.inf if plan.piece else plan.prepared["shard_tokens"],
    )
    val_inputs, below = (
        set(plan.prepared.get("val_inputs", ())),
        plan.prepared.get("val_fraction", 0.0),
    )
    inputs = {name: number for number, name in enumerate(plan.prepared["input"])}
    set_names: dict[str, int] = {}
    skipped: dict[str, tuple[int, str]] = {}
    last: Position | None = None
    tokens = 0
    shards: dict[SplitName, _Shard] = {}
    with contextlib.ExitStack() as closing:
        for same in items:
            for item in same:
                last = item.position
                if isinstance(item, Skipped):
                    so_far, first = skipped.get(item.reason, (0, item.where))
                    skipped[item.reason] = so_far + 1, first
                    continue
                is_val = (
                    before + tokens < plan.val_tokens if plan.val_tokens else item.place < below
                )
                if chosen is not None:
                    is_val = item.place in chosen
                split: SplitName = "val" if is_val or last.input in val_inputs else "train"
                if split not in shards:
                    paths = directory / f"{split}.bin", directory / f"{split}.idx"
                    shards[split] = _Shard(
                        [closing.enter_context(open(path, "xb")) for path in paths], header
                    )
                shards[split].add(item, inputs[last.input], number_of(item.set_name, set_names))
                tokens += item.ids.size
            if tokens >= most:
                break
        splits = {split: shard.finish() for split, shard in shards.items()}
    span = Span(
        last=last, is_last=tokens < most, set_names=list(set_names), splits=splits, skipped=skipped
    )
    write_json(directory / SPAN, span.model_dump(mode="json"))
    return span


def number_of(set_name: str, set_names: dict[str, int]) -> int:
    """Return the number of a set, which a new name gets here.

    Raises:
        UserError: there are too many.
    """
    if (number := set_names.setdefault(set_name, len(set_names))) == MAX_SETS:
        raise UserError(f"{set_name!r} is one more than the {MAX_SETS:,} sets a dataset can hold")
    return number


class _Shard:
    """A shard and its index that are being written."""

    def __init__(self, files: list[BufferedWriter], header: bytes) -> None:
        self.files, self.sums = files, [hashlib.sha256(), hashlib.sha256()]
        self.end = self.documents = 0
        self.sets: dict[str, Counter[str]] = defaultdict(Counter)
        """What Counts has, for each set."""
        self._write(b"", header)

    def add(self, item: Encoded, input_number: int, set_number: int) -> None:
        """Add a document."""
        self.end, self.documents = self.end + item.ids.size, self.documents + 1
        self.sets[item.set_name].update(
            tokens=item.ids.size, documents=1, utf8_bytes=item.utf8_bytes
        )
        record = np.array((self.end, input_number, item.position.number, set_number), RECORD)
        self._write(item.ids.tobytes(), record.tobytes())

    def finish(self) -> Split:
        """Sync the files to the disk, and return what they hold."""
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        name = os.path.basename(self.files[0].name)
        of_ids, of_index = (one.hexdigest() for one in self.sums)
        shard = Shard(
            file=name,
            tokens=self.end,
            documents=self.documents,
            sha256=of_ids,
            index_sha256=of_index,
            sets=[],  # known when spans are joined
        )
        sets = {of: Counts(**amounts) for of, amounts in self.sets.items()}
        return Split(sets=sets, shards=[shard])

    def _write(self, *contents: bytes) -> None:
        for file, so_far, content in zip(self.files, self.sums, contents, strict=True):
            file.write(content)
            so_far.update(content)
