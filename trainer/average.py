"""The running mean of a run's weights, which is less noisy than the last of them."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from model.gpt import GPT
from runtime.checkpoint import AVERAGE
from runtime.distributed import World


class Average:
    """A mean in which the weights after step s count in proportion to s^(1 / share - 1).

    Their mean age is share / (1 + share) of the steps so far, so that one setting fits runs of any
    length, which may also be extended; the first weights are soon forgotten (Shamir & Zhang 2013;
    Karras et al. 2024, section 3.1).
    """

    def __init__(self, gpt: GPT, share: float, world: World) -> None:
        self.tensors: dict[str, Tensor] = {
            AVERAGE + name: p.detach().clone() for name, p in gpt.named_parameters()
        }
        self._share = share
        self._means = [world.local(mean) for mean in self.tensors.values()]
        self._weights = [world.local(p) for p in gpt.parameters()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after `step`, which counts from 1."""
        torch._foreach_lerp_(self._means, self._weights, min(1.0, 1 / (self._share * step)))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange weights and means while the context lasts, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, mean in zip(self._weights, self._means, strict=True):
            before = weight.clone()
            weight.copy_(mean)
            mean.copy_(before)
