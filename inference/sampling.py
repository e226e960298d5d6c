"""How next tokens are drawn: the settings, the weights that they give to tokens, and the draw."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from common.settings import Settings

NOT_FINITE = (
    "the model's output is not finite in float32: its weights are damaged, or its training diverged"
)

_ONE = 2**52
"""The weight of probability 1.

Weights are integers, because their sums do not depend on the order of the terms, so a draw does not
depend on other texts. They are exact in float64, which has all integers up to 2^53.
"""

_CPU_ROWS = 4  # rows at once on a CPU: more do not fit into its caches


class SamplingConfig(Settings):
    """How the next token is drawn. The settings apply in this order.

    The defaults leave the model's distribution.
    """

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Below 1 sharpens, above 1 flattens; 0 takes the most likely token."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample among this many most likely tokens; null: all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample among the fewest tokens whose probabilities add up to this much; null: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample among tokens at least this many times as likely as the likeliest; null: all."""


def sample_next_tokens(
    logits: Tensor,
    samplings: Sequence[SamplingConfig],
    generators: Sequence[torch.Generator],
) -> list[int]:
    """Return the next token of every text, drawn on the device of the logits.

    It is -1 if a text's logits are not finite in float32. A token depends only on the row, settings
    and generator of its own text.

    Args:
        logits: (B, V).
        generators: sources of randomness, on the CPU, one for each text. A draw takes one number.
    """
    numbers = [torch.rand((), dtype=torch.float64, generator=source) for source in generators]
    uniform = torch.stack(numbers).to(logits.device)
    drawn = torch.empty_like(uniform, dtype=torch.int64)
    rows_of: dict[SamplingConfig, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows_of.setdefault(sampling, []).append(row)
    for sampling, rows in rows_of.items():
        n_at_once = _CPU_ROWS if logits.is_cpu else len(rows)
        for index in torch.tensor(rows, device=logits.device).split(n_at_once):
            drawn[index] = _sample_rows(logits[index], sampling, uniform[index])
    return drawn.tolist()


def _sample_rows(logits: Tensor, sampling: SamplingConfig, uniform: Tensor) -> Tensor:
    """Draw (B,) by the same settings for all rows, given numbers (B,) in [0, 1)."""
    logits = logits.float()
    finite = logits.amin(-1).isfinite() & logits.amax(-1).isfinite()
    ids, weights = weigh_tokens(logits, sampling)  # arbitrary for rows that are not finite
    sums = weights.cumsum(-1)
    places = (uniform * sums[:, -1]).long().unsqueeze(-1)
    indices = torch.searchsorted(sums, places, right=True)  # (B, 1)
    indices = indices.clamp(max=sums.shape[-1] - 1)
    return ids.gather(-1, indices).squeeze(-1).where(finite, -1)


def weigh_tokens(logits: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Ids and weights, both int64 (B, K), of all tokens that can be drawn.

    A weight of 0 is never drawn. Weights are in proportion to probabilities, in multiples of 2^-52
    before top_p and min_p remove tokens. Probabilities are computed in float64, in which no
    accepted setting makes a logit infinite.

    Args:
        logits: finite, float32 (B, V).
    """
    n_vocab = logits.shape[-1]
    if sampling.temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
        return ids, torch.ones_like(ids)
    # With the largest logit at 0, no temperature makes exp overflow. GPUs multiply with the
    # reciprocal of the temperature, which 1e-300 keeps finite.
    largest = logits.amax(-1, keepdim=True).double()
    temperature = max(sampling.temperature, 1e-300)
    if sampling.top_k is not None and sampling.top_k < n_vocab:
        ids, logits = _find_largest(logits, sampling.top_k)
    else:
        ids = torch.arange(n_vocab, device=logits.device).expand_as(logits)
    weights = (logits - largest).div_(temperature).softmax(-1).mul_(_ONE).long()
    if sampling.top_p is not None and sampling.top_p < 1:
        indices, weights = _find_nucleus(logits, weights, sampling.top_p)
        ids = ids.gather(-1, indices)
    if sampling.min_p is not None:  # Nguyen et al. 2024, section 3
        likeliest = weights.amax(-1, keepdim=True).double()
        least = (sampling.min_p * likeliest).ceil().long()
        weights = weights.where(weights >= least, 0)
    return ids, weights


def _find_nucleus(logits: Tensor, weights: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Indices and weights (B, n) of the nucleus, descending; weights outside it are 0.

    Of equally likely tokens, the first come in.
    """
    total = weights.sum(-1, keepdim=True).double()
    # Weights below this add up to less than 1 - top_p, so the nucleus has none of them, and most
    # need not be sorted.
    least = ((1 - top_p) / weights.shape[-1] * total).long()
    n_large = (weights >= least).sum(-1)
    indices, logits = _find_largest(logits, max(1, int(n_large.max())))
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    indices = indices.gather(-1, order)
    weights = weights.gather(-1, indices)
    before = weights.cumsum(-1) - weights  # the weight of all more likely tokens
    return indices, weights.where(before < top_p * total, 0)


def _find_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices, ascending, and values of the k largest in each row (B, K), both (B, k)."""
    indices = x.topk(k).indices.sort(-1).values
    return indices, x.gather(-1, indices)
