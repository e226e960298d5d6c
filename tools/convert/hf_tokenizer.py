"""Convert tokenizers to and from the tokenizer.json of Hugging Face: byte-level BPE."""

import json
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from common.console import warn
from common.files import read_json
from common.settings import JsonDict, Settings, UserError, decode
from data.chat import MARKERS, ChatTokenizer
from data.tokenizer import RankTokenizer
from data.tokenizer_base import END_OF_TEXT, LARGEST_FILE, Tokenizer, byte_characters

_HERE = Path(__file__).parent
_FILES = ("tokenizer.json", "tokenizer_config.json")


def _text(token: bytes) -> str:
    return "".join(byte_characters()[byte] for byte in token)


def tokenizer_files(tokenizer: Tokenizer, max_len: int | None) -> JsonDict:
    """tokenizer.json and tokenizer_config.json, as plain data. The ids are ours, except in texts
    with the characters <|endoftext|> or those of a marker, which Hugging Face reads as that token.
    A word that is a token is never split (ignore_merges), as in tiktoken; padding is on the left,
    so that prompts of several lengths can be continued together. A vocabulary that came as a
    tokenizer.json stays as it is, but for the markers of a chat model. Ids without text
    (tokenizer=none) have no files.

    Args:
        max_len: the model's maximum number of tokens; None: no limit.
    """
    if tokenizer.name == "none":
        return {}
    tokenizer_json, settings = (
        json.loads((_HERE / name).read_text(encoding="utf-8")) for name in _FILES
    )
    if isinstance(tokenizer, ChatTokenizer):
        (special,) = tokenizer_json["added_tokens"]
        tokenizer_json, settings = tokenizer_files(tokenizer.inner, max_len).values()
        n, template = (
            tokenizer.inner.n_vocab,
            (_HERE / "chat_template.jinja").read_text(encoding="utf-8"),
        )
        markers = [special | {"id": n + i, "content": marker} for i, marker in enumerate(MARKERS)]
        tokenizer_json = tokenizer_json | {
            "added_tokens": [*tokenizer_json["added_tokens"], *markers]
        }
        settings["chat_template"] = template.replace("\n", "")
    elif isinstance(tokenizer, RankTokenizer):
        tokenizer_json["added_tokens"][0]["id"] = tokenizer.eot_id
        for part in ("pre_tokenizer", "decoder"):
            tokenizer_json[part]["use_regex"] = tokenizer.name == "gpt2"
        vocab = {_text(token): rank for rank, token in enumerate(tokenizer.ranks)}
        tokenizer_json["model"] |= {"vocab": vocab, "merges": _merges(tokenizer)}
    else:
        tokenizer_json = tokenizer.saved
        settings |= dict.fromkeys(
            ("bos_token", "eos_token", "pad_token"), tokenizer.tokens[tokenizer.eot_id].decode()
        )
    limit = {} if max_len is None else {"model_max_length": max_len}
    return dict(zip(_FILES, (tokenizer_json, settings | limit), strict=True))


def _merges(tokenizer: RankTokenizer) -> list[str]:
    """Every pair of tokens whose concatenation is a token, in the order of its rank: the pairs that
    tiktoken merges."""
    known = set(tokenizer.ranks)
    return [
        f"{_text(token[:cut])} {_text(token[cut:])}"
        for token in tokenizer.ranks
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


class _Lenient(Settings):
    model_config = ConfigDict(extra="ignore", strict=True)


class _ByteLevel(_Lenient):
    type: Literal["ByteLevel"]
    add_prefix_space: Literal[False] = False
    use_regex: bool = True


class _Model(_Lenient):
    type: Literal["BPE"]
    vocab: dict[str, int]
    merges: list[str | list[str]]


class _AddedToken(_Lenient):
    id: int
    content: str


class _TokenizerJson(_Lenient):
    """The parts of tokenizer.json that determine the ids of a text."""

    added_tokens: list[_AddedToken]
    normalizer: None = None
    pre_tokenizer: _ByteLevel
    model: _Model


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Read a GPT-2's tokenizer.json, or one that `tokenizer_files` made.

    Raises:
        UserError: it is missing, damaged, or a kind of tokenizer whose ids we cannot reproduce.
    """
    raw = read_json(path, LARGEST_FILE)
    try:
        return _tokenizer(decode(_TokenizerJson, raw), path)
    except UserError as error:
        raise UserError(f"{path} is not a tokenizer of GPT-2's kind: {error}") from None


def _tokenizer(file: _TokenizerJson, path: Path) -> Tokenizer:
    added = {token.content: token.id for token in file.added_tokens}
    eot_id = added.get(END_OF_TEXT)
    if eot_id is None:
        raise UserError(f"it has no token {END_OF_TEXT}")
    others = [content for content, id_ in added.items() if id_ > eot_id]
    is_chat = others == [*MARKERS]
    if others and not is_chat:
        warn(f"{path}: {', '.join(map(repr, others))} will be treated as ordinary text")
    ranks = _ranks(file.model.vocab, eot_id)
    _check_merges(file.model)
    tokenizer = RankTokenizer("gpt2" if file.pre_tokenizer.use_regex else "bytes", ranks)
    return ChatTokenizer(tokenizer) if is_chat else tokenizer


def _ranks(vocab: dict[str, int], eot_id: int) -> list[bytes]:
    texts = {id_: text for text, id_ in vocab.items() if id_ < eot_id}
    if len(texts) != eot_id or min(texts, default=0) < 0:
        raise UserError(f"{END_OF_TEXT} is token {eot_id}, but must be the last token")
    byte = {character: byte for byte, character in byte_characters().items()}
    try:
        return [bytes(byte[character] for character in texts[id_]) for id_ in range(eot_id)]
    except KeyError as error:
        raise UserError(
            f"{error} is not a byte-level character: the tokens are not byte-level BPE"
        ) from None


def _check_merges(model: _Model) -> None:
    """Raise UserError unless pairs are merged in the order of their ids, as in tiktoken."""
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.merges]
    ids = [model.vocab.get("".join(pair), -1) for pair in pairs]
    wrong = next(
        (pair for pair, id_, before in zip(pairs, ids, [0, *ids], strict=False) if id_ < before),
        None,
    )
    if wrong is not None:
        raise UserError(f"the merge of {wrong} is not in the order of the ids")
