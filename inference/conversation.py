"""sample.py interactive=true: a person and a model write one text by turns."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from common.console import say, show
from common.settings import UserError
from data.text_stream import TextStream
from data.tokenizer import Tokenizer
from inference.generate import SamplingConfig, Texts, draw, next_token_probabilities, read
from model.gpt import GPT


class Conversation:
    """The text so far. The model has read what people have seen of it, no more and no less.

    An answer may end within a token: before a stop string, or at a character that is not whole. As a state is a value,
    the one before that token is still there, and what was shown since is read again with the text that comes next.
    """

    def __init__(
        self,
        gpt: GPT,
        tokenizer: Tokenizer,
        sampling: SamplingConfig,
        stop: Sequence[str] = (),
        seed: int = 1,
    ) -> None:
        """`stop`: texts that end an answer and are no part of it."""
        self.text = ""
        """All that was added and answered."""
        self.n_tokens = 0
        """Drawn so far."""
        self.ended = False
        """Whether the last answer is where the model would end the text."""
        self._gpt, self._tokenizer, self._sampling, self._stop = gpt, tokenizer, sampling, tuple(stop)
        self._generator = torch.Generator().manual_seed(seed)
        self._texts = self._read([tokenizer.eot_id], None)  # in training, every text follows the end of another
        self._unread = ""  # what was shown after that

    def add(self, text: str) -> None:
        """Read what a person writes.

        Raises:
            UserError: the model has fewer learned positions left than these tokens; the conversation is as before.
        """
        self.ended = False
        token_ids, left = self._tokenizer.encode(self._unread + text), self.left
        if left is not None and len(token_ids) > left:
            raise UserError(
                f"these are {len(token_ids)} tokens, and of the model's {self._gpt.config.max_len} learned positions "
                f"{left} are left: write less, or begin anew"
            )
        if token_ids:
            self._texts = self._read(token_ids, self._texts)
        self._unread = ""
        self.text += text

    def answer(self, max_new_tokens: int) -> Iterator[str]:
        """What the model writes next, as it comes. Whoever stops listening has a conversation that ends there."""
        stream, texts = TextStream(self._tokenizer, self._stop), self._texts
        for _ in range(max_new_tokens):
            if self.ended or stream.stopped or self._left(texts) == 0:
                return
            probabilities = next_token_probabilities(texts.logits, self._sampling, texts.seen)
            token_id = int(draw(probabilities, [self._generator]))
            texts = self._read([token_id], texts)
            self.ended = token_id == self._tokenizer.eot_id
            self.n_tokens += not self.ended
            piece = stream.end() if self.ended else stream.push(token_id)
            self.text += piece
            self._unread += piece
            if stream.whole:
                self._texts, self._unread = texts, ""
            yield piece

    @property
    def left(self) -> int | None:
        """Learned positions that are left for more tokens; None: the model has no such limit."""
        return self._left(self._texts)

    def _left(self, texts: Texts) -> int | None:
        max_len = self._gpt.config.max_len
        return None if max_len is None else max_len - texts.state.position[0]

    def _read(self, token_ids: list[int], before: Texts | None) -> Texts:
        row = torch.tensor([token_ids], device=self._gpt.embed.weight.device)
        return read(self._gpt, row, self._tokenizer.n_vocab, before)


def converse(conversation: Conversation, max_new_tokens: int) -> None:
    """Take turns at the terminal (or with lines from a pipe) until the person, or the model, has no more to say."""
    with contextlib.suppress(ImportError):  # it gives `input` a line that can be edited, and earlier ones
        import readline  # noqa: F401
    say(_HOW)
    if conversation.text:
        show(conversation.text + "\n")
    seconds = 0.0
    while (text := _ask()) is not None:
        started = time.perf_counter()
        try:
            conversation.add(text)
            for piece in conversation.answer(max_new_tokens):
                show(piece)
        except KeyboardInterrupt:  # of this answer
            pass
        except UserError as error:
            show(f"({error})")
        seconds += time.perf_counter() - started
        show("\n(the model ends the text here)\n" if conversation.ended else "\n")
        if conversation.left == 0:
            say("the model's learned positions are full, and the conversation is over: begin anew")
            break
    say_rate(conversation.n_tokens, seconds)


_HOW = (
    "Type, and the model continues what you typed. Enter alone: it goes on. A \\ at the end of a line: one more line. "
    "Ctrl-C: it stops. Ctrl-D: the end."
)


def _ask() -> str | None:
    """What a person types, lines that end with a backslash joined; None: nothing more."""
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
            show("(that line was not UTF-8: type it anew)\n")
            continue
        if not line.endswith("\\"):
            return text + line
        text += line.removesuffix("\\") + "\n"


def say_rate(n_tokens: int, seconds: float) -> None:
    """How much was sampled, and how fast."""
    say(f"({n_tokens} tokens, {n_tokens / max(seconds, 1e-9):.0f} a second)")
