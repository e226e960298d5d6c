"""The decoding step as CUDA graphs: a step of one token launches hundreds of small kernels, and a
graph all at once.

A graph reads and writes fixed memory, so it fits models whose state has one size. Each graph is
replayed once beside the step that it replaces, and is used only if all bits are equal.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from common.console import say_once
from model.gpt import GPT, GPTState


class DecodingStep:
    """`gpt(token_ids, state, return_state=True)` for one more token of up to `max_rows` texts.

    A graph is recorded for 1, 2, 4, ... and `max_rows` rows when it is first needed, and fewer
    texts use its first rows. The model's weights must stay where they are. Where graphs cannot be
    used, as on CPUs, the model is called.
    """

    def __init__(self, gpt: GPT, max_rows: int) -> None:
        self._gpt = gpt
        self._max_rows = max_rows
        self._usable: bool | None = None
        self._graphs: dict[int, _Graph] = {}

    def __call__(
        self, token_ids: Tensor, state: GPTState, return_state: bool = True
    ) -> tuple[Tensor, GPTState]:
        """(B, 1) ids -> logits (B, 1, n_vocab) and the state. The next call may overwrite both."""
        if self._usable is None:
            self._usable = use_graphs(self._gpt, state)
        # The weights that autocast has cast do not stay where they are.
        if self._usable and not torch.is_autocast_enabled("cuda"):
            power_of_two = 1 << (len(token_ids) - 1).bit_length()  # at least as many
            rows = min(power_of_two, self._max_rows)
            graph = self._graphs.get(rows) or self._record(rows, token_ids, state)
            if graph is not None:
                return graph(token_ids, state)
        return self._gpt(token_ids, state, return_state=True)

    def _record(self, rows: int, token_ids: Tensor, state: GPTState) -> "_Graph | None":
        """Record a graph. If it differs from the step that it replaces, no graph is used from now
        on."""
        graph = _Graph(self._gpt, rows, token_ids, state)
        if graph.agrees(self._gpt, token_ids, state):
            self._graphs[rows] = graph
            return graph
        self._usable = False
        _say_without("a replayed graph differs from the step that it replaces")
        return None


class _Graph:
    """The step of up to `rows` texts, in memory of its own."""

    def __init__(self, gpt: GPT, rows: int, token_ids: Tensor, state: GPTState) -> None:
        """`token_ids` and `state` are examples, with any number of rows."""
        self._token_ids = token_ids.new_zeros(rows, 1)
        self._state = tree_map_only(Tensor, lambda x: x.new_zeros(rows, *x.shape[1:]), state)
        self._returned: Any = None

        def step() -> Tensor:
            logits, after = gpt(self._token_ids, self._state, return_state=True)
            torch._foreach_copy_(_tensors(self._state), _tensors(after))
            return logits

        self._replay, self._logits = record(step)

    def agrees(self, gpt: GPT, token_ids: Tensor, state: GPTState) -> bool:
        """Whether a replay has the bits of the model's own step, with as many rows."""
        self(token_ids, state)  # fills the memory
        before = tree_map_only(Tensor, torch.clone, self._state)
        expected = gpt(self._token_ids, before, return_state=True)
        self._replay()
        replayed = _tensors((self._logits, self._state))
        return all(map(torch.equal, replayed, _tensors(expected)))

    def __call__(self, token_ids: Tensor, state: GPTState) -> tuple[Tensor, GPTState]:
        B = len(token_ids)
        if state is not self._returned:  # texts have come or gone
            self._returned = tree_map_only(Tensor, lambda x: x[:B], self._state)
            torch._foreach_copy_(_tensors(self._returned), _tensors(state))
        self._token_ids[:B] = token_ids
        self._replay()
        return self._logits[:B], self._returned


def record(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record a step on the GPU. Return a function that replays it, and its result, which each
    replay overwrites."""
    # This run compiles kernels, which is not possible while a graph is recorded.
    device = step().device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        result = step()
    return graph.replay, result


def use_graphs(gpt: GPT, state: GPTState) -> bool:
    """Choose whether a model decodes with graphs. On a GPU, say why not."""
    if gpt.device.type != "cuda":
        return False
    one_size = all(x is None or isinstance(x, Tensor) for x in tree_leaves(state))
    if not one_size:
        _say_without("the model's state grows with the text, or counts its tokens")
    return one_size


def _say_without(why: str) -> None:
    say_once(f"decoding without CUDA graphs, which is slower: {why}")


def _tensors(state: Any) -> list[Tensor]:
    return [x for x in tree_leaves(state) if x is not None]
