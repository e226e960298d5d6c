"""A text that the engine continues: what is asked, its tokens so far, and why it ended."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from data.tokenizers.build import Tokenizer
from inference.sampling import SamplingConfig
from model.gpt import GPTState

_LEAST_LOGPROB = -9999.0  # lower values are raised to it, as in OpenAI's API: JSON has no infinity

FinishReason = Literal["length", "stop", "end_of_text"]


class Prefix(NamedTuple):
    """The state after B texts, one per row, with all that is needed to continue them.

    It is a value, like a state. `cat_states` and `select_rows` (model/state_trees.py) join batches
    of texts of any lengths, and take rows out of one.
    """

    logits: Tensor
    """Logits of the next token, (B, n_vocab)."""
    state: GPTState


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    ids: tuple[int, ...]
    """The tokens to read first. In training, every text follows <|endoftext|>."""
    max_tokens: int = 0
    """Most tokens to draw; 0 only reads the prompt."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the continuation; they are not included in it."""
    n_top: int | None = None
    """Report log-probabilities: each token's and this many likeliest ones'; None: none."""
    echo: bool = False
    """Whether to report the prompt too."""
    prompt_start: int = 0
    """Where the prompt begins in `ids`: 1 after an <|endoftext|> that is not part of it."""


class TextStream:
    """The text of a continuation that grows token by token.

    A character of several tokens is returned when it is whole; bytes that are not UTF-8 become
    U+FFFD. Text that may be the start of a stop string is held back until this is certain. Token
    boundaries do not matter: the text ends before the first complete stop string (the longest, if
    several end at the same place).
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """`stop`: non-empty texts that end the continuation and are not returned."""
        self.stopped = False
        """Whether a stop string has ended the text."""
        self.n_chars = 0
        """Whole characters of all tokens so far, returned or not."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain, which may be empty."""
        return self._add(self._decoder.decode(self._tokenizer.decode_bytes([token_id])))

    def end(self) -> str:
        """Return the rest of the text when no token follows."""
        rest = self._add(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return rest

    def _add(self, text: str) -> str:
        self.n_chars += len(text)
        if self.stopped:
            return ""
        text = self._held + text
        ends = []
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0:
                ends.append((start + len(stop), start))
        if ends:
            self.stopped = True
            self._held = ""
            _, start = min(ends)
            return text[:start]
        # What may be the beginning of a stop string is held back.
        beginnings = (stop[:n] for stop in self._stop for n in range(len(stop)))
        self._held = max(filter(text.endswith, beginnings), key=len, default="")
        return text.removesuffix(self._held)


class Token(NamedTuple):
    """A token of a text, with its log-probability before any sampling setting."""

    id: int
    offset: int
    """Characters of the prompt and the continuation before it, without one that began in an earlier
    token."""
    logprob: float | None
    """In nats; None: nothing was read before it."""
    top: dict[int, float]
    """Log-probabilities of the most likely tokens in its place and of itself, by id."""


class Update(NamedTuple):
    """What is new in a generation."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    """The tokens that begin in `text`; empty if n_top is None."""
    finish_reason: FinishReason | None = None
    """Set in the last update only."""


Tell = Callable[[Update | Exception], None]
"""Receives updates, or the error that ended the text.

It runs in the engine's thread and must return at once.
"""


class Generation:
    """The continuation of a request. The engine calls its methods, and then reads `finished`."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.tokenizer = tokenizer
        # A class that has more settings would keep apart texts that are drawn in the same way.
        settings = request.sampling.model_dump(include=set(SamplingConfig.model_fields))
        self.sampling = SamplingConfig(**settings)
        self.generator = torch.Generator().manual_seed(request.seed)
        self.prefix: Prefix | None = None
        """The text as far as it is read; None once it is a row of the engine's batch."""
        self.n_read = 0
        """Tokens of the prompt that are read."""
        self.n_cached = 0
        """How many of these were read before, for another text."""
        self.drawn: list[int] = []
        """The tokens drawn, including the one that ended the text."""
        self.text = ""
        """Whole characters only, without what could begin a stop string; with an echoed prompt."""
        self.tokens: list[Token] = []
        """The tokens that begin in `text`; empty if n_top is None."""
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        """The error that ended the text, if any."""
        self.cancelled = False
        """Set this to make the text leave with the engine's next turn."""
        self.tell: Tell = lambda update: None
        # It decodes the prompt, and after `end_prompt` the continuation.
        self._stream = TextStream(tokenizer)
        self._n_prompt = 0  # characters of the prompt, once it is read
        self._later: list[Token] = []  # tokens that begin after `text`

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None or self.error is not None

    @property
    def n_tokens(self) -> int:
        """Tokens drawn, without the one that ended the text."""
        if self.drawn and self.drawn[-1] in self.tokenizer.end_ids:
            return len(self.drawn) - 1
        return len(self.drawn)

    @property
    def may_skip(self) -> bool:
        """Whether a cached prefix can replace reading the prompt: its logits are not needed."""
        return not self.request.echo or self.request.n_top is None

    def accept_prompt(self, prefix: Prefix, logits: Tensor) -> None:
        """Take the prefix after the next T tokens of the prompt, and their logits (T, n_vocab)."""
        ids = self.request.ids
        start = self.n_read
        self.prefix = prefix
        self.n_read += len(logits)
        if not self.may_skip:
            # Logits are those of the next token: the first token of a prompt has none.
            if start == 0 and self.request.prompt_start == 0:
                self._later.append(Token(ids[0], 0, None, {}))
                self._stream.push(ids[0])
            self._push(ids[start + 1 : self.n_read + 1], logits)

    def end_prompt(self) -> None:
        """Report the prompt if requested. There may be nothing else to report."""
        ids = self.request.ids[self.request.prompt_start :]
        text = self.tokenizer.decode_bytes(ids).decode(errors="replace")
        self._n_prompt = len(text)
        self._stream = TextStream(self.tokenizer, self.request.stop)
        echoed = text if self.request.echo else ""
        self._add(echoed, "length" if self.request.max_tokens == 0 else None)

    def accept(self, token_id: int, logits: Tensor) -> None:
        """Add a token drawn from `logits` (n_vocab,), and report the text that is certain now."""
        self.drawn.append(token_id)
        if token_id in self.tokenizer.end_ids:
            is_end_of_text = token_id == self.tokenizer.eot_id
            self._add(self._stream.end(), "end_of_text" if is_end_of_text else "stop")
            return
        text = self._push([token_id], logits.unsqueeze(0))
        if self._stream.stopped:
            self._add(text, "stop")
        elif len(self.drawn) == self.request.max_tokens:
            self._add(text + self._stream.end(), "length")
        else:
            self._add(text)

    def fail(self, error: Exception) -> None:
        """End the text with an error, and report that."""
        if not self.finished:
            self.error = error
            self.tell(error)

    def _push(self, ids: Sequence[int], logits: Tensor) -> str:
        """Push up to T tokens with their logits (T, n_vocab), and return their text."""
        stream = self._stream
        if self.request.n_top is None:
            return "".join(map(stream.push, ids))
        text = ""
        logprobs = logits.float().log_softmax(-1).clamp(min=_LEAST_LOGPROB)
        n_top = min(self.request.n_top, logprobs.shape[-1])
        top_logprobs, top_ids = logprobs.topk(n_top)
        for i, token_id in enumerate(ids):
            logprob = logprobs[i, token_id].item()
            top = dict(zip(top_ids[i].tolist(), top_logprobs[i].tolist(), strict=True))
            top[token_id] = logprob
            self._later.append(Token(token_id, self._n_prompt + stream.n_chars, logprob, top))
            text += stream.push(token_id)
        return text

    def _add(self, text: str, finish_reason: FinishReason | None = None) -> None:
        self.text += text
        self.finish_reason = finish_reason
        if text or finish_reason:
            end = len(self.text) + (0 if self.request.echo else self._n_prompt)
            tokens = tuple(token for token in self._later if token.offset < end)
            self._later = [token for token in self._later if token.offset >= end]
            self.tokens += tokens
            self.tell(Update(text, tokens, finish_reason))
