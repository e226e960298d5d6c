"""What clients receive, as OpenAI's objects: completions, whole or in chunks, and errors."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from common.settings import JsonDict
from data.tokenizers.build import END_OF_TEXT, Tokenizer
from inference.generation import Generation, Token, Update


class ApiError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> JsonDict:
        """The object to send."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": error}


class CompletionResponse:
    """The response to a request for completions, as one object or in chunks of a stream."""

    _object = "text_completion"
    _object_of_chunk = "text_completion"
    _prefix = "cmpl"

    def __init__(
        self, model: str, generations: Sequence[Generation], tokenizer: Tokenizer, n: int
    ) -> None:
        """`generations`: n for each prompt."""
        self._head = {
            "id": f"{self._prefix}-{uuid.uuid4().hex}",
            "object": self._object,
            "created": int(time.time()),
            "model": model,
        }
        self.generations = generations
        self._tokenizer = tokenizer
        self._n = n
        self._begun: set[int] = set()  # choices of a chat that have a chunk

    def whole(self) -> JsonDict:
        """Return the response with all choices, once their generations have ended."""
        choices = [
            self._choice(index, generation) for index, generation in enumerate(self.generations)
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def chunk(self, index: int, update: Update) -> JsonDict:
        """Return what is new in a choice."""
        return self._head | {"choices": [self._choice(index, update)]}

    def usage(self) -> JsonDict:
        """Return the token counts alone, when all generations have ended."""
        return self._head | {"object": self._object_of_chunk, "choices": [], "usage": self._usage()}

    def _usage(self) -> JsonDict:
        """Return the token counts.

        A prompt counts once for any n, without the <|endoftext|> put before it.
        """
        n_prompt = 0
        n_cached = 0
        for text in self.generations[:: self._n]:
            n_prompt += len(text.request.ids) - text.request.prompt_start
            n_cached += max(text.n_cached - text.request.prompt_start, 0)
        n_drawn = sum(len(text.drawn) for text in self.generations)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_drawn,
            "total_tokens": n_prompt + n_drawn,
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }

    def _choice(self, index: int, part: Generation | Update) -> JsonDict:
        n_top = self.generations[index].request.n_top
        logprobs = None if n_top is None else self._logprobs(part.tokens, n_top)
        reason = "stop" if part.finish_reason == "end_of_text" else part.finish_reason
        return {
            "index": index,
            **self._content(part.text),
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _content(self, text: str) -> JsonDict:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[Token], n_top: int) -> dict[str, list[Any]]:
        likeliest = []
        for token in tokens:
            named = {self._name(token_id): logprob for token_id, logprob in token.top.items()}
            likeliest.append(named or None)
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": likeliest,
            "text_offset": [token.offset for token in tokens],
        }

    def _name(self, token_id: int) -> str:
        """Return a token as text. OpenAI writes incomplete characters as bytes:\\xe6\\x97."""
        if token_id == self._tokenizer.eot_id:
            return END_OF_TEXT
        raw = self._tokenizer.tokens[token_id]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatResponse(CompletionResponse):
    """The response to a request for the answer of a chat."""

    _object = "chat.completion"
    _object_of_chunk = "chat.completion.chunk"
    _prefix = "chatcmpl"

    def chunk(self, index: int, update: Update) -> JsonDict:
        """Return what is new in a choice; only its first chunk has the role."""
        choice = self._choice(index, update)
        delta = choice.pop("message")
        if index in self._begun:
            del delta["role"]
        self._begun.add(index)
        return self._head | {
            "object": self._object_of_chunk,
            "choices": [choice | {"delta": delta}],
        }

    def _content(self, text: str) -> JsonDict:
        return {"message": {"role": "assistant", "content": text}}

    def _logprobs(self, tokens: Sequence[Token], n_top: int) -> dict[str, list[Any]]:
        def entry(token_id: int, logprob: float | None) -> JsonDict:
            raw = self._tokenizer.tokens[token_id]
            return {"token": self._name(token_id), "logprob": logprob, "bytes": [*raw]}

        content = []
        for token in tokens:
            # In order. A token that is none of the likeliest comes after these.
            likeliest = list(token.top.items())[:n_top]
            top = [entry(token_id, logprob) for token_id, logprob in likeliest]
            content.append(entry(token.id, token.logprob) | {"top_logprobs": top})
        return {"content": content}
