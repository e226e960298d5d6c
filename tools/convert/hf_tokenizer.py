"""Convert tokenizers to and from the tokenizer.json of Hugging Face: byte-level BPE."""

import json
from pathlib import Path

from common.settings import JsonDict
from data.tokenizers.build import BytesConfig, IdTokenizer, RankTokenizer, build_tokenizer
from data.tokenizers.chat import MARKERS, ChatTokenizer
from data.tokenizers.interface import Tokenizer, map_bytes

_HERE = Path(__file__).parent
_GPT2_IDS = 50257
_GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
_VOCABULARY = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"


def _text(token: bytes) -> str:
    return "".join(map_bytes()[byte] for byte in token)


def tokenizer_files(tokenizer: Tokenizer, max_len: int | None) -> JsonDict:
    """Return tokenizer.json and tokenizer_config.json as plain data.

    The ids are ours, except that Hugging Face reads the characters <|endoftext|>, or of a marker,
    as that token. As in tiktoken, a word that is a token is never split (ignore_merges). Padding is
    on the left, so that prompts of several lengths can be continued together. A vocabulary that
    came as a tokenizer.json stays as it is; a chat model adds its markers. tokenizer=ids has none.

    Args:
        max_len: the model's maximum number of tokens; None: no limit.
    """
    inner = tokenizer.inner if isinstance(tokenizer, ChatTokenizer) else tokenizer
    if isinstance(inner, IdTokenizer):
        return {}
    # Templates of both files, filled in for our vocabularies; one that came as a file stays.
    vocabulary = json.loads((_HERE / _VOCABULARY).read_text(encoding="utf-8"))
    settings = json.loads((_HERE / _SETTINGS).read_text(encoding="utf-8"))
    (special,) = vocabulary["added_tokens"]
    if isinstance(inner, RankTokenizer):
        special["id"] = inner.eot_id
        for part in ("pre_tokenizer", "decoder"):
            vocabulary[part]["use_regex"] = inner.name == "gpt2"
        ids = {_text(token): rank for rank, token in enumerate(inner.ranks)}
        vocabulary["model"] |= {"vocab": ids, "merges": _merges(inner)}
    else:
        vocabulary = inner.saved
        end_of_text = inner.tokens[inner.eot_id].decode()
        settings |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), end_of_text)
    # Markers follow the vocabulary, and the template writes them.
    if isinstance(tokenizer, ChatTokenizer):
        added = list(vocabulary["added_tokens"])
        for i, marker in enumerate(MARKERS):
            added.append(special | {"id": inner.n_vocab + i, "content": marker})
        vocabulary = vocabulary | {"added_tokens": added}
        template = (_HERE / "chat_template.jinja").read_text(encoding="utf-8")
        settings["chat_template"] = template.replace("\n", "")
    if max_len is not None:
        settings["model_max_length"] = max_len
    return {_VOCABULARY: vocabulary, _SETTINGS: settings}


def _merges(tokenizer: RankTokenizer) -> list[str]:
    """Return the pairs that tiktoken merges, in the order of ranks.

    These are all pairs of tokens whose concatenation is a token.
    """
    tokens = set(tokenizer.ranks)
    merges = []
    for token in tokenizer.ranks:
        for cut in range(1, len(token)):
            left = token[:cut]
            right = token[cut:]
            if left in tokens and right in tokens:
                merges.append(f"{_text(left)} {_text(right)}")
    return merges


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Read a tokenizer.json as tokenizer=bytes or gpt2, if it is one of these, or else as hf.

    Raises:
        UserError: it is missing, damaged, or not a byte-level BPE.
    """
    from data.tokenizers.hugging_face import (  # their library is optional
        HFTokenizer,
        read_hf_tokenizer,
    )

    tokenizer = read_hf_tokenizer(path)
    if tokenizer.tokens[-len(MARKERS) :] != [marker.encode() for marker in MARKERS]:
        return _known(tokenizer)
    saved = tokenizer.saved
    added = [token for token in saved["added_tokens"] if token["content"] not in MARKERS]
    return ChatTokenizer(_known(HFTokenizer(saved | {"added_tokens": added})))


def _known(tokenizer: Tokenizer) -> Tokenizer:
    """Return tokenizer=bytes or gpt2 if this is one of them, or else the tokenizer itself."""
    if tokenizer.saved.get("normalizer") is not None:
        return tokenizer
    in_bytes = build_tokenizer(BytesConfig(name="bytes"))
    if tokenizer.tokens == in_bytes.tokens:
        return in_bytes
    if tokenizer.n_vocab == _GPT2_IDS:
        gpt2 = RankTokenizer("gpt2", tokenizer.tokens[:-1])
        if gpt2.sha256 == _GPT2_SHA256:
            return gpt2
    return tokenizer
