"""States of recent prompts, so that a prompt that begins like one of them is not read from its beginning."""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from model.state import select_rows, state_bytes


class PromptCache:
    """Texts as a model has read them, by their tokens. The least recently used are dropped first."""

    def __init__(self, max_states: int, max_bytes: int) -> None:
        """`max_bytes`: of all tensors kept, on the model's device."""
        self.max_states, self.max_bytes = max_states, max_bytes
        self.n_bytes = 0
        self._texts: OrderedDict[bytes, tuple[int, Any]] = OrderedDict()
        """The number of tokens and `Texts` after them, by the sha256 of the tokens."""

    def __len__(self) -> int:
        return len(self._texts)

    def longest(self, ids: Sequence[int]) -> tuple[int, Any]:
        """Return the number of tokens at the beginning of `ids` that were read before, and `Texts` after them."""
        lengths = {n for n, _ in self._texts.values() if n <= len(ids)}
        known = [key for key in _sums(ids, lengths) if key in self._texts]
        if not known:
            return 0, None
        self._texts.move_to_end(known[-1])
        return self._texts[known[-1]]

    def add(self, ids: Sequence[int], texts: Any) -> None:
        """Keep a text after the tokens `ids`, and drop others for it. One that is too large alone is not kept."""
        size = state_bytes(texts)
        if size > self.max_bytes or not self.max_states:
            return
        (key,) = _sums(ids, {len(ids)})
        if key not in self._texts:
            self._texts[key] = len(ids), select_rows(texts, [0])  # a copy, without the room behind a cache
            self.n_bytes += size
        self._texts.move_to_end(key)
        while len(self._texts) > self.max_states or self.n_bytes > self.max_bytes:
            _, (_, dropped) = self._texts.popitem(last=False)
            self.n_bytes -= state_bytes(dropped)


def _sums(ids: Sequence[int], lengths: Collection[int]) -> Iterator[bytes]:
    """Yield the sha256 of the first n tokens for each length n, ascending."""
    tokens, total, start = np.array(ids[: max(lengths, default=0)], np.int32), hashlib.sha256(), 0
    for n in sorted(lengths):
        total.update(tokens[start:n].data)
        yield total.digest()
        start = n
