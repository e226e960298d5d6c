"""The dataset directory: shards of token ids, indexes of their documents, and a manifest.

manifest.json          what follows, as JSON: counts and checksums of everything
tokenizer.json         the tokenizer that made the ids
train-00000.bin ...    token ids, little-endian, 2 bytes each (4 if n_vocab needs it). Every
val-00000.bin ...      document is ended by <|endoftext|>, and lies in one shard
train-00000.idx ...    which documents these are: HEADER (32 bytes), then a RECORD (22 bytes) for
val-00000.idx ...      each, in order

data/prepare/spans.py writes shards, data/document_index.py finds documents in them, and
data/prepare/verify.py recomputes what the manifest says.
"""

import bisect
import functools
import hashlib
import itertools
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from common.files import file_size, read_json, sha256_file
from common.settings import JsonDict, UserError, decode
from data.tokenizers.chat import replace_untrained
from data.tokenizers.interface import Sha256, Strict, TokenizerId

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

HEADER = struct.Struct("<8sIIQQ")
"""The header of an index: magic, format version, bytes of an id in the .bin, n_vocab, 0."""
MAGIC = b"LOGGPTIX"
_INDEX_VERSION = 2
RECORD = np.dtype([("end", "<u8"), ("input", "<u4"), ("number", "<u8"), ("set", "<u2")])
"""A document.

end: its end in its shard, in tokens, <|endoftext|> included.
input: a number into the manifest's inputs.
number: its number in that input, from 1.
set: a number into `Shard.sets`.
"""
_VERSION = 3  # of the manifest


def _printable(name: str) -> str:
    if not name.isprintable():  # it is printed to terminals
        raise ValueError("a set's name must be printable")
    return name


_MOST = 2**48  # the largest count in a manifest, so that sums and sizes in bytes fit into int64

SplitName = Literal["train", "val"]
Count = Annotated[int, Field(ge=0, le=_MOST)]
PositiveCount = Annotated[int, Field(ge=1, le=_MOST)]
SetName = Annotated[str, Field(min_length=1), AfterValidator(_printable)]


class Counts(Strict):
    """An amount of text."""

    tokens: Count
    """<|endoftext|> included."""
    documents: Count
    utf8_bytes: Count


class Shard(Strict):
    """One file of token ids and the index of its documents."""

    file: str
    tokens: PositiveCount
    documents: PositiveCount
    sha256: Sha256
    index_sha256: Sha256
    sets: list[Count]
    """For each set number of the index, a number into the manifest's set_names."""

    @property
    def index_file(self) -> str:
        """The name of its index file."""
        return self.file.removesuffix(".bin") + ".idx"


class Split(Strict):
    """The training or the validation documents."""

    sets: dict[str, Counts]
    shards: list[Shard]

    @property
    def total(self) -> Counts:
        """Total over all sets."""
        return sum_counts(self.sets.values())

    @functools.cached_property
    def ends(self) -> list[int]:
        """Where each shard ends, in tokens of the split."""
        return list(itertools.accumulate(shard.tokens for shard in self.shards))


class Manifest(Strict):
    """The contents of a dataset directory."""

    format_version: Literal[3] = 3
    tokenizer: TokenizerId
    inputs: list[str]
    """The files or other sources that were read, in order."""
    set_names: Annotated[list[SetName], Field(max_length=2**16)]
    """The sets that documents are counted under, in the order of their first document."""
    splits: Annotated[dict[SplitName, Split], Field(min_length=2)]
    skipped: dict[str, Count]
    """How many documents were skipped, by reason."""
    prepared: JsonDict
    """The settings it was made with."""

    @model_validator(mode="after")
    def _check_shards(self) -> "Manifest":
        for name, split in self.splits.items():
            for i, shard in enumerate(split.shards):
                file = name_shard(name, i)
                if shard.file != file:
                    raise ValueError(f"shard {i} of {name} is {shard.file!r}, must be {file!r}")
        return self

    @property
    def dtype(self) -> np.dtype:
        """The type of the token ids in the shards."""
        return choose_dtype(self.tokenizer.n_vocab)

    def files_of(self, shard: Shard) -> list[tuple[str, int, str]]:
        """Return name, size in bytes and sha256 of the two files of a shard, the index last."""
        index_size = HEADER.size + shard.documents * RECORD.itemsize
        size = shard.tokens * self.dtype.itemsize
        return [
            (shard.file, size, shard.sha256),
            (shard.index_file, index_size, shard.index_sha256),
        ]

    @property
    def fingerprint(self) -> str:
        """A hex digest of tokenizer, tokens and sets. A run continues only on an equal dataset."""
        lines = [self.tokenizer.sha256, *self.set_names]
        for name, split in sorted(self.splits.items()):
            for shard in split.shards:
                lines.append(f"{name} {shard.sha256} {shard.index_sha256} {shard.sets}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def sum_counts(amounts: Iterable[Counts]) -> Counts:
    """Return the sum of amounts."""
    sums = Counter(tokens=0, documents=0, utf8_bytes=0)
    for counts in amounts:
        sums.update(dict(counts))
    return Counts.model_construct(None, **sums)  # unchecked: a sum may be above the largest count


def name_shard(split: SplitName, number: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{number:05}.bin"


def build_header(n_vocab: int) -> bytes:
    """Return the header of every index of a dataset."""
    return HEADER.pack(MAGIC, _INDEX_VERSION, choose_dtype(n_vocab).itemsize, n_vocab, 0)


def choose_dtype(n_vocab: int) -> np.dtype:
    """Return the smallest little-endian type that holds every id."""
    return np.dtype("<u2" if n_vocab <= 2**16 else "<u4")


def read_manifest(dataset_dir: Path) -> Manifest:
    """Read a dataset's manifest and check that every shard and index exists and has the right size.

    Raises:
        UserError: there is no dataset, a file is damaged, or the format version is another.
    """
    manifest = parse_manifest(dataset_dir)
    for split in manifest.splits.values():
        for shard in split.shards:
            for file, size, _ in manifest.files_of(shard):
                check_file(dataset_dir / file, size)
    return manifest


def parse_manifest(dataset_dir: Path) -> Manifest:
    """Read the manifest without looking at the shards.

    Raises:
        UserError: it is missing or damaged, or its format version is another.
    """
    path = dataset_dir / MANIFEST
    if file_size(path) is None:
        raise UserError(
            f"dataset_dir={dataset_dir} does not exist or has no {MANIFEST}: give the folder of a "
            "dataset, or make one, as in python scripts/prepare_data.py data=stdlib "
            f"tokenizer=bytes out_dir={dataset_dir}"
        )
    raw = read_json(path)
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != _VERSION:
        raise UserError(
            f"{path} has format version {repr(version)[:40]}, this program reads {_VERSION}: "
            "prepare it again"
        )
    try:
        return decode(Manifest, raw)
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def check_file(path: Path, size: int, sha256: str | None = None) -> None:
    """Check the size of a file in bytes, and its sha256 if given; raises UserError."""
    actual_size = file_size(path)
    if actual_size != size:
        state = "is missing" if actual_size is None else f"has {actual_size} bytes"
        raise UserError(
            f"{path} {state}, the manifest says {size} bytes: prepare the dataset again"
        )
    if sha256 is None:
        return
    actual_sha256 = sha256_file(path)
    if actual_sha256 != sha256:
        raise damage_error(path, f"its sha256 is {actual_sha256}, the manifest says {sha256}")


def damage_error(path: Path, why: str) -> UserError:
    """Build the error for a damaged file of a dataset."""
    return UserError(f"{path} is damaged: {why}: prepare the dataset again")


class TokenStream:
    """A split's token ids as one long array, read from its shards in order.

    Every read opens and closes its file: nothing stays mapped or open during a long run.
    """

    def __init__(self, dataset_dir: Path, manifest: Manifest, split: SplitName) -> None:
        """Open a split."""
        self.dataset_dir = dataset_dir
        self.manifest = manifest
        self.split = split
        self.eot_id = manifest.tokenizer.eot_id
        self.n_vocab = manifest.tokenizer.n_vocab
        self._shard_ends = manifest.splits[split].ends
        self.n_tokens = self._shard_ends[-1] if self._shard_ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) as models read them, int64 (stop - start,)."""
        ids = self.read_stored(start, stop)
        return replace_untrained(ids, self.n_vocab) if self.manifest.tokenizer.markers else ids

    def read_stored(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) as the shards hold them, with <|untrained|>.

        Raises:
            UserError: a shard is shorter than its manifest says, or holds invalid token ids.
        """
        dtype = self.manifest.dtype
        arrays = [np.empty(0, np.int64)]
        shard = bisect.bisect_right(self._shard_ends, start)
        while start < stop:
            # Read from one shard: to its end, or to `stop`.
            path = self.dataset_dir / name_shard(self.split, shard)
            shard_start = self._shard_ends[shard - 1] if shard else 0
            n = min(stop, self._shard_ends[shard]) - start
            ids = np.fromfile(path, dtype, n, offset=(start - shard_start) * dtype.itemsize)
            if ids.size < n:
                raise damage_error(path, "it is shorter than its manifest says")
            if int(ids.max()) >= self.n_vocab:
                raise damage_error(path, "it holds ids that its tokenizer does not have")
            arrays.append(ids.astype(np.int64))
            start += n
            shard += 1
        return np.concatenate(arrays)
