"""Token ids to text, one after the other, as people may see it: whole characters, and nothing of a stop string."""

import codecs
from collections.abc import Sequence

from data.tokenizer import Tokenizer


class TextStream:
    """The text of a continuation that grows token by token.

    A character of several tokens comes when it is whole; bytes that are no UTF-8 come as U+FFFD. What could be the
    beginning of a stop string is held back until it is clear that it is none. The text does not depend on where tokens
    begin and end: it ends before the first stop string that is complete (of several that end there, the longest).
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """`stop`: texts that end the continuation and are no part of it; none is empty."""
        self.stopped = False
        """Whether a stop string has ended the text: nothing comes any more."""
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text that is certain with one more token; often some of it came before, or it comes later: ""."""
        return self._add(self._decoder.decode(self._tokenizer.decode_bytes([token_id])))

    def end(self) -> str:
        """The rest, where no token follows."""
        rest = self._add(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return rest

    @property
    def whole(self) -> bool:
        """Whether all text of the tokens so far has come: no character is open, nothing held back or cut off."""
        return not (self.stopped or self._held or self._decoder.getstate()[0])

    def _add(self, text: str) -> str:
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
    """Characters at the end of `text` that could begin `stop`, which it does not hold."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
