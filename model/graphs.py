"""The decoding step as CUDA graphs: a step of one token launches hundreds of small kernels, and a graph all at once.

A graph reads and writes fixed memory, so it fits models whose state has one size. It runs once it has passed `check`,
before the first step on a GPU: see model/ops/checks.py.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from common.console import say_once
from common.settings import decode
from model.compiled import shortened, without_zeros
from model.gpt import GPT, GPTConfig, GPTState
from model.ops.checks import Wrong, failed_check
from model.state import cat_states, select_rows


class DecodingStep:
    """`gpt(token_ids, state, return_state=True)` for one more token of up to `max_rows` texts.

    A graph is recorded for 1, 2, 4, ... and `max_rows` rows when it is first needed, and fewer texts use its first
    rows. The model's weights must stay where they are. Where graphs cannot be used, as on CPUs, the model is called.
    """

    def __init__(self, gpt: GPT, max_rows: int) -> None:
        self._gpt, self._max_rows = gpt, max_rows
        self._usable: bool | None = None
        self._graphs: dict[int, _Graph] = {}

    def __call__(
        self, token_ids: Tensor, state: GPTState, return_state: bool = True
    ) -> tuple[Tensor, GPTState]:
        """(B, 1) ids -> logits (B, 1, n_vocab) and the state. The next call may overwrite both."""
        if self._usable is None:
            self._usable = use_graphs(self._gpt, state)
        if not self._usable or torch.is_autocast_enabled(
            "cuda"
        ):  # the weights that autocast has cast do not stay
            return self._gpt(token_ids, state, return_state=True)
        rows = min(1 << (len(token_ids) - 1).bit_length(), self._max_rows)
        if rows not in self._graphs:
            self._graphs[rows] = _Graph(self._gpt, rows, token_ids, state)
        return self._graphs[rows](token_ids, state)


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

    def __call__(self, token_ids: Tensor, state: GPTState) -> tuple[Tensor, GPTState]:
        B = len(token_ids)
        if state is not self._returned:  # texts have come or gone
            self._returned = tree_map_only(Tensor, lambda x: x[:B], self._state)
            torch._foreach_copy_(_tensors(self._returned), _tensors(state))
        self._token_ids[:B] = token_ids
        self._replay()
        return self._logits[:B], self._returned


def record(step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record a step on the GPU. Return a function that replays it, and its result, which each replay overwrites."""
    device = (
        step().device
    )  # this run compiles kernels, which is not possible while a graph is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        result = step()
    return graph.replay, result


def use_graphs(gpt: GPT, state: GPTState) -> bool:
    """Choose whether a model decodes with graphs, and print the choice for a GPU once."""
    weight = gpt.embed.weight
    if weight.device.type != "cuda":
        return False
    why_not: str | None = "the model's state grows with the text, or counts its tokens"
    if all(x is None or isinstance(x, Tensor) for x in tree_leaves(state)):
        about = {
            "model": shortened(gpt.config),
            "dtype": str(weight.dtype)[6:],
            "documents": gpt.eot_id is not None,
        }
        failure = failed_check(
            "CUDA graphs of decoding", check, f"cuda:{weight.device.index}", **about
        )
        why_not = failure and f"a graph {failure}"
    say_once(
        f"decoding without CUDA graphs, which is slower: {why_not}"
        if why_not
        else "decoding with CUDA graphs"
    )
    return why_not is None


@torch.inference_mode()
def check(device: str, model: str, dtype: str, documents: bool) -> None:
    """Compare steps of graphs with the model's own, while texts come and go.

    Args:
        model: GPTConfig as JSON.
        dtype: of the weights.
        documents: whether the model keeps documents apart.

    Raises:
        Wrong: logits or states have other bits.
    """
    torch.manual_seed(0)
    config = decode(GPTConfig, json.loads(model))
    n_ids = min(config.n_vocab, 4)  # so few that strings occur again
    gpt = (
        without_zeros(GPT(config, n_ids - 1 if documents else None))
        .to(device, getattr(torch, dtype))
        .eval()
    )
    step = DecodingStep(gpt, max_rows=4)
    step._usable = True

    prompts = cat_states([gpt(torch.randint(n_ids, (6, 9), device=device), return_state=True)[1]])
    state = select_rows(prompts, range(4))
    for token, rows in enumerate((4, 4, 2, 2, 4, 4)):
        if token == 2:
            state = select_rows(state, [2, 0])
        if token == 4:
            state = cat_states([state, select_rows(prompts, [4, 5])])
        token_ids = torch.randint(n_ids, (rows, 1), device=device)
        before = tree_map_only(Tensor, torch.clone, state)
        logits, state = step(token_ids, state)
        own = gpt(token_ids, before, return_state=True)
        if not all(map(torch.equal, _tensors((logits, state)), _tensors(own))):
            raise Wrong(
                f"a step has other bits than without a graph (token {token} of {rows} texts)"
            )


def _tensors(state: Any) -> list[Tensor]:
    return [x for x in tree_leaves(state) if x is not None]
