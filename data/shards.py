"""The dataset directory: shards of token ids, and a manifest that counts and checksums them.

manifest.json               what follows, as JSON
tokenizer.json              the tokenizer that made the ids
train-00000.bin ...         token ids, little-endian, 2 bytes each (4 if n_vocab needs it); every document is ended
val-00000.bin ...           by <|endoftext|>, the highest id. A document never spans two shards
"""

import bisect
import hashlib
import itertools
import os
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from common.files import read_json, write_json
from common.settings import Settings, UserError, decode

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

SplitName = Literal["train", "val"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


class _Strict(Settings):
    """A manifest may come from anywhere: no text is taken for a number."""

    model_config = ConfigDict(strict=True)


class Counts(_Strict):
    """How much text."""

    tokens: Count
    """<|endoftext|> included."""
    documents: Count
    utf8_bytes: Count


class Shard(_Strict):
    """One file of token ids."""

    file: str
    tokens: Count
    documents: Count
    sha256: Sha256


class Split(_Strict):
    """The training or the validation part."""

    sets: dict[str, Counts]
    shards: list[Shard]

    @property
    def total(self) -> Counts:
        """All sets together."""
        sets = self.sets.values()
        return Counts(**{name: sum(getattr(counts, name) for counts in sets) for name in Counts.model_fields})


class TokenizerId(_Strict):
    """Which tokenizer made the ids."""

    name: str
    n_vocab: Annotated[int, Field(ge=2, le=2**32)]
    sha256: Sha256
    """Of its ranks, as in `Tokenizer.sha256`."""

    @property
    def eot_id(self) -> int:
        """The id of <|endoftext|>, always the last."""
        return self.n_vocab - 1


class Manifest(_Strict):
    """What a dataset directory holds."""

    format_version: Literal[1]
    tokenizer: TokenizerId
    splits: Annotated[dict[SplitName, Split], Field(min_length=2)]
    skipped: dict[str, Count]
    """Documents that could not be read, by reason."""
    prepared: dict[str, Any]
    """The settings it was made with."""

    @model_validator(mode="after")
    def _check_shards(self) -> "Manifest":
        for name, split in self.splits.items():
            for i, shard in enumerate(split.shards):
                if shard.file != shard_file(name, i):
                    raise ValueError(f"shard {i} of {name} is {shard.file!r}, must be {shard_file(name, i)!r}")
            counted = split.total
            for unit in ("tokens", "documents"):
                if (in_shards := sum(getattr(shard, unit) for shard in split.shards)) != getattr(counted, unit):
                    raise ValueError(
                        f"{unit} of {name}: {getattr(counted, unit)} in its sets, {in_shards} in its shards"
                    )
        return self

    @property
    def dtype(self) -> np.dtype:
        """Of the token ids in the shards."""
        return token_dtype(self.tokenizer.n_vocab)

    @property
    def fingerprint(self) -> str:
        """One hex digest for tokenizer and tokens: equal exactly if a run may go on with this dataset."""
        sums = [f"{name} {shard.sha256}" for name in sorted(self.splits) for shard in self.splits[name].shards]
        return hashlib.sha256("\n".join([self.tokenizer.sha256, *sums]).encode()).hexdigest()


def shard_file(split: SplitName, number: int) -> str:
    """File name of a split's shard."""
    return f"{split}-{number:05}.bin"


def token_dtype(n_vocab: int) -> np.dtype:
    """The smallest little-endian type that holds every id."""
    return np.dtype("<u2" if n_vocab <= 2**16 else "<u4")


def write_manifest(dataset_dir: Path, manifest: Manifest) -> None:
    """Write it where `read_manifest` finds it."""
    write_json(dataset_dir / MANIFEST, manifest.model_dump(mode="json"))


def read_manifest(dataset_dir: Path) -> Manifest:
    """Read a dataset's manifest and check that every shard is there and has its size.

    Raises:
        UserError: there is no dataset, it is damaged (with the file's name), or of another format version.
    """
    path = dataset_dir / MANIFEST
    if not path.is_file():
        raise UserError(
            f"dataset_dir={dataset_dir} does not exist or has no {MANIFEST}: "
            f"make it with python scripts/prepare_data.py data=... out_dir={dataset_dir}"
        )
    raw = read_json(path)
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version!r}, this program reads {FORMAT_VERSION}: prepare it again")
    try:
        manifest = decode(Manifest, raw)
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    for split in manifest.splits.values():
        for shard in split.shards:
            _check_size(dataset_dir / shard.file, shard.tokens * manifest.dtype.itemsize)
    return manifest


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        found = "is missing" if size is None else f"has {size} bytes"
        raise UserError(f"{path} {found}, the manifest says {expected} bytes: prepare the dataset again")


class ShardWriter:
    """Writes one split's shards, a context manager. A shard is full with the document that reaches `shard_tokens`."""

    def __init__(self, directory: Path, split: SplitName, n_vocab: int, shard_tokens: int) -> None:
        self.directory, self.split, self.shard_tokens = directory, split, shard_tokens
        self.dtype = token_dtype(n_vocab)
        self._shards: list[Shard] = []
        self._sets: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))  # tokens, documents, bytes
        self._file: Any = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, ids: np.ndarray, set_name: str, utf8_bytes: int) -> None:
        """Add one document: its ids (n,) with <|endoftext|> at the end, and the size of its text."""
        if self._file is None:
            self._file = open(self.directory / shard_file(self.split, len(self._shards)), "wb")  # noqa: SIM115
            self._sha256, self._tokens, self._documents = hashlib.sha256(), 0, 0
        content = ids.astype(self.dtype, copy=False).tobytes()
        self._file.write(content)
        self._sha256.update(content)
        self._tokens += ids.size
        self._documents += 1
        self._sets[set_name] += (ids.size, 1, utf8_bytes)
        if self._tokens >= self.shard_tokens:
            self._close_shard()

    def finish(self) -> Split:
        """Close the last shard and give the split's part of the manifest, its sets by name."""
        if self._file is not None:
            self._close_shard()
        counted = {name: [int(n) for n in self._sets[name]] for name in sorted(self._sets)}
        sets = {name: Counts(tokens=n[0], documents=n[1], utf8_bytes=n[2]) for name, n in counted.items()}
        return Split(sets=sets, shards=self._shards)

    def _close_shard(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        shard = Shard(
            file=shard_file(self.split, len(self._shards)),
            tokens=self._tokens,
            documents=self._documents,
            sha256=self._sha256.hexdigest(),
        )
        self._shards.append(shard)


class TokenStream:
    """A split's token ids as one long row, read from its shards in order.

    Every read opens, reads and closes its file: nothing stays mapped or open over a long run.
    """

    def __init__(self, dataset_dir: Path, manifest: Manifest, split: SplitName) -> None:
        shards = manifest.splits[split].shards
        self.split = split
        self.dtype = manifest.dtype
        self.eot_id = manifest.tokenizer.eot_id
        self.n_vocab = manifest.tokenizer.n_vocab
        self._paths = [dataset_dir / shard.file for shard in shards]
        self._ends = list(itertools.accumulate(shard.tokens for shard in shards))
        self.n_tokens = self._ends[-1] if shards else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as int64 (stop - start,).

        Raises:
            UserError: a shard ends before its manifest says, or holds what is no token id.
        """
        assert 0 <= start <= stop <= self.n_tokens, (start, stop, self.n_tokens)
        parts = [np.empty(0, np.int64)]
        shard = bisect.bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[shard - 1] if shard else 0
            count = min(stop, self._ends[shard]) - start
            part = np.fromfile(self._paths[shard], self.dtype, count, offset=(start - begin) * self.dtype.itemsize)
            if part.size < count:
                raise UserError(f"{self._paths[shard]} is shorter than its manifest says: prepare the dataset again")
            if part.size and int(part.max()) >= self.n_vocab:
                raise UserError(
                    f"{self._paths[shard]} holds ids that its tokenizer does not have: prepare the data again"
                )
            parts.append(part.astype(np.int64))
            start, shard = start + count, shard + 1
        return np.concatenate(parts)
