"""The token loop of everything that generates text: sample.py, conversations, lm_eval, the server, `generate`.

Many texts go through the model in one batch (continuous batching), and each can join and leave between two steps. The
engine works in turns. Each turn

    1. reads the tokens drawn in the turn before, in one forward pass;
    2. admits waiting texts, first come, first served, while there are places;
    3. reads their prompts: all of them, or, with `interleave`, one piece of one prompt, so that a long prompt delays
       neither the other texts nor other prompts;
    4. draws a token of every text whose prompt is read.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.settings import UserError
from inference.prompt_cache import PromptCache
from inference.sampling import NOT_FINITE, SamplingConfig, draw
from model.gpt import GPT, GPTState
from model.graphs import DecodingStep
from model.state import cat_states, select_rows

PIECE = 256
"""Tokens of a prompt that go through the model at once. This bounds memory for long prompts, and the time that other
texts wait with `interleave`. All prompts are cut at its multiples: continuing a cached prefix gives the same bits."""


class Texts(NamedTuple):
    """Texts read so far, one per row: all that is needed to continue them. A value, like a state.

    `cat_states` and `select_rows` (model/state.py) join batches of texts of any lengths, and take rows out of one.
    """

    logits: Tensor
    """Logits of the next token, (B, n_vocab)."""
    seen: Tensor
    """Tokens that occur in the text, except the one that ends texts, bool (B, n_vocab)."""
    state: GPTState


@torch.inference_mode()
def read(
    gpt: GPT,
    token_ids: Tensor,
    n_vocab: int,
    before: Texts | None = None,
    eot_id: int = -1,
    step: Callable[..., Any] | None = None,
) -> tuple[Texts, Tensor]:
    """Read (B, T) more tokens of B texts: the texts then, and the logits after each token, (B, T, n_vocab).

    Args:
        n_vocab: ids from here on, the padding of the embedding, are never drawn.
        before: the texts that these tokens continue; None: they begin here.
        eot_id: the token that ends texts; -1: the last, n_vocab - 1.
        step: called in place of the model; what it returns as the state may change with its next call.
    """
    token_ids = token_ids.to(gpt.embed.weight.device)
    logits, state = (step or gpt)(token_ids, before and before.state, return_state=True)
    logits = logits[..., :n_vocab]
    seen = before.seen.clone() if before else torch.zeros_like(logits[:, -1], dtype=torch.bool)
    seen.scatter_(1, token_ids, True)
    seen[:, eot_id] = False
    return Texts(logits[:, -1].clone(), seen, state), logits  # a view would keep the logits of all tokens


class Generation:
    """A text that the engine continues. This one never ends; a subclass decides when to set `finished`."""

    def __init__(
        self,
        ids: Sequence[int],
        sampling: SamplingConfig,
        generator: torch.Generator | None,
        before: Texts | None = None,
    ) -> None:
        """`ids`: the tokens to read first. They may be empty if `before`, the text that they continue, is given."""
        self.ids, self.generator = ids, generator
        # A class that has more settings would keep apart texts that are drawn in the same way.
        self.sampling = SamplingConfig(**{name: getattr(sampling, name) for name in SamplingConfig.model_fields})
        self.n_read = 0
        """How many of `ids` the model has read."""
        self.n_cached = 0
        """How many of these were read before, for another text."""
        self.begins = before is None
        """Whether `ids` begin the text."""
        self.texts = before
        """The text as far as it is read; None once it is a row of the engine's batch."""
        self.token_id = -1
        """The token drawn last."""
        self.cancelled = False
        """Set this to make the text leave with the engine's next turn."""
        self.finished = False
        self.error: Exception | None = None
        """The error that ended the text, if any."""

    @property
    def may_skip(self) -> bool:
        """Whether what was read before need not be read again; `accept_prompt` does not receive it then."""
        return self.texts is None and self.n_read == 0

    def accept_prompt(self, logits: Tensor) -> None:
        """Receive the logits (T, n_vocab) after each of the next T of `ids`."""

    def end_prompt(self) -> None:
        """Called when the prompt is read, before the first token is drawn."""

    def accept(self, token_id: int, logits: Tensor) -> None:
        """Receive the next token, drawn from `logits` (n_vocab,)."""

    def fail(self, error: Exception) -> None:
        """End the text with an error."""
        if not self.finished:
            self.finished, self.error = True, error


@contextlib.contextmanager
def _failing(generations: Sequence[Generation]) -> Iterator[None]:
    """If an exception is raised, end these texts with the error, and continue."""
    try:
        yield
    except Exception as error:
        for generation in generations:
            generation.fail(error)


def _is_kept(n_read: int, n: int) -> bool:
    """Whether a prompt of n tokens is kept as it is after n_read: 0, 1, 2, 4, 8, ... pieces before its last whole one.

    A prompt that differs in the last tokens alone then has at most about twice as many to read.
    """
    left = n // PIECE - n_read // PIECE
    return n_read % PIECE == 0 and left & (left - 1) == 0


class Engine:
    """Continues texts, up to `max_streams` at once; the others wait."""

    def __init__(
        self,
        gpt: GPT,
        n_vocab: int,
        max_streams: int,
        interleave: bool = False,
        eot_id: int = -1,
        cache: PromptCache | None = None,
    ) -> None:
        """Create an engine without texts.

        Args:
            n_vocab, eot_id: as for `read`.
            interleave: read prompts piece by piece between other texts' tokens.
            cache: keeps prompts that were read. Texts have the same bits with and without it.
        """
        self.gpt, self.n_vocab, self.eot_id = gpt, n_vocab, eot_id
        self.max_streams, self.interleave, self.cache = max_streams, interleave, cache
        self.waiting: deque[Generation] = deque()
        self._reading: deque[Generation] = deque()
        self._writing: list[Generation] = []
        self._texts: Texts | None = None  # one row for each of `_writing`; `_step` overwrites their state
        self._step = DecodingStep(gpt, max_streams)

    def submit(self, generations: Iterable[Generation]) -> None:
        """Add texts; they begin with the next turns."""
        self.waiting.extend(generations)

    @property
    def n_admitted(self) -> int:
        """Texts that have places."""
        return len(self._reading) + len(self._writing)

    @torch.inference_mode()
    def turn(self) -> None:
        """Draw a token of every text whose prompt is read. An error in one text ends that text alone: see `fail`."""
        self._admit()
        self._read_drawn()
        self._read_prompts()
        self._draw()

    def fail(self, error: Exception) -> None:
        """End all texts that have places with an error."""
        for generation in [*self._reading, *self._writing]:
            generation.fail(error)
        self._reading, self._writing, self._texts = deque(), [], None

    def _admit(self) -> None:
        self._keep_unfinished()
        self._reading = deque(generation for generation in self._reading if not generation.cancelled)
        self.waiting = deque(generation for generation in self.waiting if not generation.cancelled)
        while self.waiting and self.n_admitted < self.max_streams:
            self._reading.append(self.waiting.popleft())

    def _read_drawn(self) -> None:
        if self._writing:
            with _failing(self._writing):
                drawn = torch.tensor([[generation.token_id] for generation in self._writing])
                self._texts, _ = read(self.gpt, drawn, self.n_vocab, self._texts, self.eot_id, self._step)
            self._keep_unfinished()

    def _read_prompts(self) -> None:
        n_prompts = min(1, len(self._reading)) if self.interleave else len(self._reading)
        ready = [one for one in [self._reading.popleft() for _ in range(n_prompts)] if self._read_prompt(one)]
        if ready:
            with _failing(ready):  # such as running out of memory
                self._texts = cat_states([*([self._texts] if self._writing else []), *(one.texts for one in ready)])
                self._writing += ready
        for generation in ready:
            generation.texts = None

    def _read_prompt(self, generation: Generation) -> bool:
        """Read a prompt, or one piece of it with `interleave`; return whether tokens can be drawn."""
        with _failing([generation]):
            if self.cache is not None and generation.may_skip:
                generation.n_read, generation.texts = self.cache.longest(generation.ids)
                generation.n_cached = generation.n_read
            while generation.n_read < len(generation.ids):
                piece = torch.tensor([generation.ids[generation.n_read : generation.n_read + PIECE]])
                generation.texts, logits = read(self.gpt, piece, self.n_vocab, generation.texts, self.eot_id)
                generation.accept_prompt(logits[0])
                generation.n_read += piece.shape[1]
                if self.cache is not None and generation.begins and _is_kept(generation.n_read, len(generation.ids)):
                    self.cache.add(generation.ids[: generation.n_read], generation.texts)
                if self.interleave and generation.n_read < len(generation.ids):
                    self._reading.append(generation)
                    return False
            generation.end_prompt()
        return not generation.finished

    def _draw(self) -> None:
        if self._texts is not None:
            writing = self._writing
            with _failing(writing):
                settings, generators = [each.sampling for each in writing], [each.generator for each in writing]
                drawn = draw(self._texts.logits, self._texts.seen, settings, generators)
                for generation, token_id, logits in zip(writing, drawn, self._texts.logits, strict=True):
                    with _failing([generation]):
                        if token_id < 0:
                            raise UserError(NOT_FINITE)
                        generation.token_id = token_id
                        generation.accept(token_id, logits)
            self._keep_unfinished()

    def _keep_unfinished(self) -> None:
        """Remove the rows of texts that have ended or are cancelled."""
        rows = [row for row, text in enumerate(self._writing) if not (text.finished or text.cancelled)]
        if len(rows) < len(self._writing):
            self._writing = [self._writing[row] for row in rows]
            self._texts = select_rows(self._texts, rows) if rows else None
