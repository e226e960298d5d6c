"""sample.py interactive=true: a person and a model write one text in turns."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch

from common.console import count, say, show
from common.settings import UserError
from data.tokenizer import Tokenizer
from inference.engine import Engine, stream
from inference.generation import Generation
from inference.prefill import Request, prefill
from model.gpt import GPT


class Conversation:
    """The text so far. The model reads exactly the part of an answer that was shown.

    An answer may end within a token: before a stop string, or at an incomplete character. So the model reads the shown
    part of it again, with the next text, from the state before the answer.
    """

    def __init__(self, gpt: GPT, tokenizer: Tokenizer, request: Request) -> None:
        """`request`: what the text begins with, and how to continue it."""
        self.text = ""
        """Everything that was added and answered."""
        self.n_tokens = 0
        """Tokens drawn so far."""
        self.ended = False
        """Whether the model ended the text with the last answer."""
        self.request = request
        """The text so far. Its `ids` are the shown part of the last answer, which the model has yet to read."""
        self._gpt, self._tokenizer = gpt, tokenizer
        self._generator = torch.Generator().manual_seed(request.seed)
        self._engine = Engine(gpt, tokenizer.n_vocab, max_streams=1, eot_id=tokenizer.eot_id)

    def add(self, text: str) -> None:
        """Read the last answer and what a person writes after it.

        Raises:
            UserError: the text does not fit into learned positions or memory; the conversation is unchanged.
        """
        request = replace(self.request, ids=(*self.request.ids, *self._tokenizer.encode(text)))
        self._engine.check(request)
        self.request = prefill(self._gpt, self._tokenizer, request, len(request.ids))
        self.text, self.ended = self.text + text, False

    def answer(self, max_new_tokens: int) -> Iterator[str]:
        """Yield what the model writes next as it comes. If the caller stops listening, the answer ends there."""
        self.add("")
        n_new = max_new_tokens if self.left is None else min(max_new_tokens, self.left)
        if n_new == 0:
            return
        # One more token than wanted: at its limit, a generation would show an incomplete last character.
        answer = Generation(replace(self.request, max_tokens=n_new + 1), self._tokenizer)
        answer.generator = self._generator
        self._engine.submit([answer])
        n_whole, rest = 0, ""  # tokens up to one that ends with a whole character, and what is shown after it
        try:
            for text in islice(stream(self._engine, answer), n_new):
                self.text += text
                rest += text
                if answer.whole:
                    n_whole, rest = len(answer.drawn), ""
                yield text
        finally:
            answer.cancelled = True  # first: a second Ctrl-C may interrupt the rest
            self.ended = answer.finish_reason == "end_of_text"
            self.n_tokens += answer.n_tokens
            self.request = replace(self.request, ids=(*answer.drawn[:n_whole], *self._tokenizer.encode(rest)))
            self._engine.turn()  # the answer leaves, and its memory is free

    @property
    def left(self) -> int | None:
        """Learned positions left for more tokens; None: the model has no such limit."""
        max_len = self._gpt.config.max_len
        return None if max_len is None else max(0, max_len - self.request.n_prompt)


def converse(conversation: Conversation, max_new_tokens: int) -> None:
    """Take turns at the terminal, or with lines from a pipe, until the input ends."""
    with contextlib.suppress(ImportError):  # it gives `input` line editing and a history
        import readline  # noqa: F401
    say(
        "Type a text, and the model continues it. Press Enter alone to let it continue. End a line with \\ to add "
        "another line. Ctrl-C stops an answer, Ctrl-D ends the conversation."
    )
    if conversation.text:
        show(conversation.text + "\n")
    seconds = 0.0
    while (text := _ask()) is not None:
        started, end = time.perf_counter(), "\n"
        try:
            conversation.add(text)
            for answer in conversation.answer(max_new_tokens):
                show(answer)
            if conversation.ended:
                end = "\n(the model ends the text here)\n"
        except KeyboardInterrupt:  # it ends this answer only
            pass
        except UserError as error:
            show(f"({error})")
        seconds += time.perf_counter() - started
        show(end)
        if conversation.left == 0:
            say("the model's learned positions are used up: start a new conversation")
            break
    say_rate(conversation.n_tokens, seconds)


def _ask() -> str | None:
    """What a person types, with lines that end in a backslash joined; None: the input has ended."""
    typing = sys.stdin.isatty() and sys.stdout.isatty()
    text = ""
    while True:
        try:
            line = input(("... " if text else "> ") if typing else "")
            line.encode()
        except (EOFError, KeyboardInterrupt):
            show("\n" if typing else "")
            return None
        except UnicodeError:
            show("(that line was not UTF-8: type it again)\n")
            continue
        if not line.endswith("\\"):
            return text + line
        text += line.removesuffix("\\") + "\n"


def say_rate(n_tokens: int, seconds: float) -> None:
    """Print how many tokens were drawn, and how fast."""
    rate = f", {n_tokens / max(seconds, 1e-9):.0f} a second"
    more = rate if n_tokens else ": the text ended at once; try another seed or a longer prompt"
    say(f"({count(n_tokens, 'token')}{more})")
