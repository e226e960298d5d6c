"""What clients receive, as OpenAI's objects: texts or answers of a chat, whole or in chunks, and errors."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from common.settings import JsonDict
from data.tokenizer import END_OF_TEXT, Tokenizer
from inference.generation import Generation, Token, Update


class ApiError(Exception):
    """An error response."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        """`param`: the key of the request that is wrong."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> JsonDict:
        """The object to send."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class CompletionResponse:
    """The response to one request for completions, as one object or in chunks of a stream."""

    _object, _object_of_chunk, _prefix = "text_completion", "text_completion", "cmpl"

    def __init__(
        self, model: str, generations: Sequence[Generation], tokenizer: Tokenizer, n: int
    ) -> None:
        """`generations`: n for each prompt."""
        name = f"{self._prefix}-{uuid.uuid4().hex}"
        self._head = {
            "id": name,
            "object": self._object,
            "created": int(time.time()),
            "model": model,
        }
        self.generations, self._tokenizer, self._n = generations, tokenizer, n
        self._begun: set[int] = set()  # choices of a chat that have a chunk

    def whole(self) -> JsonDict:
        """The response with all choices, once their generations have ended."""
        choices = [
            self._choice(index, generation) for index, generation in enumerate(self.generations)
        ]
        return self._head | {"choices": choices, "usage": self._usage()}

    def chunk(self, index: int, update: Update) -> JsonDict:
        """The new part of a choice."""
        return self._head | {"choices": [self._choice(index, update)]}

    def usage(self) -> JsonDict:
        """The token counts alone, when all generations have ended."""
        return self._head | {"object": self._object_of_chunk, "choices": [], "usage": self._usage()}

    def _usage(self) -> JsonDict:
        """Return the token counts. A prompt counts once for any n, without the <|endoftext|> put before it."""
        firsts = self.generations[:: self._n]
        prompt = sum(len(one.request.ids) - one.request.prompt_start for one in firsts)
        cached = sum(max(one.n_cached - one.request.prompt_start, 0) for one in firsts)
        drawn = sum(len(one.drawn) for one in self.generations)
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
        }
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _choice(self, index: int, new: Generation | Update) -> JsonDict:
        n_top = self.generations[index].request.n_top
        logprobs = None if n_top is None else self._logprobs(new.tokens, n_top)
        reason = "stop" if new.finish_reason == "end_of_text" else new.finish_reason
        return {
            "index": index,
            **self._content(new.text),
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _content(self, text: str) -> JsonDict:
        return {"text": text}

    def _logprobs(self, tokens: Sequence[Token], n_top: int) -> dict[str, list[Any]]:
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._name(token_id): logprob for token_id, logprob in token.top.items()} or None
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _name(self, token_id: int) -> str:
        """A token as text; incomplete characters are written as OpenAI does, bytes:\\xe6\\x97."""
        if token_id == self._tokenizer.eot_id:
            return END_OF_TEXT
        raw = self._tokenizer.tokens[token_id]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatResponse(CompletionResponse):
    """The response to one request for the answer of a chat."""

    _object, _object_of_chunk, _prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def chunk(self, index: int, update: Update) -> JsonDict:
        """The new part of a choice; only its first chunk has the role."""
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
            likely = list(token.top.items())[
                :n_top
            ]  # in order; a token that is none of them comes after these
            top = [entry(*pair) for pair in likely]
            content.append(entry(token.id, token.logprob) | {"top_logprobs": top})
        return {"content": content}
