"""Exact deduplication in bounded memory: the digests of all documents so far, in a database on the disk."""

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.settings import UserError

DATABASE = "dedup.sqlite"
DIGESTS = "digests.bin"
DIGEST_BYTES = 16

_CACHE_KIB = 64 * 1024
_SHA256_BYTES = 32
_ROWS = 65_536


class SeenDigests:
    """Which texts have been seen, a context manager.

    A run that goes on after being killed sees some documents a second time. As documents come in the same order each
    time, an entry of a document's own number is that document, and one of a lower number makes it a duplicate.
    """

    def __init__(self, directory: Path, documents: int) -> None:
        """Open the database in `directory`, which holds at least the first `documents` documents.

        Raises:
            UserError: it is missing or damaged.
        """
        self._directory, path = directory, directory / DATABASE
        if documents and not path.is_file():
            raise UserError(f"{path} is missing")
        self._database = sqlite3.connect(path)
        try:
            self._database.execute("PRAGMA locking_mode=EXCLUSIVE")  # needs no shared memory: works on any file system
            self._database.execute("PRAGMA synchronous=FULL")  # what is committed survives a power cut
            self._database.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            self._database.execute("CREATE TABLE IF NOT EXISTS seen (number INTEGER PRIMARY KEY, digest BLOB UNIQUE)")
        except sqlite3.DatabaseError as error:
            self._database.close()
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise UserError(f"{path}: {error}") from None

    def __enter__(self) -> "SeenDigests":
        return self

    def __exit__(self, *exception: object) -> None:
        self._database.close()

    def is_duplicate(self, digest: bytes, number: int) -> bool:
        """Whether a document before this one, the `number`-th of all, has the same text; remembers it if not.

        Raises:
            UserError: the database remembers another document of that number: the input is not what it was.
        """
        if self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (number, digest)).rowcount:
            return False
        found = self._database.execute("SELECT number FROM seen WHERE digest = ?", (digest,)).fetchone()
        if found is None or found[0] > number:
            raise UserError(
                f"document {number:,} is not what it was before the restart: delete {self._directory} to start again"
            )
        return found[0] < number

    def commit(self) -> None:
        """Bring everything that was remembered to the disk."""
        self._database.commit()

    def save(self, path: Path) -> None:
        """Write the digests of all documents that are no duplicates, in order, followed by the sha256 of them all."""
        sha256 = hashlib.sha256()
        with open(path, "wb") as file:
            for block in self._blocks():
                file.write(block)
                sha256.update(block)
            file.write(sha256.digest())

    def _blocks(self) -> Iterator[bytes]:
        rows = self._database.execute("SELECT digest FROM seen ORDER BY number")
        while block := rows.fetchmany(_ROWS):
            yield b"".join(digest for (digest,) in block)


def read_digests(path: Path, documents: int) -> np.ndarray:
    """The digests that `SeenDigests.save` wrote, uint8 (documents, 16), read where they are used.

    Raises:
        UserError: the file is missing or damaged.
    """
    size = documents * DIGEST_BYTES
    if not path.is_file() or path.stat().st_size != size + _SHA256_BYTES:
        raise UserError(f"{path} is missing or of the wrong size: prepare this part again")
    content = np.memmap(path, np.uint8, "r")
    if hashlib.sha256(content[:size].data).digest() != content[size:].tobytes():
        raise UserError(f"{path} is damaged, its sha256 is not the one at its end: prepare this part again")
    return content[:size].reshape(documents, DIGEST_BYTES)
