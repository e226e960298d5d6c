"""Forget gates: how much each token keeps of the tokens before it."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

STEEPEST = 1.0  # the most that a feature's gate forgets at a token, in nats: see model/ops/gates.py
_RANK = 16  # of the map from tokens to the gates of features
_SPANS = 1.5, 500.0  # tokens after which the first and the last gate keep 1 / e, at the start of training


class Decay(nn.Module):
    """Gates log_f of tokens x (B, T, n_embd): (B, n_head, T, query_dim), or (B, n_head, T, 1) for `kind` "head".

    - "fixed": a learned number for each feature.
    - "feature": log_f = -STEEPEST sigmoid(bias + low-rank(x)) for each feature; the form is that of gated linear
      attention (Yang et al. 2023, section 4.2), with another function.
    - "head": log_f = log sigmoid(bias + linear(x)) for each head (Lin et al. 2025, eq. 5).
    """

    def __init__(self, kind: str, n_embd: int, n_head: int, query_dim: int) -> None:
        super().__init__()
        self.kind, self.n_head, self.by_feature = kind, n_head, kind != "head"
        first, last = map(math.log, _SPANS)
        spans = torch.linspace(first, last, query_dim if self.by_feature else n_head).exp()
        if kind == "head":
            self.to_gates = nn.Linear(n_embd, n_head, bias=False)
            self.bias = nn.Parameter(torch.logit((-1 / spans).exp()))
        else:
            self.bias = nn.Parameter(torch.logit(1 / (STEEPEST * spans)).repeat(n_head))
        if kind == "feature":
            self.down = nn.Linear(n_embd, _RANK, bias=False)
            self.up = nn.Linear(_RANK, n_head * query_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        if self.kind == "head":
            return logsigmoid(self.bias + self.to_gates(x)).mT.unsqueeze(-1)
        if self.kind == "fixed":
            return (-STEEPEST * self.bias.sigmoid()).view(self.n_head, 1, -1).expand(B, -1, T, -1)
        logits = self.bias + self.up(self.down(x))  # (B, T, n_head query_dim)
        return (-STEEPEST * logits.sigmoid()).unflatten(2, (self.n_head, -1)).transpose(1, 2)
