"""Tensors from an untrusted safetensors file: it holds exactly what is expected, or it is refused.

safetensors itself refuses headers that do not fit the file. It maps tensors without reading them, so that their shapes
and types can be checked first. Links, pipes, and headers far longer than needed are refused here.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.files import open_file
from common.settings import UserError

Expected = Mapping[str, tuple[torch.Size, Collection[torch.dtype]]]
"""Tensors by name: the shape, and the allowed types."""

_LONGEST_HEADER = 2**24


def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as a safetensors file that may be read by whoever may read the user's other new files."""
    path.touch()  # with the mode that the umask gives; safetensors' own files are for their owner alone
    mode = path.stat().st_mode
    safetensors.torch.save_file(tensors, path, metadata)
    path.chmod(mode)


def read_tensors(path: Path, expected: Expected) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        UserError: the file is missing, damaged or of another format, or a tensor is missing, unknown, or has another
            shape or type. The message names the file and the tensor.
    """
    wrong = f"{path} does not hold the tensors it should: "
    with _opened(path) as file:
        names = set(file.keys())
        if missing := sorted(expected.keys() - names):
            raise UserError(f"{wrong}{_listed(missing)} missing")
        if unknown := sorted(names - expected.keys()):
            raise UserError(f"{wrong}{_listed(unknown)} unknown")
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in expected}
    for name, (shape, dtypes) in expected.items():
        found = tensors[name]
        if found.shape != shape:
            raise UserError(f"{wrong}{name} has the shape {list(found.shape)}, must have {list(shape)}")
        if found.dtype not in dtypes:
            allowed = " or ".join(sorted(_short(dtype) for dtype in dtypes))
            raise UserError(f"{wrong}{name} has the type {_short(found.dtype)}, must have {allowed}")
    return tensors


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file, without reading them.

    Raises:
        UserError: the file is missing, damaged or of another format.
    """
    with _opened(path) as file:
        return list(file.keys())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """Open a safetensors file, and turn every error about it into a UserError."""
    try:
        with open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"its header should have at most {_LONGEST_HEADER:,} bytes, not {length:,}")
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a whole safetensors file: {' '.join(str(error).split())[:200]}") from None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    return f"{names[0][:80]!r} and {len(names) - 1} more are" if len(names) > 1 else f"{names[0][:80]!r} is"
