"""States of recent prompts, so that a prompt that begins like one of them is not read from its beginning."""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from inference.prefill import Prefix
from model.state import select_rows, state_bytes


class PromptCache:
    """Texts as a model has read them, by their tokens. The least recently used are dropped first."""

    def __init__(self, max_states: int, max_bytes: int) -> None:
        """`max_bytes`: of all tensors kept, on the model's device."""
        self.max_states, self.max_bytes = max_states, max_bytes
        self.n_bytes = 0
        self._prefixes: OrderedDict[bytes, tuple[int, Prefix]] = OrderedDict()
        """The number of tokens and the prefix that they are, by the sha256 of the tokens."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def longest(self, ids: Sequence[int]) -> tuple[int, Prefix | None]:
        """Return how many tokens at the beginning of `ids` were read before, and their prefix."""
        lengths = {n for n, _ in self._prefixes.values() if n <= len(ids)}
        known = [key for key in _sums(ids, lengths) if key in self._prefixes]
        if not known:
            return 0, None
        self._prefixes.move_to_end(known[-1])
        return self._prefixes[known[-1]]

    def add(self, ids: Sequence[int], prefix: Prefix) -> None:
        """Keep a text after the tokens `ids`, and drop others for it. One that is too large alone is not kept."""
        size = state_bytes(prefix)
        if size > self.max_bytes or not self.max_states:
            return
        (key,) = _sums(ids, {len(ids)})
        if key not in self._prefixes:
            self._prefixes[key] = len(ids), select_rows(prefix, [0])  # a copy, without the room behind a cache
            self.n_bytes += size
        self._prefixes.move_to_end(key)
        while len(self._prefixes) > self.max_states or self.n_bytes > self.max_bytes:
            _, (_, dropped) = self._prefixes.popitem(last=False)
            self.n_bytes -= state_bytes(dropped)


def _sums(ids: Sequence[int], lengths: Collection[int]) -> Iterator[bytes]:
    """Yield the sha256 of the first n tokens for each length n, ascending."""
    tokens, total, start = np.array(ids[: max(lengths, default=0)], np.int32), hashlib.sha256(), 0
    for n in sorted(lengths):
        total.update(tokens[start:n].data)
        yield total.digest()
        start = n
