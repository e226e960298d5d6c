"""The gradient of a text of any length, one piece at a time: memory is that of a piece, and of a state for each.

A model whose state has one size turns a piece and the state before it into a loss and the state after it. So a text is
read twice. The first time, from its beginning and without gradients, only the state before each piece is kept. The
second time, the last piece comes first: it is read again from its state, and its backward pass also gives the gradient
of that state, which is where the backward pass of the piece before begins. The sum is the gradient of the whole text.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from model.gpt import GPTState
from trainer.runtime import Runtime


class Pieces:
    """A micro-batch cut into pieces of `runtime.sequence_chunk` tokens, or whole.

    Call `forward` and then `backward` for each piece, from the last to the first.
    """

    def __init__(
        self,
        summed_loss: nn.Module,
        runtime: Runtime,
        token_ids: Tensor,
        targets: Tensor,
        at: Callable[[], None] = lambda: None,
    ) -> None:
        """Read all of the text except the last piece.

        Args:
            summed_loss: a SummedLoss, possibly wrapped by World.wrap.
            at: is called before each piece.
        """
        T = token_ids.shape[1]
        size = min(runtime.sequence_chunk or T, T)
        self._summed_loss, self._runtime = summed_loss, runtime
        self._token_ids, self._targets = token_ids.split(size, dim=1), targets.split(size, dim=1)
        self._before: list[GPTState | None] = [None]
        self._after: Any = None
        """States before the pieces that are not done, and after the piece of the last call."""
        self._gradients: list[Tensor | None] = []
        """Gradients with respect to the state after the last remaining piece."""
        for ids in self._token_ids[:-1]:
            at()
            with torch.no_grad(), runtime.autocast():
                self._before.append(summed_loss(ids, None, self._before[-1], True)[1])
            self._give_back()

    def __len__(self) -> int:
        return len(self._token_ids)

    def forward(self, number: int) -> Tensor:
        """The summed loss of a piece."""
        state, self._after = self._before[number], None
        if number > 0:
            state = self._before[number] = tree_map_only(Tensor, _leaf, state)
        with self._runtime.autocast():
            if state is None and len(self) == 1:
                loss: Tensor = self._summed_loss(self._token_ids[number], self._targets[number])
            else:
                loss, self._after = self._summed_loss(self._token_ids[number], self._targets[number], state, True)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a multiple of what `forward` returned, and through the state of later losses."""
        later = [] if not self._gradients else [*zip(_floats(self._after), self._gradients, strict=True)]
        roots = [(loss, None), *((x, g) for x, g in later if g is not None)]
        torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        self._gradients = [x.grad for x in _floats(self._before.pop())]
        self._give_back()

    def _give_back(self) -> None:
        """Return freed memory to the system after every fourth piece: glibc keeps it, and the process grows with each.

        After every piece, it would cost 7 to 13 % of the time, because memory that is new to a process is slow.
        """
        if len(self._before) % 4 == 0 and len(self) > 1 and self._token_ids[0].is_cpu:
            getattr(ctypes.CDLL(None), "malloc_trim", lambda spare: 0)(0)  # other C libraries do not have it


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.is_floating_point())


def _floats(state: Any) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor) and x.is_floating_point()]
