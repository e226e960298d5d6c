"""Vocabularies in a tokenizer.json, by Hugging Face's tokenizers, an optional library."""

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from common.console import say
from common.files import read_json
from common.settings import JsonDict, UserError
from data.tokenizers.interface import (
    END_OF_TEXT,
    LARGEST_FILE,
    Tokenizer,
    cut_text,
    map_bytes,
)

# The names that tokenizers give the end of a text.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
# Tokens of the usual patterns do not cross these places. A vocabulary whose tokens span words may
# get other ids there.
_CUTS = re.compile(r"(?<=[A-Za-z])(?:\n| (?=[A-Za-z]))")
# Every byte that UTF-8 has, spaces in all places, and what must be ordinary text.
_PROBE = "".join(
    [
        *map(chr, range(0x300)),
        *(chr(i << 12) for i in (*range(1, 17), 0x40, 0x80, 0xC0, 0x100)),
        *(f"  {name} a\n\n  b" for name in _ENDS),
    ]
)
_SPECIAL = {
    "special": True,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}
# Settings that cut texts, or add to them.
_LEFT_OUT = {"truncation": None, "padding": None, "post_processor": None}


class HFTokenizer(Tokenizer):
    """What a tokenizer.json describes."""

    name = "hf"

    def __init__(self, raw: JsonDict) -> None:
        """`raw`: the content of the file.

        Raises:
            UserError: the library does not read it, it has no end of text, or its ids do not spell
                every text.
        """
        # Leave out what cuts texts, adds to them, or makes ids random.
        raw = raw | _LEFT_OUT
        if isinstance(raw["model"], dict):
            raw["model"] = raw["model"] | {"dropout": None}
        self._raw = raw
        self._backend = _backend(raw)
        self._backend.encode_special_tokens = True  # as ordinary text
        self.tokens = _tokens(self._backend)
        eot_id = self._backend.token_to_id(_end(raw) or "")
        if eot_id is None:
            raise UserError(f"it has no {END_OF_TEXT}")
        self.eot_id = eot_id
        # Long texts are normalized in chunks: that must not change them.
        in_characters = "".join(map(self.normalized, "a b"))
        if self.normalized("a b") != in_characters:
            raise UserError(
                "its normalizer changes where a text begins or ends: give one without Strip and "
                "Prepend"
            )
        # Try a text of all bytes and special tokens: its ids must spell it.
        probe = _PROBE + "".join(f" a  {token['content']}  b" for token in raw["added_tokens"])
        try:
            ids = self.encode(probe)
        except Exception as error:  # the library has no class of its own
            raise UserError(f"it cannot encode every text ({error})") from None
        if self.eot_id in ids or self.decode_bytes(ids) != self.normalized(probe).encode():
            raise UserError(
                "its ids do not spell every text: give a byte-level BPE without add_prefix_space"
            )

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of the content; whitespace and the order of keys do not change it."""
        content = json.dumps(self._raw, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def saved(self) -> JsonDict:
        """The content of its file."""
        return self._raw

    def normalized(self, text: str) -> str:
        """Return the normalized text. Most tokenizers have no normalizer; some use NFC."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def encode_arrays(self, text: str) -> Iterator[np.ndarray]:
        """Yield the token ids of a text as consecutive arrays; <|endoftext|> is ordinary text."""
        for chunk in cut_text(text, _CUTS):
            (encoding,) = self._backend.encode_batch_fast([chunk], add_special_tokens=False)
            yield np.array(encoding.ids, np.uint32)


def read_hf_tokenizer(path: Path) -> HFTokenizer:
    """Read a tokenizer.json. If it has no end of text, one is added after its last id.

    Raises:
        UserError: it is missing, damaged, or not a byte-level BPE.
    """
    try:
        raw = read_json(path.resolve(), LARGEST_FILE)  # files in Hugging Face's cache are links
        n_ids = len(_tokens(_backend(raw)))
        if _end(raw) is None:
            end = {"id": n_ids, "content": END_OF_TEXT} | _SPECIAL
            raw["added_tokens"] = [*raw.get("added_tokens", []), end]
            say(f"{path} has no {END_OF_TEXT}: it is added as id {n_ids}")
        for token in raw["added_tokens"]:
            if token["content"] == _end(raw):
                token["special"] = True
        return HFTokenizer(raw)
    except UserError as error:
        raise UserError(
            f"tokenizer.path={path} cannot be used: {error}; give a tokenizer.json, such as "
            "scripts/train_tokenizer.py makes"
        ) from None


def _backend(raw: Any) -> Backend:
    try:
        return Backend.from_str(json.dumps(raw))
    except Exception as error:  # the library has no class of its own
        raise UserError(
            f"it is not a tokenizer.json of Hugging Face's tokenizers ({error})"
        ) from None


def _end(raw: JsonDict) -> str | None:
    """Return the name of the end of text among the added tokens."""
    names = {token["content"] for token in raw.get("added_tokens", [])}
    return next((name for name in _ENDS if name in names), None)


def _tokens(backend: Backend) -> list[bytes]:
    """Return the bytes of each id; empty for an id without a token."""
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    tokens = [b""] * (max(vocab.values(), default=-1) + 1)
    byte_of = {character: byte for byte, character in map_bytes().items()}
    for text, id_ in vocab.items():
        try:
            if id_ in added:
                tokens[id_] = text.encode()
            else:
                tokens[id_] = bytes(byte_of[character] for character in text)
        except KeyError as error:
            raise UserError(
                f"{error} in its token {text!r} stands for no byte: give a byte-level BPE"
            ) from None
    return tokens
