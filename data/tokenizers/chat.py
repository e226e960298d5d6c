"""Conversations as token ids: a marker begins the text of each role, and <|end|> ends an answer."""

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from common.settings import JsonDict, UserError
from data.tokenizers.interface import Tokenizer

MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|untrained|>")
"""The last is in datasets only. Models read <|assistant|> there, and do not learn the answer."""
ROLES = ("system", "user", "assistant", "untrained")
ANSWERS = ("assistant", "untrained")
IGNORED = -1  # the target of padding, and of what is not an answer
NO_ROLE = "a message whose role is not system, user or assistant"


class ChatTokenizer(Tokenizer):
    """Another tokenizer with MARKERS after its last id. Text that spells a marker is plain text."""

    markers = MARKERS

    def __init__(self, inner: Tokenizer) -> None:
        """Add the markers to `inner`.

        Raises:
            UserError: it has tokens with the names of markers.
        """
        markers = [marker.encode() for marker in MARKERS]
        clashes = {*markers} & {*inner.tokens}
        if clashes:
            raise UserError(
                f"the tokenizer has a token {min(clashes).decode()} of its own: give one without it"
            )
        self.inner = inner
        self.name = f"{inner.name}+chat"
        self.tokens = [*inner.tokens, *markers]
        self.eot_id = inner.eot_id
        ids = {marker: inner.n_vocab + i for i, marker in enumerate(MARKERS)}
        self.role_ids = {role: ids[f"<|{role}|>"] for role in ROLES}
        """The id of each role's marker."""
        self.assistant_id = self.role_ids["assistant"]
        self.end_id = ids["<|end|>"]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a generated text: <|endoftext|> and all markers."""
        return self.eot_id, *range(self.inner.n_vocab, self.n_vocab)

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of the inner tokenizer's and the markers."""
        return hashlib.sha256(json.dumps([self.inner.sha256, *MARKERS]).encode()).hexdigest()

    @property
    def saved(self) -> JsonDict:
        """The markers, and what is saved of the inner tokenizer."""
        return {"chat": [*MARKERS], "tokenizer": self.inner.saved}

    def encode_arrays(self, text: str) -> Iterator[np.ndarray]:
        """Yield the token ids of a text, as the inner tokenizer does."""
        return self.inner.encode_arrays(text)

    def normalized(self, text: str) -> str:
        """Return the text that the ids of `text` spell."""
        return self.inner.normalized(text)

    def extends(self, sha256: str) -> bool:
        """Whether it has all ids of the tokenizer with this digest."""
        return sha256 in (self.sha256, self.inner.sha256)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of `ids`, as of any tokenizer; markers have none."""
        return self.inner.decode_bytes([i for i in ids if i < self.inner.n_vocab])

    def encode_chat(self, messages: Sequence[tuple[str, str]], answer: bool = False) -> list[int]:
        """Return the ids of a conversation, which is (role, text) of each message.

        `answer`: end with the assistant's marker, for the model to go on.
        """
        ids: list[int] = []
        for role, text in messages:
            ids += [self.role_ids[role], *self.encode(text)]
            if role in ANSWERS:
                ids.append(self.end_id)
        if answer:
            ids.append(self.assistant_id)
        return ids


def parse_message(message: Any) -> tuple[str, str]:
    """Return (role, text) of a message, as OpenAI writes it: {"role": "user", "content": "Hello"}.

    A developer's message is one of the system; a content that is a list of texts is joined.

    Raises:
        UserError: it is something else. Equal mistakes have equal texts.
        UnicodeEncodeError: its text has half a character, such as JSON's "\\ud800".
    """
    fields: Any = message if isinstance(message, dict) else {}
    role = fields.get("role")
    if role == "developer":
        role = "system"
    calls_tool = role == "assistant" and (fields.get("tool_calls") or fields.get("function_call"))
    if calls_tool or role in ("tool", "function", "ipython"):
        raise UserError("a message to or from a tool")
    if role not in ROLES[:3]:
        raise UserError(NO_ROLE)
    content = fields.get("content")
    items = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for item in items:
        is_text = isinstance(item, dict) and item.get("type") == "text"
        if not is_text or not isinstance(item.get("text"), str):
            raise UserError("a message whose content is not text")
        texts.append(item["text"])
    text = "".join(texts)
    text.encode()  # not all tokenizers do
    return role, text


def replace_untrained(ids: np.ndarray, n_vocab: int) -> np.ndarray:
    """Return ids of a dataset of conversations with <|assistant|> for <|untrained|>, int64 (n,)."""
    assistant_id = n_vocab - len(MARKERS) + MARKERS.index("<|assistant|>")
    return np.where(ids == n_vocab - 1, assistant_id, ids)


def answer_targets(ids: np.ndarray, n_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a conversation and the targets after them, int64 (n,) both.

    The last marker decides: what follows the assistant's is a target, <|end|> included. Other
    targets are IGNORED.

    Args:
        ids: <|endoftext|> and the conversation, (n + 1,), as the dataset holds them.
        n_vocab: ids of the dataset's tokenizer, the last of which are the markers.
    """
    first_marker = n_vocab - len(MARKERS)
    places = np.where(ids >= first_marker, np.arange(ids.size), 0)
    last_marker = ids[np.maximum.accumulate(places)]
    in_answer = last_marker == first_marker + MARKERS.index("<|assistant|>")
    tokens = replace_untrained(ids, n_vocab)
    return tokens[:-1], np.where(in_answer[:-1], tokens[1:], IGNORED)
