"""State files: the state of a model after a text, which is read once and continued many times.

The format is safetensors. The tensors are the fields of a `Prefix`, by their names (model/state.py), and `rest`: the
following tokens, which have not been read yet. The metadata hold the format version, the result of `_owner`, the number
of tokens read, and the sha256 of all this.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from common.console import say
from common.files import refuse_foreign, write_atomic
from common.settings import UserError
from inference.load import Loaded
from inference.prefill import Prefix, Request, read
from model.ops.ngrams import followers_in
from model.state import restored, select_rows, tensors_of
from trainer.tensor_file import Expected, read_header, read_tensors

_FORMAT = "log-gpt state 1"
_REST = "rest"


def check_place(path: Path) -> None:
    """Raise UserError if a state cannot be written there. A state may be overwritten, and no other file."""
    refuse_foreign(_FORMAT.encode(), path)
    if not path.parent.is_dir():
        raise UserError(f"state_out={path} cannot be written: there is no folder {path.parent}")


def save_state(path: Path, request: Request, loaded: Loaded) -> None:
    """Write the state after the tokens of a request that have been read, and the tokens that have not.

    Raises:
        UserError: the file cannot be written.
    """
    tensors = {_REST: torch.tensor(request.ids, dtype=torch.int64)}
    for name, value in tensors_of(
        select_rows(request.before, [0])
    ).items():  # a copy, without the room behind a cache
        tensors[name] = value.cpu().contiguous()
    header = {"format": _FORMAT, **_owner(loaded), "tokens": str(request.n_before)}
    content = safetensors.torch.save(tensors, header | {"sha256": sum_of(tensors, header)})
    try:
        write_atomic(path, content)
    except OSError as error:
        raise UserError(f"state_out={path} cannot be written: {error.strerror or error}") from None
    say(
        f"the state after {request.n_prompt:,} tokens is written to {path} ({len(content):,} bytes)"
    )


def load_state(path: Path, loaded: Loaded) -> Request:
    """Read what `save_state` wrote, for the same model: a request that continues that text.

    Raises:
        UserError: the file is not a state, is damaged, or belongs to another model, tokenizer or dtype.
    """
    metadata, shapes = read_header(path)
    if metadata.get("format") != _FORMAT:
        raise UserError(f"state_in={path} is not a state: give a file that state_out= wrote")
    for key, expected in _owner(loaded).items():
        if (found := metadata.get(key, "none")) != expected:
            other = f"another {key} ({found[:12]}, not {expected[:12]}): use the same, or read the text again"
            raise UserError(f"state_in={path} was written with {other}")
    tokens = metadata.get("tokens", "")
    if not re.fullmatch(r"\d{1,14}", tokens):
        raise UserError(
            f"state_in={path} is damaged: tokens={tokens[:80]!r} in its header is not a count"
        )
    n_read, eot = int(tokens), torch.tensor([[loaded.tokenizer.eot_id]])
    like = read(loaded.gpt, eot, loaded.tokenizer.n_vocab)[0] if n_read else None
    stored = read_tensors([path], _expected(like, shapes))
    if sum_of(stored, metadata) != metadata.get("sha256"):
        raise UserError(f"state_in={path} is damaged: its sha256 is not the one in its header")
    _check_values(path, stored, n_read, loaded)
    rest = tuple(stored.pop(_REST).tolist())
    device = loaded.gpt.device  # copied, as the file may change
    before = tree_map_only(Tensor, lambda x: x.to(device, copy=True), restored(like, stored))
    return Request(rest, before=before, n_before=n_read)


def _owner(loaded: Loaded) -> dict[str, str]:
    """Identify the owner of a state: the model, the tokenizer's sha256, and the dtype of forward passes."""
    dtype = str(loaded.runtime.dtype).removeprefix("torch.")
    return {"model": loaded.identity, "tokenizer": loaded.tokenizer.sha256, "dtype": dtype}


def sum_of(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    """The sha256 of a state's tensors and header; the result is then stored in the header."""
    total = hashlib.sha256(json.dumps({**header, "sha256": ""}, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        total.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        total.update(value.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _expected(like: Prefix | None, shapes: Mapping[str, list[int]]) -> Expected:
    """Shapes and types of a state's tensors. A cache may have any number of columns, and `rest` any length."""
    rest = torch.Size(shapes.get(_REST, [])[:1] or [0])
    expected = {_REST: (rest, {torch.int64})}
    tensors = tensors_of(like)
    for name, value in tensors.items():
        shape, owner = list(value.shape), name.rpartition(".")[0]
        if len(shape) > 2 and f"{owner}.lengths" in tensors:  # of a cache
            shape[2:3] = shapes.get(f"{owner}.k", [])[2:3]
        expected[name] = torch.Size(shape), {value.dtype}
    return expected


def _check_values(path: Path, stored: Mapping[str, Tensor], n_read: int, loaded: Loaded) -> None:
    """Raise UserError unless all ids are valid, and counts and places fit a text of n_read tokens."""
    for name, x in stored.items():
        owner, _, part = name.rpartition(".")
        low, high = (
            n_read if loaded.gpt.eot_id is None else 1,
            n_read,
        )  # of documents, the last may be counted
        if name == _REST or owner.endswith(".ngrams"):
            x = followers_in(x) if part == "table" else x
            low, high = 0 if name == _REST else -1, loaded.tokenizer.n_vocab - 1
        elif part == "place":
            low, high = 0, int(stored[f"{owner}.lengths"])
        elif part == "k" and f"{owner}.place" not in stored:
            x = torch.tensor(x.shape[2])
            low = high = int(stored[f"{owner}.lengths"])
        elif x.dtype != torch.int64:
            continue
        if ((x < low) | (x > high)).any():
            raise UserError(f"state_in={path} is damaged: its token counts or ids are out of range")
