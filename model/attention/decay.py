"""Forget gates: how much each token keeps of the tokens before it."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

_SPANS = 1.5, 500.0  # tokens after which the first and the last head keep 1 / e, at the start of training


class Decay(nn.Module):
    """Gates of tokens x (B, T, n_embd): log_f = log sigmoid(bias + linear(x)), (B, n_head, T, 1) (Lin et al. 2025)."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        first, last = map(math.log, _SPANS)
        spans = torch.linspace(first, last, n_head).exp()
        self.to_gates = nn.Linear(n_embd, n_head, bias=False)
        self.bias = nn.Parameter(torch.logit((-1 / spans).exp()))

    def forward(self, x: Tensor) -> Tensor:
        return logsigmoid(self.bias + self.to_gates(x)).mT.unsqueeze(-1)
