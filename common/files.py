"""Files that are whole or absent: atomic writes, checksums, JSON without surprises."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from common.settings import UserError


def sha256_file(path: Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames and new names inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content`, whole: readers and crashes see the old file or the new one, never a part."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically. NaN and infinity are refused: they are not JSON."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: it is missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def make_directory(path: Path, key: str) -> Path:
    """Create `path` (with its parents) and check that it can be written to; `key` names the setting in the error."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}={path} cannot be created ({error.strerror}): choose another folder") from None
    if not os.access(path, os.W_OK):
        raise UserError(f"{key}={path} is not writable: choose another folder")
    return path
