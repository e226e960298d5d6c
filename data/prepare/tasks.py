"""Recall tasks as sources: documents that a seed generates, which end by asking for what stands earlier in them.

All documents of a task have the same length, and their answers the same places: a training sequence of one document
and its <|endoftext|> is always a whole document. Texts are ASCII, so that with tokenizer=bytes a character is a token.
"""

import string
from collections.abc import Iterator
from random import Random
from typing import Any, Literal

from pydantic import Field, model_validator

from data.prepare.items import Position, Raw, Seen
from data.prepare.sources import Source

_LETTERS = string.ascii_letters + string.digits + "+/"
_VALUES = "".join(c for c in string.punctuation if c not in _LETTERS)
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


class TaskSource(Source):
    """Documents of a task. Each depends on the settings, the seed and its number alone."""

    n_documents: int = Field(ge=1, le=2**32)
    """How many to generate."""
    seed: int
    """What they are drawn with."""

    @property
    def answers(self) -> range:
        """The places of the answers in a text, in characters; the text ends with the last."""
        raise NotImplementedError

    def text(self, draw: Random) -> str:
        """Generate a text."""
        raise NotImplementedError

    def inputs(self) -> dict[str, int | None]:
        """Return the task as one input."""
        return {self.name: self.n_documents * (self.answers[-1] + 1)}

    def documents(self, seen: Seen = lambda _: None, after: Position | None = None) -> Iterator[Raw]:
        """Yield the numbers of documents, which worker processes generate."""
        size, done = self.answers[-1] + 1, after.number if after else 0
        seen(size * done)
        for number in range(done + 1, self.n_documents + 1):
            yield Raw(Position(self.name, number), number, size)
            seen(size)

    def text_and_set(self, content: Any) -> tuple[Any, str]:
        """Generate a document."""
        return self.text(Random(f"{self.seed} {content}")), self.name


class MqarSource(TaskSource, defaults="data/mqar"):
    """Multi-query associative recall (Arora et al. 2023): pairs of a key and a value, then each key once more.

    "a!b;c?" goes on with "b;a!c?". Keys are distinct; values are drawn from 30 characters.
    """

    name: Literal["mqar"]
    n_pairs: int = Field(ge=1)
    """Pairs of a key and a value."""
    key_letters: int = Field(ge=1, le=3)
    """Characters of a key, each one of 64; a value is one character."""

    @model_validator(mode="after")
    def _check_keys(self) -> "MqarSource":
        if self.n_pairs > (n_keys := len(_LETTERS) ** self.key_letters):
            keys = f"the {n_keys:,} keys of key_letters={self.key_letters}"
            raise ValueError(f"n_pairs={self.n_pairs} is more than {keys}: use at most that, or more letters")
        return self

    @property
    def answers(self) -> range:
        """The value after each key that is asked for."""
        pair = self.key_letters + 1
        return range((self.n_pairs + 1) * pair - 1, 2 * self.n_pairs * pair, pair)

    def text(self, draw: Random) -> str:
        """Draw the pairs, then the order in which they are asked for."""
        numbers = draw.sample(range(len(_LETTERS) ** self.key_letters), self.n_pairs)
        keys = ["".join(_LETTERS[n // 64**i % 64] for i in range(self.key_letters)) for n in numbers]
        pairs = [key + draw.choice(_VALUES) for key in keys]
        return "".join(pairs + draw.sample(pairs, self.n_pairs))


class InductionSource(TaskSource, defaults="data/induction"):
    """Induction heads (Olsson et al. 2022): random letters ... a b ... a, answered by b; a has one earlier place."""

    name: Literal["induction"]
    length: int = Field(ge=2, le=2**24)
    """Letters before the one that is asked for."""

    @property
    def answers(self) -> range:
        """The last letter."""
        return range(self.length + 1, self.length + 2)

    def text(self, draw: Random) -> str:
        """Draw the letter, the others, and its place among them."""
        asked = draw.choice(_LETTERS)
        letters = draw.choices(_LETTERS.replace(asked, ""), k=self.length)
        place = draw.randrange(self.length - 1)
        letters[place] = asked
        return "".join([*letters, asked, letters[place + 1]])


class SelectiveCopySource(TaskSource, defaults="data/selective_copy"):
    """Selective copying (Gu and Dao 2023): letters scattered among dots; after a colon they follow in order."""

    name: Literal["selective_copy"]
    n_letters: int = Field(ge=1)
    """Letters to copy."""
    length: int = Field(ge=1, le=2**24)
    """Letters and dots before the colon."""

    @model_validator(mode="after")
    def _check_letters(self) -> "SelectiveCopySource":
        if self.n_letters > self.length:
            raise ValueError(f"n_letters={self.n_letters} is more than the length={self.length} of the text: lower it")
        return self

    @property
    def answers(self) -> range:
        """The letters after the colon."""
        return range(self.length + 1, self.length + 1 + self.n_letters)

    def text(self, draw: Random) -> str:
        """Draw the letters and their places."""
        letters, places = draw.choices(_LETTERS, k=self.n_letters), draw.sample(range(self.length), self.n_letters)
        scattered = dict(zip(sorted(places), letters, strict=True))
        return "".join([*(scattered.get(i, ".") for i in range(self.length)), ":", *letters])


class PasskeySource(TaskSource, defaults="data/passkey"):
    """A passkey of five digits in filler (Mohtashami and Jaggi 2023), asked for at the end."""

    name: Literal["passkey"]
    length: int = Field(ge=1, le=2**24)
    """Characters of filler before and after the passkey, together."""

    @property
    def answers(self) -> range:
        """The digits at the end."""
        length = len(self.text(Random(0)))
        return range(length - 5, length)

    def text(self, draw: Random) -> str:
        """Draw the passkey, and the sentence that it stands before."""
        key, filler = draw.randrange(10_000, 100_000), (_FILLER * (self.length // len(_FILLER) + 1))[: self.length]
        place = draw.choice([i for i, letter in enumerate(filler) if letter.isupper()])
        said = f"The pass key is {key}. Remember it. {key} is the pass key. "
        return f"{filler[:place]}{said}{filler[place:]} What is the pass key? The pass key is {key}"


Task = MqarSource | InductionSource | SelectiveCopySource | PasskeySource
