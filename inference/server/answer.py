"""What clients receive, as OpenAI's objects: the answers of /v1/completions, whole or in chunks, and errors."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from data.tokenizer import END_OF_TEXT, Tokenizer
from inference.completion import Piece, TextRequest
from inference.token_log import Token


class ApiError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """The object to send."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class Answer:
    """The answer to one request. `body` makes the whole answer, or one chunk of a stream; each piece is passed once."""

    def __init__(self, model: str, tokenizer: Tokenizer, texts: Sequence[TextRequest], n: int) -> None:
        """`texts`: n for each prompt."""
        kind, name = "text_completion", f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self._tokenizer, self._texts, self._n = tokenizer, texts, n
        self._last: dict[int, Piece] = {}  # of each text so far

    def body(self, choices: Sequence[tuple[int, Piece]], usage: bool = False) -> dict[str, Any]:
        """The object to send: what is new in texts, by their indices; with the counts of tokens if `usage`."""
        self._last |= dict(choices)
        body = self._head | {"choices": [self._choice(index, piece) for index, piece in choices]}
        return body | {"usage": self._usage()} if usage else body

    def _usage(self) -> dict[str, Any]:
        """Return the token counts. A prompt counts once, whatever n is, and without the end of text put before it."""
        prompt = cached = 0
        for i in range(0, len(self._texts), self._n):
            prompt += len(self._texts[i].ids) - self._texts[i].prompt_start
            cached += max(self._last[i].n_cached - self._texts[i].prompt_start, 0)
        drawn = sum(piece.n_drawn for piece in self._last.values())
        counts = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens) if self._texts[index].n_top is not None else None
        reason = "stop" if piece.finish_reason == "end_of_text" else piece.finish_reason
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}

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


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text; incomplete characters are written as OpenAI does, bytes:\\xe6\\x97."""
    if token_id == tokenizer.eot_id:
        return END_OF_TEXT
    raw = tokenizer.decode_bytes([token_id])
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
