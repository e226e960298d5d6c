"""Text to token ids and back. Each tokenizer is saved as one JSON file that needs no network."""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tiktoken
from pydantic import Field

from common.files import open_file, read_json, write_atomic
from common.settings import JsonDict, Settings, UserError, decode
from data.tokenizers.chat import MARKERS, ChatTokenizer
from data.tokenizers.interface import END_OF_TEXT, LARGEST_FILE, Strict, Tokenizer, cut_text

# Where GPT-2 splits a text before byte pairs are merged. A file never brings its own regular
# expression. This is tiktoken's, except that the first alternatives have no possessive signs (++)
# or lookahead: one automaton then matches them, which makes encoding 1.5 times as fast. The matches
# are the same: nothing after a + makes it backtrack.
_SPLIT_PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s++$|\s+(?!\S)|\s"
# What \s matches above. Python's \s also matches U+001C to U+001F, so a match of Python's \S is
# never one of \s above.
_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
# Where a match of GPT-2's pattern begins, whatever the text is.
EXACT_CUTS = re.compile(
    # Before spaces, and before the last of them: \s+(?!\S) matches the others, as \s++$ does if
    # they end the text.
    rf"(?<=\S){_SPACE}|{_SPACE}(?=\S)"
    # No token holds letters and digits, or ends with a letter or digit before a mark.
    r"|(?<=[0-9])[A-Za-z]|(?<=[A-Za-z])[0-9]|(?<=[0-9A-Za-z])[!-/:-@\[-`{-~]"
)
_SINGLE_BYTES = [bytes([i]) for i in range(256)]


class BytesConfig(Settings):
    """256 byte values and <|endoftext|>; needs no file."""

    name: Literal["bytes"]


class GPT2Config(Settings, defaults="tokenizer/gpt2"):
    """GPT-2's 50,256 tokens and <|endoftext|>."""

    name: Literal["gpt2"]
    path: Path | None
    """A local rank file (.tiktoken: lines of "base64 rank").

    null: tiktoken downloads it, or finds it in its cache.
    """


class HFConfig(Settings, defaults="tokenizer/hf"):
    """A byte-level BPE in the format of Hugging Face's tokenizers.

    scripts/train_tokenizer.py makes one.
    """

    name: Literal["hf"]
    path: Path
    """The tokenizer.json."""


class IdsConfig(Settings, defaults="tokenizer/ids"):
    """Ids made elsewhere, of characters or of an unknown tokenizer."""

    name: Literal["ids"]
    path: Path | None
    """A JSON list with the character of each id; null: they have no text."""
    n_vocab: int | None = Field(gt=0, lt=2**24)
    """Number of ids without text."""


AnyConfig = BytesConfig | GPT2Config | HFConfig | IdsConfig
TokenizerConfig = Annotated[AnyConfig, Field(discriminator="name")]


class RankTokenizer(Tokenizer):
    """A tiktoken encoding: token i is the bytes `ranks[i]`, and the last id is <|endoftext|>."""

    def __init__(self, name: str, ranks: Sequence[bytes]) -> None:
        """Build it.

        Raises:
            UserError: the ranks cannot encode every text, or do not fit the tokenizer `name`.
        """
        is_complete = {*_SINGLE_BYTES} <= {*ranks}
        if not is_complete or len({*ranks, b""}) <= len(ranks):
            raise UserError(
                f"the ranks of tokenizer {name!r} must have each single byte, no empty token and "
                "no token twice"
            )
        self.name = name
        self.ranks = ranks
        self.tokens = [*ranks, END_OF_TEXT.encode()]
        self.eot_id = len(ranks)
        self.encoding = tiktoken.Encoding(
            name,
            pat_str=_SPLIT_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={END_OF_TEXT: self.eot_id},
            explicit_n_vocab=self.n_vocab,
        )

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of the ranks as a .tiktoken file in rank order."""
        digest = hashlib.sha256()
        for rank, token in enumerate(self.ranks):
            digest.update(base64.b64encode(token) + b" %d\n" % rank)
        return digest.hexdigest()

    @property
    def saved(self) -> JsonDict:
        """The ranks in base64, with their digest."""
        ranks = [base64.b64encode(token).decode() for token in self.ranks]
        return {"format_version": 1, "name": self.name, "sha256": self.sha256, "ranks": ranks}

    def encode_arrays(self, text: str) -> Iterator[np.ndarray]:
        """Yield the token ids of a text as consecutive arrays, in little memory.

        The ids are those of tiktoken's encode_ordinary: the characters <|endoftext|> are ordinary
        text. A run of more than a million characters without a sure token boundary (non-ASCII
        letters without a space, or spaces) is cut anywhere. Ids near that cut may differ, but still
        decode to the text.
        """
        if self.name == "bytes":  # the same ids, ten times as fast
            yield np.frombuffer(text.encode(), np.uint8)
            return
        for chunk in cut_text(text, EXACT_CUTS):
            yield self.encoding.encode_to_numpy(chunk, disallowed_special=())


class IdTokenizer(Tokenizer):
    """Ids of single characters, or without text. The last is <|endoftext|>."""

    name = "ids"

    def __init__(self, characters: list[str]) -> None:
        """`characters`: of each id; empty for ids without text."""
        self._characters = characters
        self.tokens = [*map(str.encode, characters), END_OF_TEXT.encode()]
        self.eot_id = len(characters)

    @property
    def saved(self) -> JsonDict:
        """The characters."""
        return {"characters": self._characters}

    def encode_arrays(self, text: str) -> Iterator[np.ndarray]:
        """Yield the id of each character.

        Raises:
            UserError: one has no id.
        """
        id_of = {character: i for i, character in enumerate(self._characters)}
        try:
            yield np.array([id_of[character] for character in text], np.uint32)
        except KeyError as error:
            raise UserError(f"tokenizer=ids has no character {error}: leave it out") from None


def build_tokenizer(config: AnyConfig) -> Tokenizer:
    """Build the tokenizer that `config` describes.

    Raises:
        UserError: its file is invalid, or GPT-2's ranks cannot be downloaded.
    """
    if isinstance(config, BytesConfig):
        return RankTokenizer("bytes", _SINGLE_BYTES)
    if isinstance(config, HFConfig):
        # its library is optional
        from data.tokenizers.hugging_face import read_hf_tokenizer

        return read_hf_tokenizer(config.path)
    if isinstance(config, IdsConfig):
        if config.path:
            return load_tokenizer(config.path.resolve())
        if config.n_vocab is None:
            raise UserError("tokenizer=ids needs tokenizer.path=FILE or tokenizer.n_vocab=NUMBER")
        return IdTokenizer([""] * config.n_vocab)
    ranks = read_rank_file(config.path) if config.path else _download_gpt2()
    return RankTokenizer("gpt2", ranks)


def read_rank_file(path: Path) -> list[bytes]:
    """Return the tokens of a .tiktoken file, by rank.

    Raises:
        UserError: the file is invalid; it names the line.
        OSError: it cannot be read.
    """
    with open_file(path.resolve()) as file:
        content = file.read(LARGEST_FILE)
    tokens = []
    for rank, line in enumerate(content.splitlines()):
        try:
            token, number = line.split()
            tokens.append(base64.b64decode(token, validate=True))
            if int(number) != rank:
                raise ValueError
        except ValueError:
            where = f"tokenizer.path={path} line {rank + 1}"
            raise UserError(
                f"{where} is not 'base64 {rank}': give a .tiktoken file, with its ranks in order"
            ) from None
    return tokens


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write everything that `load_tokenizer` needs as one JSON file."""
    write_atomic(path, json.dumps(tokenizer.saved) + "\n")


def load_tokenizer(path: Path) -> Tokenizer:
    """Read what `save_tokenizer` wrote.

    Raises:
        UserError: the file is missing or damaged, or its format version is another.
    """
    try:
        return _from_saved(read_json(path, LARGEST_FILE))
    except ValueError as error:  # a UserError, or not base64
        raise UserError(f"{path} is not a tokenizer: {error}") from None


def _from_saved(raw: Any) -> Tokenizer:
    """Build the tokenizer of what is `saved`; raises ValueError."""
    if isinstance(raw, dict) and "chat" in raw:
        if raw.keys() != {"chat", "tokenizer"} or raw["chat"] != [*MARKERS]:
            raise UserError(f"its markers are not {', '.join(MARKERS)}")
        return ChatTokenizer(_from_saved(raw["tokenizer"]))
    if isinstance(raw, dict) and "model" in raw:
        # its library is optional
        from data.tokenizers.hugging_face import HFTokenizer

        return HFTokenizer(raw)
    if isinstance(raw, dict) and "characters" in raw:
        return IdTokenizer(decode(_SavedIds, raw).characters)
    saved = decode(_Saved, raw)
    ranks = [base64.b64decode(token, validate=True) for token in saved.ranks]
    return RankTokenizer(saved.name, ranks)


class _SavedIds(Strict):
    characters: list[str]


class _Saved(Strict):
    format_version: Literal[1]
    name: Literal["bytes", "gpt2"]
    sha256: str
    ranks: list[str]


def _download_gpt2() -> list[bytes]:
    try:
        encoding: Any = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # no network, or a wrong file
        raise UserError(
            f"GPT-2's vocabulary cannot be downloaded ({type(error).__name__}): give a local rank "
            "file with tokenizer.path=FILE, or set TIKTOKEN_CACHE_DIR to a folder where tiktoken "
            "has it"
        ) from None
    return [encoding.decode_single_token_bytes(rank) for rank in range(encoding.n_vocab - 1)]
