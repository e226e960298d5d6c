"""The body of a request to /v1/completions: OpenAI's, the sampling settings that it lacks, and the limits of a server.

https://platform.openai.com/docs/api-reference/completions
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from common.settings import Settings, UserError
from data.tokenizer import Tokenizer
from inference.generate import SamplingConfig
from inference.server.text import TextRequest, read_ids

_MOST_STOPS, _LONGEST_STOP = 16, 256  # at every token, the text is compared with all beginnings of these
_NOT_OFFERED = {
    "presence_penalty": "use repetition_penalty",
    "frequency_penalty": "use repetition_penalty",
    "logit_bias": "leave it out",
    "suffix": "leave it out",
}


class StreamOptions(Settings):
    """How a stream ends."""

    include_usage: bool = False
    """Whether a last chunk has the numbers of tokens."""


class CompletionRequest(SamplingConfig):
    """What may be asked. A key that is null has its default."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    """As /v1/models names it."""
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    """A text to continue, or its token ids, or a list of either; empty: a text from its beginning."""
    max_tokens: int = Field(16, ge=0)
    """Longest continuation; a text may end before. 0, with echo: only the prompt."""
    n: int = Field(1, ge=1)
    """Continuations of each prompt; number i has seed + i."""
    seed: int | None = Field(None, ge=0, lt=2**62)
    """Of the sampling; null: another one each time."""
    stop: str | list[str] = Field(default_factory=list)
    """Texts that end a continuation and are no part of it."""
    stream: bool = False
    """Whether the text comes in pieces, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    logprobs: int | None = Field(None, ge=0, le=20)
    """Tell how likely each token was, in nats, and this many of the most likely in its place; null: nothing of that."""
    echo: bool = False
    """Whether the answer begins with the prompt."""

    @model_validator(mode="before")
    @classmethod
    def _what_openai_has(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise ValueError("the body is not a JSON object")
        given = {key: value for key, value in raw.items() if value is not None and key != "user"}
        for key, instead in _NOT_OFFERED.items():
            if given.pop(key, None):  # 0, "" and {} are what they do without
                raise ValueError(f"{key} is not offered: {instead}")
        if given.pop("best_of", n := given.get("n", 1)) != n:
            raise ValueError("best_of is not offered: give n alone")
        return given

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_a_prompt(cls, prompt: Any) -> Any:
        several = prompt if isinstance(prompt, list) and prompt else [None]
        texts = all(isinstance(one, str) for one in several)
        if not (isinstance(prompt, str) or _are_ids(prompt) or texts or all(map(_are_ids, several))):
            raise ValueError("give a text, a list of token ids, a list of texts or a list of such lists")
        return prompt

    @field_validator("stop")
    @classmethod
    def _stops_are_few(cls, stop: str | list[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > _MOST_STOPS or not all(0 < len(text) <= _LONGEST_STOP for text in stops):
            raise ValueError(f"give at most {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters")
        return stops

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each a text, or its token ids."""
        if isinstance(self.prompt, str) or _are_ids(self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token_id) is int for token_id in prompt)


@dataclass(frozen=True)
class Limits:
    """Of one text."""

    max_prompt_tokens: int
    max_tokens: int
    max_len: int | None
    """Learned positions of the model; None: it has no limit."""


def text_requests(request: CompletionRequest, tokenizer: Tokenizer, limits: Limits) -> list[TextRequest]:
    """The texts that a request asks for: n of the first prompt, n of the second, ...

    Raises:
        UserError: one is longer than is allowed, or has ids that there are not.
    """
    if request.max_tokens > limits.max_tokens:
        raise UserError(f"max_tokens={request.max_tokens} is too much: this server gives at most {limits.max_tokens}")
    sampling = SamplingConfig(**{name: getattr(request, name) for name in SamplingConfig.model_fields})
    seed = secrets.randbelow(2**53) if request.seed is None else request.seed
    return [
        TextRequest(ids, request.max_tokens, sampling, seed + i, tuple(request.stop), request.logprobs, request.echo)
        for prompt in request.prompts
        for ids in [_prompt_ids(prompt, request, tokenizer, limits)]
        for i in range(request.n)
    ]


def _prompt_ids(
    prompt: str | list[int], request: CompletionRequest, tokenizer: Tokenizer, limits: Limits
) -> tuple[int, ...]:
    ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
    if ids and not 0 <= min(ids) <= max(ids) < tokenizer.n_vocab:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < tokenizer.n_vocab)
        raise UserError(f"prompt has the token id {wrong}: this model's are 0 to {tokenizer.n_vocab - 1}")
    if len(ids) > limits.max_prompt_tokens:
        raise UserError(f"prompt has {len(ids)} tokens: this server takes at most {limits.max_prompt_tokens}")
    n_read = len(read_ids(ids, tokenizer)) + max(request.max_tokens - 1, 0)  # the last token is not read again
    if limits.max_len is not None and n_read > limits.max_len:
        raise UserError(
            f"a prompt of {len(ids)} tokens and max_tokens={request.max_tokens} are more than the model's "
            f"{limits.max_len} learned positions, one of them the text's beginning: shorten the one or the other"
        )
    return ids
