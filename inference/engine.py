"""The token loop of all that generates text: sample.py, conversations, lm_eval, the server.

Many texts go through the model in one batch (continuous batching), and each can join and leave
between two steps. The engine works in turns. Each turn

    1. admits waiting texts, first come, first served, while there are places;
    2. reads the tokens drawn in the turn before, in one forward pass;
    3. reads their prompts, each after its longest prefix in a cache: all of them, or, with
       `interleave`, one chunk of one prompt, so that a long prompt delays neither the other texts
       nor other prompts;
    4. draws a token of every text whose prompt is read.
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config_files import config_file
from common.settings import UserError
from data.tokenizers.build import Tokenizer
from inference.generation import Generation, Prefix, Request
from inference.sampling import NOT_FINITE, SamplingConfig, sample_next_tokens
from model.gpt import GPT
from model.graphs import DecodingStep
from model.state_trees import cat_states, select_rows, state_bytes

PROMPT_CHUNK = 256
"""Tokens of a prompt that go through the model at once on a CPU.

This bounds memory, and the time that other texts wait in the server. All prompts are cut at its
multiples, so a prompt read from a cached prefix gives the same bits as one read in one go.
"""
_PROMPT_CHUNK_ON_GPU = 2048  # fewer leave most multiprocessors idle


@torch.inference_mode()
def read_tokens(
    gpt: GPT,
    token_ids: Tensor,
    n_vocab: int,
    before: Prefix | None = None,
    step: Callable[..., Any] | None = None,
) -> tuple[Prefix, Tensor]:
    """Read (B, T) more tokens of B texts.

    Return the new prefix, and the logits after each token, (B, T, n_vocab).

    Args:
        n_vocab: ids from here on, the padding of the embedding, are never drawn.
        before: the prefix that these tokens continue; None: the texts start here.
        step: called instead of the model; its next call may overwrite the returned state.
    """
    state = None if before is None else before.state
    step = step or gpt
    logits, state = step(token_ids.to(gpt.device), state, return_state=True)
    logits = logits[..., :n_vocab]
    last = logits[:, -1].clone()  # a view would keep the logits of all tokens
    return Prefix(last, state), logits


@contextlib.contextmanager
def _failing(generations: Sequence[Generation]) -> Iterator[None]:
    """On an exception, end these texts with the error and continue."""
    try:
        yield
    except Exception as error:
        for generation in generations:
            generation.fail(error)


class PromptCache:
    """Maps the tokens of texts to the states after them. Drops the least recently used first."""

    def __init__(self, max_states: int, max_bytes: int) -> None:
        """`max_bytes`: most bytes of the cached tensors, which stay on the model's device."""
        self.max_states = max_states
        self.max_bytes = max_bytes
        self._kept = OrderedDict[bytes, Prefix]()
        """States by the bytes of their tokens, as int32."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        """Bytes of the cached tensors."""
        return sum(map(state_bytes, self._kept.values()))

    def find_longest(self, ids: Sequence[int]) -> tuple[int, Prefix | None]:
        """Return the longest cached prefix of `ids`: its number of tokens, and its state."""
        tokens = np.array(ids, np.int32).tobytes()
        prefix_tokens = max(filter(tokens.startswith, self._kept), key=len, default=b"")
        if prefix_tokens:
            self._kept.move_to_end(prefix_tokens)
        return len(prefix_tokens) // 4, self._kept.get(prefix_tokens)

    def add(self, ids: Sequence[int], prefix: Prefix) -> None:
        """Cache the state after the tokens `ids`, dropping others if needed.

        A state larger than the cache is not kept.
        """
        if state_bytes(prefix) > self.max_bytes or not self.max_states:
            return
        tokens = np.array(ids, np.int32).tobytes()
        if tokens not in self._kept:
            self._kept[tokens] = select_rows(prefix, [0])  # a copy, without the room behind a cache
        self._kept.move_to_end(tokens)
        while len(self) > self.max_states or self.n_bytes > self.max_bytes:
            self._kept.popitem(last=False)


class Engine:
    """Continues texts, up to `max_streams` at once; the others wait."""

    def __init__(
        self,
        gpt: GPT,
        n_vocab: int,
        max_streams: int,
        interleave: bool = False,
        cache: PromptCache | None = None,
    ) -> None:
        """Create an engine without texts.

        Args:
            n_vocab: as for `read_tokens`.
            interleave: read prompts chunk by chunk between other texts' tokens.
            cache: keeps the states of prompts; None: no states. It does not change the output, to
                the bit.
        """
        self.gpt = gpt
        self.n_vocab = n_vocab
        self.max_streams = max_streams
        self.interleave = interleave
        self.cache = PromptCache(0, 0) if cache is None else cache
        self.waiting = deque[Generation]()
        self._reading = deque[Generation]()
        self._writing: list[Generation] = []
        self._texts: Prefix | None = None
        """One row for each of `_writing`; `_step` overwrites their state."""
        self._step = DecodingStep(gpt, max_streams)

    def submit(self, generations: Iterable[Generation]) -> None:
        """Add texts; they start in the next turns."""
        self.waiting.extend(generations)

    @property
    def n_admitted(self) -> int:
        """Number of texts that have places."""
        return len(self._reading) + len(self._writing)

    @torch.inference_mode()
    def turn(self) -> None:
        """Draw a token of every text whose prompt is read.

        An error in one text ends that text alone: see `_failing`.
        """
        self._admit()
        self._read_drawn()
        self._read_prompts()
        self._draw_tokens()

    def check_length(self, request: Request) -> None:
        """Raise UserError if a request exceeds the learned positions."""
        max_len = self.gpt.config.max_len
        n_read = len(request.ids) + max(request.max_tokens - 1, 0)  # the last one is not read
        if max_len is not None and n_read > max_len:
            raise UserError(
                f"a prompt of {len(request.ids)} tokens (<|endoftext|> before it included) and "
                f"{request.max_tokens} new tokens do not fit into the model's {max_len} learned "
                "positions: shorten one of them"
            )

    def fail(self, error: Exception) -> None:
        """End all texts that have places with an error."""
        for generation in [*self._reading, *self._writing]:
            generation.fail(error)
        self._reading = deque()
        self._writing = []
        self._texts = None

    def _admit(self) -> None:
        self._keep_unfinished()
        self._reading = deque(text for text in self._reading if not text.cancelled)
        self.waiting = deque(text for text in self.waiting if not text.cancelled)
        while self.waiting and self.n_admitted < self.max_streams:
            self._reading.append(self.waiting.popleft())

    def _read_drawn(self) -> None:
        if self._writing:
            with _failing(self._writing):
                drawn = torch.tensor([generation.drawn[-1:] for generation in self._writing])
                self._texts, _ = read_tokens(self.gpt, drawn, self.n_vocab, self._texts, self._step)
            self._keep_unfinished()

    def _read_prompts(self) -> None:
        n_prompts = 1 if self.interleave and self._reading else len(self._reading)
        prompts = [self._reading.popleft() for _ in range(n_prompts)]
        ready = [generation for generation in prompts if self._read_prompt(generation)]
        if not ready:
            return
        with _failing(ready):  # such as running out of memory
            prefixes = [self._texts] if self._writing else []
            prefixes += [generation.prefix for generation in ready]
            self._texts = cat_states(prefixes)
            self._writing += ready
        for generation in ready:
            generation.prefix = None

    def _read_prompt(self, generation: Generation) -> bool:
        """Read a prompt, or one chunk of it with `interleave`. Return whether it is read."""
        ids = generation.request.ids
        size = PROMPT_CHUNK if self.gpt.device.type == "cpu" else _PROMPT_CHUNK_ON_GPU
        with _failing([generation]):
            if generation.may_skip and generation.prefix is None:
                generation.n_read, generation.prefix = self.cache.find_longest(ids)
                generation.n_cached = generation.n_read
            while generation.n_read < len(ids):
                chunk = torch.tensor([ids[generation.n_read : generation.n_read + size]])
                prefix, logits = read_tokens(self.gpt, chunk, self.n_vocab, generation.prefix)
                generation.accept_prompt(prefix, logits[0])
                # Keep the states 0, 1, 2, 4, 8, ... chunks before the last whole chunk. A prompt
                # that differs only in its last m tokens then rereads at most about 2 m tokens.
                n_read = generation.n_read
                n_left = len(ids) // size - n_read // size
                if n_read % size == 0 and n_left & (n_left - 1) == 0:
                    self.cache.add(ids[:n_read], prefix)
                if self.interleave and n_read < len(ids):
                    self._reading.append(generation)  # its next chunk has to wait for its turn
                    return False
            generation.end_prompt()
        return not generation.finished

    def _draw_tokens(self) -> None:
        if self._texts is None:
            return
        with _failing(self._writing):
            drawn = sample_next_tokens(
                self._texts.logits,
                [generation.sampling for generation in self._writing],
                [generation.generator for generation in self._writing],
            )
            for generation, token_id, logits in zip(
                self._writing, drawn, self._texts.logits, strict=True
            ):
                with _failing([generation]):
                    if token_id < 0:
                        raise UserError(NOT_FINITE)
                    generation.accept(token_id, logits)
        self._keep_unfinished()

    def _keep_unfinished(self) -> None:
        """Remove the rows of texts that have ended or are cancelled."""
        rows = [
            row for row, text in enumerate(self._writing) if not (text.finished or text.cancelled)
        ]
        if len(rows) < len(self._writing):
            self._writing = [self._writing[row] for row in rows]
            self._texts = select_rows(self._texts, rows) if rows else None


def stream_text(engine: Engine, generation: Generation) -> Iterator[str]:
    """Run the engine until this text ends, and yield the text that each turn adds.

    Other texts advance too.

    Raises:
        UserError: the model's logits are not finite.
    """
    text = generation.text
    if text:
        yield text
    while not generation.finished:
        engine.turn()
        yield generation.text[len(text) :]
        text = generation.text
    if generation.error:
        raise generation.error


def generate(gpt: GPT, tokenizer: Tokenizer, request: Request | str) -> Iterator[str]:
    """Yield the text that continues a request's prompt, as it is drawn.

    Args:
        request: a text is a prompt, with the default settings of sample.py.

    Raises:
        UserError: the request is longer than the model's texts, or logits are not finite.
    """
    if isinstance(request, str):
        values = config_file("sample").values
        sampling = SamplingConfig(**{key: values[key] for key in SamplingConfig.model_fields})
        ids = (tokenizer.eot_id, *tokenizer.encode(request))
        request = Request(ids, values["max_new_tokens"], sampling, values["seed"])
    engine = Engine(gpt, tokenizer.n_vocab, max_streams=1)
    engine.check_length(request)
    text = Generation(request, tokenizer)
    engine.submit([text])
    return stream_text(engine, text)
