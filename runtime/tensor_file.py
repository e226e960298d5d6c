"""Tensors from an untrusted safetensors file: it holds exactly what is expected, or is refused.

safetensors itself refuses headers that do not fit the file. It maps tensors without reading them,
so that their shapes and types can be checked first. Links and pipes are refused here.
"""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.files import open_file
from common.settings import UserError

Expected = Mapping[str, tuple[torch.Size, Collection[torch.dtype]]]
"""Tensors by name: the shape, and the allowed types."""


def save_file(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file and to the disk.

    It may be read by whoever may read the user's other new files.

    Raises:
        OSError: it cannot be written.
    """
    # With the mode that the umask gives; safetensors' own files are for their owner alone.
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None
    path.chmod(mode)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def load_tensors(
    paths: Sequence[Path], expected: Expected, rows: Mapping[str, slice] | None = None
) -> dict[str, Tensor]:
    """The tensors of safetensors files, each of which has some of them, on the CPU.

    Args:
        rows: what to read of some tensors; the others are read whole.

    Raises:
        UserError: a file is missing, damaged or of another format, or a tensor is missing, unknown,
            or has another shape or type. The message names the first file and the tensor.
    """
    wrong = f"{paths[0]} does not hold the tensors it should: "
    rows = rows or {}
    stored: dict[str, Tensor] = {}
    for path in paths:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                stored[name] = file.get_tensor(name)  # mapped: nothing is read yet
    # The names must be the expected ones.
    odd = sorted(expected.keys() ^ stored.keys())
    if odd:
        problem = "missing" if odd[0] in expected else "unknown"
        raise UserError(f"{wrong}{odd[0][:80]!r} is {problem}")
    # Shapes and types must be, before anything is read.
    tensors = {}
    for name, (shape, dtypes) in expected.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise UserError(
                f"{wrong}{name} has the shape {list(tensor.shape)}, must have {list(shape)}"
            )
        if tensor.dtype not in dtypes:
            allowed = " or ".join(sorted(map(_short, dtypes)))
            raise UserError(
                f"{wrong}{name} has the type {_short(tensor.dtype)}, must have {allowed}"
            )
        tensors[name] = tensor[rows[name]].clone() if name in rows else tensor
    return tensors


def read_header(path: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """The metadata of a safetensors file, and the shapes of its tensors, without reading these.

    Raises:
        UserError: the file is missing, damaged or of another format.
    """
    with _opened(path) as file:
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
        return file.metadata() or {}, shapes


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file, and turn every error about it into a UserError."""
    try:
        with open_file(path), safe_open(path, framework="pt") as tensors:
            yield tensors
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not a whole safetensors file: {reason}") from None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
