"""The answers of /v1/completions: OpenAI's objects, whole or in chunks."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from data.tokenizer import END_OF_TEXT, Tokenizer
from inference.completion import FinishReason
from inference.token_log import Token


class Answer:
    """The answer to one request. `body` makes the whole answer, or one chunk of a stream."""

    def __init__(self, model: str, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer, self._with_logprobs = tokenizer, with_logprobs

    def body(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """The object to send; without `usage` if that is None."""
        return self._head | {"choices": choices} | ({} if usage is None else {"usage": usage})

    def choice(
        self, index: int, text: str, tokens: Sequence[Token], finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        """One continuation, or what is new in it."""
        logprobs = self._logprobs(tokens) if self._with_logprobs else None
        reason = "stop" if finish_reason == "end_of_text" else finish_reason
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        return {
            "tokens": [token_text(token.id, self._tokenizer) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {token_text(token_id, self._tokenizer): logprob for token_id, logprob in token.top.items()} or None
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts: of the prompts as given, and of all tokens drawn."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text; incomplete characters are written as OpenAI does, bytes:\\xe6\\x97."""
    if token_id == tokenizer.eot_id:
        return END_OF_TEXT
    raw = tokenizer.decode_bytes([token_id])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
