"""Turns a stream of token ids into text: only whole characters, up to a stop string."""

import codecs
from collections.abc import Sequence

from data.tokenizer import Tokenizer


class TextStream:
    """The text of a continuation that grows token by token.

    A character of several tokens is returned when it is whole; bytes that are not UTF-8 become U+FFFD. Text that may be
    the start of a stop string is held back until this is certain. Token boundaries do not matter: the text ends before
    the first complete stop string (the longest, if several end at the same place).
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """`stop`: non-empty texts that end the continuation and are not returned."""
        self.stopped = False
        """Whether a stop string has ended the text."""
        self.n_chars = 0
        """Whole characters of all tokens so far, returned or not."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
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
        ends = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text`, which does not contain `stop`, could begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
