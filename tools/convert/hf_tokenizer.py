"""Convert tokenizers to and from the tokenizer.json of Hugging Face: byte-level BPE."""

import json
from pathlib import Path

from common.settings import JsonDict
from data.chat import MARKERS, ChatTokenizer
from data.tokenizer import BytesConfig, RankTokenizer, build_tokenizer
from data.tokenizer_base import Tokenizer, byte_characters

_HERE = Path(__file__).parent
_GPT2_IDS = 50257
_GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
_FILES = ("tokenizer.json", "tokenizer_config.json")


def _text(token: bytes) -> str:
    return "".join(byte_characters()[byte] for byte in token)


def tokenizer_files(tokenizer: Tokenizer, max_len: int | None) -> JsonDict:
    """tokenizer.json and tokenizer_config.json, as plain data. The ids are ours, except in texts
    with the characters <|endoftext|> or those of a marker, which Hugging Face reads as that token.
    A word that is a token is never split (ignore_merges), as in tiktoken; padding is on the left,
    so that prompts of several lengths can be continued together. A vocabulary that came as a
    tokenizer.json stays as it is, but for the markers of a chat model.

    Args:
        max_len: the model's maximum number of tokens; None: no limit.
    """
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


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Read a tokenizer.json: tokenizer=bytes or gpt2 if it is one of these, or as tokenizer=hf.

    Raises:
        UserError: it is missing, damaged, or not a byte-level BPE.
    """
    from data.tokenizer_json import HFTokenizer, read_hf_tokenizer  # their library is optional

    read = read_hf_tokenizer(path)
    if read.tokens[-len(MARKERS) :] != [marker.encode() for marker in MARKERS]:
        return _known(read)
    others = [token for token in read.saved["added_tokens"] if token["content"] not in MARKERS]
    return ChatTokenizer(_known(HFTokenizer(read.saved | {"added_tokens": others})))


def _known(read: Tokenizer) -> Tokenizer:
    """The tokenizer of tokenizer=bytes or gpt2 if `read` is one of these, or `read` itself."""
    if read.saved.get("normalizer") is not None:
        return read
    in_bytes = build_tokenizer(BytesConfig(name="bytes"))
    if read.tokens == in_bytes.tokens:
        return in_bytes
    if read.n_vocab == _GPT2_IDS:
        tokenizer = RankTokenizer("gpt2", read.tokens[:-1])
        if tokenizer.sha256 == _GPT2_SHA256:
            return tokenizer
    return read
