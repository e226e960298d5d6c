"""A text that the engine continues until it ends: the text, why it ended, and what is reported while it grows."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from common.settings import UserError
from data.text_stream import TextStream
from data.tokenizer import Tokenizer
from inference.engine import Engine, Generation, Texts
from inference.sampling import SamplingConfig
from inference.token_log import Token, TokenLog

_LONG = 4096  # tokens of a prompt whose progress is reported
_SECONDS_BETWEEN_REPORTS = 1.0

FinishReason = Literal["length", "stop", "end_of_text"]


@dataclass(frozen=True)
class TextRequest:
    """A text to continue."""

    ids: tuple[int, ...]
    """The tokens that the model reads. In training every text follows <|endoftext|>: see `read_ids`."""
    max_tokens: int
    """Most tokens to draw; 0 only reads the prompt."""
    sampling: SamplingConfig
    seed: int
    stop: tuple[str, ...] = ()
    """Strings that end the continuation; they are not included in it."""
    n_top: int | None = None
    """Report every token's log-probability and this many of the most likely tokens; None: neither."""
    echo: bool = False
    """Whether to report the prompt too."""
    prompt_start: int = 0
    """Where the prompt begins in `ids`: 1 after an <|endoftext|> that is not part of it."""
    n_before: int = 0
    """Tokens that were read before `ids`."""

    @property
    def n_prompt(self) -> int:
        """Tokens before the continuation, <|endoftext|> included."""
        return self.n_before + len(self.ids)

    @property
    def n_read(self) -> int:
        """Tokens that the model reads in all. It does not read the last one."""
        return self.n_prompt + max(self.max_tokens - 1, 0)

    def check_length(self, max_len: int | None) -> None:
        """Raise UserError if prompt and continuation need more than `max_len` positions."""
        if max_len is not None and self.n_read > max_len:
            raise UserError(
                f"a prompt of {self.n_prompt} tokens (<|endoftext|> before it included) and {self.max_tokens} new "
                f"tokens do not fit into the model's {max_len} learned positions: shorten one of them"
            )


def read_ids(prompt_ids: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt with <|endoftext|> before it, unless it begins with that."""
    begins = prompt_ids[:1] == (tokenizer.eot_id,)
    return prompt_ids if begins else (tokenizer.eot_id, *prompt_ids)


@dataclass(frozen=True)
class Piece:
    """What is new in a text."""

    text: str
    tokens: tuple[Token, ...]
    """The tokens that begin in `text`; empty if n_top is None."""
    n_drawn: int
    """Tokens drawn so far, including <|endoftext|>."""
    finish_reason: FinishReason | None
    """Set in the last piece only."""
    n_cached: int = 0
    """Tokens that the model did not have to read, as it had read them for another text."""


def joined(pieces: Sequence[Piece]) -> Piece:
    """Successive pieces of a text as one."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return replace(pieces[-1], text="".join(piece.text for piece in pieces), tokens=tokens)


@dataclass(frozen=True)
class Progress:
    """How much of a long prompt is read."""

    n_read: int
    n_prompt: int


News = Piece | Progress | Exception
"""What is reported of a text: what is new in it, how far its prompt is read, or the error that ended it."""
Tell = Callable[[News], None]
"""Receives the news of a text. It runs in the engine's thread and must return at once."""


class Completion(Generation):
    """The continuation of a `TextRequest`."""

    def __init__(
        self,
        request: TextRequest,
        tokenizer: Tokenizer,
        tell: Tell = lambda piece: None,
        before: Texts | None = None,
    ) -> None:
        """`before`: the text that the request's tokens continue; None: they begin one."""
        super().__init__(request.ids, request.sampling, torch.Generator().manual_seed(request.seed), before)
        self.request = request
        self.text = ""
        """Whole characters only, and without what could begin a stop string; after the prompt if that is echoed."""
        self.drawn: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._tokenizer, self._tell, self._told = tokenizer, tell, time.monotonic()
        self._stream = TextStream(tokenizer, request.stop)
        self._log = None if request.n_top is None else TokenLog(tokenizer, request.n_top)

    @property
    def n_tokens(self) -> int:
        """Tokens drawn, without <|endoftext|>."""
        return len(self.drawn) - (self.finish_reason == "end_of_text")

    @property
    def whole(self) -> bool:
        """Whether `text` is all text of the tokens drawn: no character is incomplete, and nothing is held back."""
        return self._stream.whole

    @property
    def may_skip(self) -> bool:
        """Not if log-probabilities of the prompt's tokens are requested."""
        return super().may_skip and not (self._log is not None and self.request.echo)

    def accept_prompt(self, logits: Tensor) -> None:
        """Record the log-probabilities of the prompt's tokens if requested. Report the progress of a long prompt."""
        if len(self.ids) >= _LONG and time.monotonic() > self._told + _SECONDS_BETWEEN_REPORTS:
            self._told = time.monotonic()
            self._tell(Progress(self.n_read + len(logits), len(self.ids)))
        if self._log is None or not self.request.echo:
            return
        if self.n_read == self.request.prompt_start == 0:
            self._log.add_first(self.ids[0])
        self._log.add(self.ids[self.n_read + 1 : self.n_read + 1 + len(logits)], logits)

    def end_prompt(self) -> None:
        """Report the prompt if requested. There may be nothing else to report."""
        prompt = self._tokenizer.decode_bytes(self.ids[self.request.prompt_start :]) if self.request.echo else b""
        if self._log is not None and self.request.echo:
            self._log.end_prompt()
        self._add(prompt.decode(errors="replace"), "length" if self.request.max_tokens == 0 else None)

    def accept(self, token_id: int, logits: Tensor) -> None:
        """Add a token, and report the text that is certain now."""
        self.drawn.append(token_id)
        if token_id == self._tokenizer.eot_id:
            self._add(self._stream.end(), "end_of_text")
            return
        if self._log is not None:
            self._log.add([token_id], logits.unsqueeze(0))
        text = self._stream.push(token_id)
        if self._stream.stopped:
            self._add(text, "stop")
        elif len(self.drawn) == self.request.max_tokens:
            self._add(text + self._stream.end(), "length")
        else:
            self._add(text)

    def fail(self, error: Exception) -> None:
        """End the text with an error, and report that."""
        if not self.finished:
            super().fail(error)
            self._tell(error)

    def _add(self, text: str, finish_reason: FinishReason | None = None) -> None:
        self.text += text
        self.finish_reason, self.finished = finish_reason, finish_reason is not None
        if text or self.finished:
            tokens = self._log.take(len(self.text)) if self._log else ()
            self._tell(Piece(text, tokens, len(self.drawn), finish_reason, self.n_cached))


def stream(engine: Engine, completion: Completion) -> Iterator[str]:
    """Run the engine until this text ends, and yield what each turn adds; the engine's other texts grow too.

    Raises:
        UserError: the model's logits are not finite.
    """
    text = completion.text
    if text:
        yield text
    while not completion.finished:
        engine.turn()
        yield completion.text[len(text) :]
        text = completion.text
    if completion.error:
        raise completion.error
