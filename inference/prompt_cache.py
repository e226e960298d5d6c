"""A cache of recent prompts: a new prompt is read only from the end of its longest cached prefix."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from inference.prefill import Prefix
from model.state import select_rows, state_bytes


class PromptCache:
    """Maps the tokens of texts to the states after them. Drops the least recently used first."""

    def __init__(self, max_states: int, max_bytes: int) -> None:
        """`max_bytes`: limit on the total size of the cached tensors, which stay on the model's device."""
        self.max_states, self.max_bytes = max_states, max_bytes
        self.n_bytes = 0
        self._kept: OrderedDict[bytes, tuple[int, Prefix]] = OrderedDict()
        """The number of tokens and their prefix, by the tokens as int32."""

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, ids: Sequence[int]) -> tuple[int, Prefix | None]:
        """Return the longest cached prefix of `ids`: its number of tokens, and its state."""
        tokens = np.array(ids, np.int32).tobytes()
        known = max(filter(tokens.startswith, self._kept), key=len, default=b"")
        if not known:
            return 0, None
        self._kept.move_to_end(known)
        return self._kept[known]

    def add(self, ids: Sequence[int], prefix: Prefix) -> None:
        """Cache the state after the tokens `ids`, dropping others if needed; skip a state larger than the cache."""
        tokens = np.array(ids, np.int32).tobytes()
        size = len(tokens) + state_bytes(prefix)
        if size > self.max_bytes or not self.max_states:
            return
        if tokens not in self._kept:
            self._kept[tokens] = len(ids), select_rows(prefix, [0])  # a copy, without the room behind a cache
            self.n_bytes += size
        self._kept.move_to_end(tokens)
        while len(self) > self.max_states or self.n_bytes > self.max_bytes:
            dropped, (_, prefix) = self._kept.popitem(last=False)
            self.n_bytes -= len(dropped) + state_bytes(prefix)
