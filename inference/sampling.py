"""How a next token is drawn: the settings, the probabilities that they give, and the draw."""

import torch
from pydantic import Field
from torch import Tensor

from common.settings import Settings, UserError


class SamplingConfig(Settings):
    """How the next token is drawn. The settings apply in this order; the defaults leave the model's distribution."""

    repetition_penalty: float = Field(default=1.0, ge=0.001, le=1000)
    """Above 1, tokens that occur in the text so far, prompt included, become less likely; 1: off."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Below 1 sharpens, above 1 flattens; 0 takes the most likely token."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample among this many most likely tokens; null: all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample among the fewest tokens whose probabilities add up to this much; null: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample among the tokens at least this many times as likely as the most likely one; null: all."""


def next_token_probabilities(logits: Tensor, sampling: SamplingConfig, seen: Tensor) -> Tensor:
    """Probabilities (V,) float32 of the next token of one text.

    They are computed in float64, in which no accepted setting rounds to 0 or makes a logit infinite.

    Args:
        logits: (V,).
        seen: the tokens that repetition_penalty applies to, bool (V,).

    Raises:
        UserError: the logits are not finite.
    """
    logits = logits.float()
    if not logits.isfinite().all():
        raise UserError(
            "the model's output is not finite in float32: its weights are damaged, or its training diverged"
        )
    logits, n_vocab, order = logits.double(), len(logits), None
    if sampling.repetition_penalty != 1:
        # Keskar et al. 2019 (CTRL), eq. 1, divides logits by the penalty. Negative ones are multiplied by it, as other
        # programs do: dividing them would make the token more likely.
        penalty = sampling.repetition_penalty
        logits = logits.where(~seen, torch.where(logits > 0, logits / penalty, logits * penalty))
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), n_vocab).float()
    # With the largest logit at 0, no temperature makes exp overflow.
    logits = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < n_vocab:
        logits, order = logits.topk(sampling.top_k)  # descending
    elif sampling.top_p is not None:
        logits, order = logits.sort(descending=True, stable=True)
    probabilities = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # the probability of all more likely tokens
        probabilities = probabilities.where(before < sampling.top_p, 0)
    if sampling.min_p is not None:  # Nguyen et al. 2024, section 3
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0)
    probabilities = (probabilities / probabilities.sum()).float()
    return probabilities if order is None else torch.zeros(n_vocab).scatter(0, order, probabilities)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> int:
    """Draw one token from probabilities (V,)."""
    return int(torch.multinomial(probabilities, 1, generator=generator))
