"""Tensors from a safetensors file that may come from a stranger: it holds exactly what is expected, or is refused."""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.files import file_size, open_file, parse_json
from common.settings import UserError

Expected = Mapping[str, tuple[torch.Size, Collection[torch.dtype]]]
"""Tensors by name: the shape, and the types that it may have."""

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Types by their names in a file; those that no model, optimizer or generator has are left out."""

_LONGEST_HEADER = 2**24


def read_tensors(path: Path, expected: Expected) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Nothing of their size is mapped or read before its header is
    known to hold the expected names, shapes and types.

    Raises:
        UserError: the file is missing, damaged or of another format, or a tensor is missing, unknown, or of another
            shape or type; with the name of the file, and of the tensor.
    """
    with _one_line(path):
        _check_header(path, expected)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in expected}


def tensor_names(path: Path) -> list[str]:
    """What the tensors of a safetensors file are called, before any of them is read.

    Raises:
        UserError: the file is missing, damaged or of another format.
    """
    with _one_line(path):
        return list(_read_header(path, longest=_LONGEST_HEADER)[1])


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Say what is wrong with a file in the one line of a UserError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is not a whole safetensors file: {' '.join(str(error).split())[:200]}") from None


def _check_header(path: Path, expected: Expected) -> None:
    """A file is 8 bytes, the length of the header; the header, JSON; and the tensors without gaps between them."""
    longest = 2**16 + sum(512 + 6 * len(name) for name in expected)  # in JSON a character has 6 bytes at most, \u0041
    length, header = _read_header(path, longest)
    wrong = f"{path} does not hold the tensors it should: "
    if missing := sorted(expected.keys() - header.keys()):
        raise UserError(f"{wrong}{_listed(missing)} missing")
    if unknown := sorted(header.keys() - expected.keys()):
        raise UserError(f"{wrong}{_listed(unknown)} unknown")
    n_bytes = 0
    for name, (shape, dtypes) in expected.items():
        dtype = _dtype(name, header[name], shape, dtypes, wrong)
        n_bytes += math.prod(shape) * dtype.itemsize
    if (size := file_size(path)) != 8 + length + n_bytes:
        raise ValueError(f"it has {size} bytes, its header and tensors are {8 + length + n_bytes}")


def _read_header(path: Path, longest: int) -> tuple[int, dict[str, Any]]:
    """The length of the header in bytes, and what it says of each tensor."""
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > longest:
            raise ValueError(f"its header is said to have {length:,} bytes, the tensors need at most {longest:,}")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    return length, header


def _dtype(name: str, entry: Any, shape: torch.Size, dtypes: Collection[torch.dtype], wrong: str) -> torch.dtype:
    """The type of a tensor by its entry in the header, which has this shape and one of these types."""
    found = entry if isinstance(entry, dict) else {}
    if found.get("shape") != list(shape):
        given = repr(found.get("shape"))[:80]
        raise UserError(f"{wrong}{name} has the shape {given}, must have {list(shape)}")
    dtype = _DTYPES.get(str(found.get("dtype")))
    if dtype is None or dtype not in dtypes:
        allowed = " or ".join(sorted(_file_name(dtype) for dtype in dtypes))
        raise UserError(f"{wrong}{name} has the type {repr(found.get('dtype'))[:80]}, must have {allowed}")
    return dtype


def _file_name(dtype: torch.dtype) -> str:
    return next(name for name, named in _DTYPES.items() if named == dtype)


def _listed(names: list[str]) -> str:
    return f"{names[0][:80]!r} and {len(names) - 1} more are" if len(names) > 1 else f"{names[0][:80]!r} is"
