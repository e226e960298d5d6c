"""What every tokenizer has, and where a long text is cut before it is encoded."""

import functools
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field

from common.settings import JsonDict, Settings

END_OF_TEXT = "<|endoftext|>"
LARGEST_FILE = 2**26  # that of 262,144 tokens with their merges has 33 MB

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

# Texts are encoded in chunks of about this many characters: a long text takes much memory.
_CHUNK = 2**17
# After this many characters they are cut even inside a word: a regular expression overflows its
# stack on a million spaces before a letter, and merging the pairs of a word of ten million letters
# takes 7 s.
_LONGEST_CHUNK = _CHUNK + 2**20


class Strict(Settings):
    """Base of what is read from JSON files of any origin: no text is accepted as a number."""

    model_config = ConfigDict(strict=True)


class TokenizerId(Strict):
    """Which tokenizer made the ids."""

    name: str
    n_vocab: Annotated[int, Field(ge=2, le=2**32)]
    sha256: Sha256
    """As in `Tokenizer.sha256`."""
    eot_id: Annotated[int, Field(ge=0)]
    """The id of <|endoftext|>."""
    markers: list[str] = Field(default=[], exclude_if=lambda markers: not markers)
    """The last ids, in order: what begins and ends the texts of conversations."""


class Tokenizer(ABC):
    """The interface of tokenizers. An id always spells the same bytes, whatever is beside it."""

    name: str
    tokens: Sequence[bytes]
    """The bytes of each id; for <|endoftext|> and other special tokens, their names."""
    eot_id: int
    """The id of <|endoftext|>."""
    markers: Sequence[str] = ()
    """The names of the last ids, in a tokenizer of conversations."""

    @property
    def n_vocab(self) -> int:
        """Number of ids, which are 0 to n_vocab - 1."""
        return len(self.tokens)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a generated text."""
        return (self.eot_id,)

    @property
    def id(self) -> TokenizerId:
        """The identity of the tokenizer, as datasets store it."""
        return TokenizerId(
            name=self.name,
            n_vocab=self.n_vocab,
            sha256=self.sha256,
            eot_id=self.eot_id,
            markers=[*self.markers],
        )

    @functools.cached_property
    def sha256(self) -> str:
        """A hex digest that is equal only for tokenizers with the same ids."""
        return hashlib.sha256(json.dumps(self.saved).encode()).hexdigest()

    @property
    @abstractmethod
    def saved(self) -> JsonDict:
        """All that `load_tokenizer` needs, as JSON."""

    @abstractmethod
    def encode_arrays(self, text: str) -> Iterator[np.ndarray]:
        """Yield the token ids of a text as consecutive arrays, in little memory.

        <|endoftext|> is ordinary text.
        """

    def normalized(self, text: str) -> str:
        """Return the text that the ids of `text` spell."""
        return text

    def extends(self, sha256: str) -> bool:
        """Whether it has all ids of the tokenizer with this digest."""
        return sha256 == self.sha256

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Number of UTF-8 bytes of each id, int64 (n_vocab,); 0 for `end_ids`."""
        lengths = np.array([*map(len, self.tokens)], dtype=np.int64)
        lengths[[*self.end_ids]] = 0
        return lengths

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, as `encode_arrays` gives them."""
        return [token for ids in self.encode_arrays(text) for token in ids.tolist()]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of `ids`; a character may be cut at either end."""
        return b"".join([self.tokens[i] for i in ids])


def cut_text(text: str, cuts: re.Pattern[str]) -> Iterator[str]:
    """Yield a text in chunks, which end where `cuts` matches, or at _LONGEST_CHUNK characters."""
    start = 0
    while len(text) - start > _CHUNK:
        cut = cuts.search(text, start + _CHUNK, start + _LONGEST_CHUNK)
        stop = cut.start() if cut else start + _LONGEST_CHUNK
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


@functools.cache
def map_bytes() -> dict[int, str]:
    """A printable character for every byte, as in GPT-2's encoder.py.

    It is the byte's own character, or one from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(256 + len(characters) - len(printable))
    return characters
