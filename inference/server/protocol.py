"""The bodies of requests to /v1/completions and /v1/chat/completions, and the server's limits.

The keys are OpenAI's, and our own sampling settings.

https://platform.openai.com/docs/api-reference/completions
https://platform.openai.com/docs/api-reference/chat
"""

import secrets
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from common.settings import Settings, UserError
from data.tokenizers.build import Tokenizer
from data.tokenizers.chat import ChatTokenizer, parse_message
from inference.generation import Request
from inference.load import ModelConfig
from inference.sampling import SamplingConfig

# Every new token's text is compared with all beginnings of these.
_MOST_STOPS = 16
_LONGEST_STOP = 256
_NOT_OFFERED = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "suffix",
    "tools",
    "tool_choice",
    "response_format",
)
_IGNORED = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
# These are what happens anyway.
_USUAL: dict[str, list[Any]] = {
    "response_format": [{"type": "text"}],
    "tool_choice": ["none", "auto"],
    "repetition_penalty": [1],
}
_Message = Annotated[tuple[str, str], BeforeValidator(parse_message)]


class ServeConfig(ModelConfig, defaults="serve"):
    """The settings of scripts/serve.py."""

    host: str
    """Address to listen at; 127.0.0.1: only programs on this machine can reach it."""
    port: int = Field(ge=0, le=65535)
    """0: any free port."""
    max_streams: int = Field(ge=1)
    """Texts written at once, in one batch."""
    max_queue: int = Field(ge=0)
    """Texts that may wait for a place; more are refused with status 429."""
    max_prompt_tokens: int = Field(ge=1)
    """Longest prompt."""
    max_tokens: int = Field(ge=1)
    """Longest continuation."""
    cache_states: int = Field(ge=0)
    """Most cached states of recent prompts, reused by prompts that start alike; 0: none."""
    cache_bytes: int = Field(ge=0)
    """Most bytes of these states, on the model's device."""
    quiet: bool
    """Whether to print no line for each request."""


class StreamOptions(Settings):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Whether a last chunk has the token counts."""
    include_obfuscation: bool = False
    """Ignored: chunks have no padding."""


class _Shared(SamplingConfig):
    """The keys that both kinds of requests have. A key that is null has its default."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    """The name that /v1/models gives."""
    n: int = Field(1, ge=1)
    """Continuations of each prompt; number i has seed + i."""
    seed: int | None = Field(None, ge=0, lt=2**62)
    """Seed of the sampling; null: a random one."""
    stop: str | list[str] = Field(default_factory=list)
    """Strings that end a continuation; they are not included in it."""
    stream: bool = False
    """Send the text in chunks, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_defaults(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise ValueError("the body is not a JSON object")
        body = {}
        for key, value in raw.items():
            if value is not None and key not in _IGNORED and value not in _USUAL.get(key, []):
                body[key] = value
        for key in _NOT_OFFERED:
            if body.pop(key, None):  # 0, "" and {} have no effect
                raise ValueError(f"{key} is not supported: leave it out")
        n = body.get("n", 1)
        if body.pop("best_of", n) != n:
            raise ValueError("best_of is not supported: use n only")
        return body

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > _MOST_STOPS or not all(0 < len(text) <= _LONGEST_STOP for text in stops):
            raise ValueError(f"give at most {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters")
        return stops


class CompletionRequest(_Shared):
    """A request to continue prompts."""

    prompt: list[str] | list[list[int]] = Field([""])
    """A text to continue, or its token ids, or a list of either; empty: from the beginning."""
    max_tokens: int = Field(16, ge=0)
    """Longest continuation; a text may end before. 0 with echo: only the prompt."""
    logprobs: int | None = Field(None, ge=0, le=20)
    """Report log-probabilities: each token's and this many likeliest ones'; null: none."""
    echo: bool = False
    """Whether the answer begins with the prompt."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _list_prompts(cls, prompt: Any) -> Any:
        prompts = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
        if isinstance(prompts, list) and prompts:
            are_texts = all(isinstance(text, str) for text in prompts)
            if are_texts or all(map(_are_ids, prompts)):
                return prompts
        raise ValueError(
            "give a text, a list of token ids, a list of texts or a list of lists of token ids"
        )


class ChatRequest(_Shared):
    """A request for the next answer of a conversation."""

    messages: list[_Message] = Field(min_length=1)
    """The conversation so far: [{"role": "user", "content": "Hello"}]."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest answer; null: as the server and the model allow."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens."""
    logprobs: bool = False
    """Report each token's log-probability."""
    top_logprobs: int = Field(0, ge=0, le=20)
    """Report this many of the most likely tokens in each token's place, too."""

    def as_completion(
        self, tokenizer: ChatTokenizer, most: int, max_len: int | None
    ) -> CompletionRequest:
        """Return the request to continue the conversation's ids.

        `most`, `max_len`: what max_tokens is by default, and the model's learned positions.
        """
        ids = tokenizer.encode_chat(self.messages, answer=True)
        if max_len is not None:
            most = max(1, min(most, max_len - len(ids)))
        wants_logprobs = self.logprobs or self.top_logprobs > 0
        return CompletionRequest(
            **{key: value for key, value in self if key in _Shared.model_fields},
            prompt=[ids],
            max_tokens=self.max_completion_tokens or self.max_tokens or most,
            logprobs=self.top_logprobs if wants_logprobs else None,
        )


def _are_ids(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(type(token_id) is int for token_id in prompt)


def list_requests(
    request: CompletionRequest, tokenizer: Tokenizer, limits: ServeConfig, key: str
) -> list[Request]:
    """Return the texts for the engine to continue: n for the first prompt, n for the second, ...

    `key`: the key of the request that has the prompts.

    Raises:
        UserError: a text is too long, or has invalid token ids.
    """
    if request.max_tokens > limits.max_tokens:
        raise UserError(
            f"max_tokens={request.max_tokens} is too much: "
            f"this server gives at most {limits.max_tokens}"
        )
    requests = []
    for prompt in request.prompt:
        # A prompt is a text or ids, which come from anyone.
        ids = tuple(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        for token_id in ids:
            if not 0 <= token_id < tokenizer.n_vocab:
                raise UserError(
                    f"prompt has the token id {token_id}: "
                    f"this model's are 0 to {tokenizer.n_vocab - 1}"
                )
        if len(ids) > limits.max_prompt_tokens:
            raise UserError(
                f"{key} has {len(ids)} tokens: this server takes at most {limits.max_prompt_tokens}"
            )
        # In training, every text follows the end of another.
        prompt_start = 0
        if ids[:1] != (tokenizer.eot_id,):
            ids = (tokenizer.eot_id, *ids)
            prompt_start = 1
        # Continuation i of every prompt has seed + i.
        seed = secrets.randbelow(2**53) if request.seed is None else request.seed
        for i in range(request.n):
            text = Request(
                ids,
                request.max_tokens,
                sampling=request,
                seed=seed + i,
                stop=tuple(request.stop),
                n_top=request.logprobs,
                echo=request.echo,
                prompt_start=prompt_start,
            )
            requests.append(text)
    return requests
