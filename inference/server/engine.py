"""Continuous batching: many texts go through the model together, and come and go between two of its steps.

The engine goes round in turns. A turn

    1. lets texts in that wait, first come first served, while there are places;
    2. reads one piece of one prompt. Prompts take turns: a long one holds up neither texts nor other prompts;
    3. draws a token of every text whose prompt is read, and tells its reader;
    4. reads all of these tokens in one forward pass.

All of this is done in one thread, the engine's own.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from common.console import errors
from common.settings import UserError
from data.tokenizer import Tokenizer
from inference.generate import Texts, draw, next_token_probabilities, read, texts_after
from inference.server.text import Completion
from model.gpt import GPT
from model.state import cat_states, select_rows

PIECE = 256
"""Tokens of a prompt that are read in a turn: all texts wait for them."""
_SECONDS_TO_STOP = 30.0


class Full(UserError):
    """There is no place for more texts now."""


class Stopped(UserError):
    """The engine is stopping, or has stopped."""


class Engine:
    """Continues texts, up to `max_streams` at once; up to `max_queue` more wait.

    `start` and `stop` it, or, in a test, let it `turn`.
    """

    def __init__(self, gpt: GPT, tokenizer: Tokenizer, max_streams: int, max_queue: int) -> None:
        self.gpt, self.tokenizer = gpt, tokenizer
        self.max_streams, self.max_queue = max_streams, max_queue
        self._changed = threading.Condition()  # guards what follows, up to the empty line
        self._waiting: deque[Completion] = deque()
        self._n_admitted = 0
        self._stopping = False

        self._reading: deque[Completion] = deque()
        self._writing: list[Completion] = []
        self._texts: Texts | None = None  # of these, a row each
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to turn."""
        self._thread.start()

    def stop(self) -> None:
        """End all texts with `Stopped`, and take no more."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the step that was under way is done."""
        self._thread.join(_SECONDS_TO_STOP)

    def submit(self, completions: Sequence[Completion]) -> None:
        """Take texts, all or none.

        Raises:
            Full: there are too many already.
            Stopped: the engine takes no more.
        """
        with self._changed:
            if self._stopping:
                raise Stopped("the server is stopping")
            n_open = self._n_admitted + len(self._waiting)
            if n_open + len(completions) > self.max_streams + self.max_queue:
                raise Full(f"{n_open} texts are being written or wait already: try again a little later")
            self._waiting.extend(completions)
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Texts that have places, and texts that wait."""
        with self._changed:
            return self._n_admitted, len(self._waiting)

    def _run(self) -> None:
        while not self._stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._waiting or self._n_admitted)
            try:
                self.turn()
            except Exception as error:  # in the upkeep of the batch itself: nobody may wait for ever
                _fail([*self._reading, *self._writing], error)
                self._reading, self._writing, self._texts = deque(), [], None
                with self._changed:
                    self._n_admitted = 0
        with self._changed:
            completions = [*self._waiting, *self._reading, *self._writing]
        for completion in completions:
            completion.fail(Stopped("the server is stopping"))

    @torch.inference_mode()
    def turn(self) -> None:
        """Let texts in, read a piece of a prompt, write a token of each text."""
        self._admit()
        if self._reading:
            completion = self._reading.popleft()
            try:
                self._read_piece(completion)
            except Exception as error:  # no memory, say: whatever it is, the others go on
                _fail([completion], error)
        if self._writing:
            try:
                self._write()
            except Exception as error:
                _fail(self._writing, error)
                self._keep([])
        with self._changed:
            self._n_admitted = len(self._reading) + len(self._writing)

    def _admit(self) -> None:
        """Drop what nobody waits for any more, and fill the places."""
        self._keep([i for i, completion in enumerate(self._writing) if not completion.cancelled])
        self._reading = deque(completion for completion in self._reading if not completion.cancelled)
        with self._changed:
            self._waiting = deque(completion for completion in self._waiting if not completion.cancelled)
            while self._waiting and len(self._reading) + len(self._writing) < self.max_streams:
                self._reading.append(self._waiting.popleft())
            self._n_admitted = len(self._reading) + len(self._writing)

    def _read_piece(self, completion: Completion) -> None:
        """Read a piece of a prompt. The last makes it a row of the batch; else it is another prompt's turn."""
        piece = completion.ids[completion.n_read : completion.n_read + PIECE]
        ids = torch.tensor([piece], device=self._device)
        before, n_vocab = completion.texts, self.tokenizer.n_vocab
        logits, state = self.gpt(ids, before and before.state, return_state=True)
        completion.accept_prompt(logits[0, :, :n_vocab])
        completion.texts = texts_after(ids, logits[:, -1], state, n_vocab, before)
        completion.n_read += len(piece)
        if completion.n_read == len(completion.ids):
            self._begin(completion)
        else:
            self._reading.append(completion)

    def _begin(self, completion: Completion) -> None:
        """The prompt is read: from here on a token is drawn at every turn."""
        texts, completion.texts = completion.texts, None
        completion.end_prompt()
        if not completion.finished:
            self._texts = texts if self._texts is None else cat_states([self._texts, texts])
            self._writing.append(completion)

    def _write(self) -> None:
        """Draw a token of every text, tell it, and read those of the texts that go on."""
        assert self._texts is not None
        token_ids = [self._draw(row, completion) for row, completion in enumerate(self._writing)]
        going_on = [row for row, completion in enumerate(self._writing) if not completion.finished]
        self._keep(going_on)
        if going_on:
            ids = torch.tensor([[token_ids[row]] for row in going_on], device=self._device)
            self._texts = read(self.gpt, ids, self.tokenizer.n_vocab, self._texts)

    def _draw(self, row: int, completion: Completion) -> int:
        """The next token of one text. What goes wrong with it is its end, and not that of the others."""
        assert self._texts is not None
        logits, seen = self._texts.logits[row : row + 1], self._texts.seen[row : row + 1]
        try:
            probabilities = next_token_probabilities(logits, completion.request.sampling, seen)
            token_id = int(draw(probabilities, [completion.generator]).item())
            completion.accept(token_id, logits)
        except Exception as error:
            _fail([completion], error)
            return self.tokenizer.eot_id
        return token_id

    def _keep(self, rows: list[int]) -> None:
        """Take all but these rows out of the batch."""
        if len(rows) < len(self._writing):
            self._writing = [self._writing[row] for row in rows]
            self._texts = select_rows(self._texts, rows) if rows else None

    @property
    def _device(self) -> torch.device:
        return self.gpt.embed.weight.device


def _fail(completions: Iterable[Completion], error: Exception) -> None:
    """End texts with an error that is none of theirs, and go on with the others."""
    errors.print(f"error: {type(error).__name__}: {error}", markup=False, style="red")
    for completion in completions:
        completion.fail(error)
