"""Sampling: texts as values, read and continued; the filters that a next token is drawn through.

    texts = read(gpt, prompt_ids, n_vocab)                          # every row a text
    probabilities = next_token_probabilities(texts.logits, sampling, texts.seen)
    token_ids = draw(probabilities, generators)                     # a generator for each row
    texts = read(gpt, token_ids.unsqueeze(1), n_vocab, texts)

`cat_states` and `select_rows` (model/state.py) put texts of any lengths into one batch, and take rows out of it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from common.settings import Settings, UserError
from model.gpt import GPT, GPTState
from model.state import cat_states

_PREFILL = 512  # tokens of a prompt that go through the model at once: bounds memory for prompts of any length


class SamplingConfig(Settings):
    """How the next token is drawn, in the order of the fields; by default from the model's own distribution."""

    repetition_penalty: float = Field(default=1.0, ge=0.001, le=1000)
    """Above 1, tokens that the text has already, prompt included, become less likely; 1: nothing changes."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Below 1 sharpens, above 1 flattens; 0 takes the most likely token."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample among this many most likely tokens; null: all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample among the fewest tokens whose probabilities add up to this much; null: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample among the tokens at least this many times as likely as the most likely one; null: all."""


class Texts(NamedTuple):
    """Texts that were read so far, a row each: all that is needed to continue them. A value, as a state is."""

    logits: Tensor
    """Of the next token, (B, n_vocab), on the CPU: so a seed gives the same text on any device that computes these."""
    seen: Tensor
    """The tokens that came so far, but for the one that ends a text, bool (B, n_vocab), on the CPU."""
    state: GPTState


@torch.inference_mode()
def read(gpt: GPT, token_ids: Tensor, n_vocab: int, before: Texts | None = None) -> Texts:
    """The texts after (B, T) more tokens, T at least 1.

    Args:
        n_vocab: ids from here on, the padding of the embedding, are never sampled; the last, n_vocab - 1, ends texts.
        before: the texts that these tokens continue; None: they begin here.
    """
    logits, state = prefill(gpt, token_ids, before and before.state)
    return texts_after(token_ids, logits, state, n_vocab, before)


def texts_after(token_ids: Tensor, logits: Tensor, state: GPTState, n_vocab: int, before: Texts | None) -> Texts:
    """What `read` gives, of a model's own answer to (B, T) tokens: logits (B, n_vocab_padded) after the last, state."""
    seen = before.seen.clone() if before else torch.zeros(len(token_ids), n_vocab, dtype=torch.bool)
    seen.scatter_(1, token_ids.cpu(), True)
    seen[:, n_vocab - 1] = False
    return Texts(logits[:, :n_vocab].cpu(), seen, state)


def prefill(gpt: GPT, token_ids: Tensor, state: GPTState | None = None) -> tuple[Tensor, GPTState]:
    """Read (B, T) tokens; the logits after the last, (B, n_vocab_padded), and the state."""
    for piece in token_ids.split(_PREFILL, dim=1):
        logits, state = gpt(piece, state, return_state=True)
    assert state is not None, "a prompt of no tokens"
    return logits[:, -1], state


def next_token_probabilities(
    logits: Tensor, sampling: SamplingConfig | Sequence[SamplingConfig], seen: Tensor | None = None
) -> Tensor:
    """What to draw the next tokens from, (B, V) float32. A row's depend on nothing but the row.

    Args:
        logits: (B, V).
        sampling: one for all rows, or one for each.
        seen: the tokens that a row's repetition_penalty is for, bool (B, V); None: none.

    Raises:
        UserError: the logits are not finite.
    """
    logits = logits.float()
    if not logits.isfinite().all():
        raise UserError(
            "the model's output is not finite in float32: its weights are damaged, or its training diverged"
        )
    B = len(logits)
    each = [sampling] * B if isinstance(sampling, SamplingConfig) else sampling
    rows = zip(logits, each, [None] * B if seen is None else seen, strict=True)
    return torch.stack([_row_probabilities(*row) for row in rows])


def draw(probabilities: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """A token of each row of (B, V) probabilities, (B,) int64; each row has its own source of randomness."""
    rows = zip(probabilities, generators, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=generator) for row, generator in rows])


def _row_probabilities(logits: Tensor, sampling: SamplingConfig, seen: Tensor | None) -> Tensor:
    """The same for one row, (V,), in float64: there no accepted setting rounds to 0 or makes a logit infinite."""
    logits = logits.double()
    if seen is not None and sampling.repetition_penalty != 1:
        logits = logits.where(~seen, _penalized(logits, sampling.repetition_penalty))
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    n_vocab, order = len(logits), None
    logits = (
        logits - logits.max()
    ) / sampling.temperature  # the largest is 0 whatever the temperature, the others less
    if sampling.top_k is not None and sampling.top_k < n_vocab:
        logits, order = logits.topk(sampling.top_k)  # descending
    elif sampling.top_p is not None:
        logits, order = logits.sort(descending=True, stable=True)
    probabilities = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # probability of all that is more likely
        probabilities = probabilities.where(before < sampling.top_p, 0)
    if sampling.min_p is not None:  # Nguyen et al. 2024, section 3
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0)
    probabilities = (probabilities / probabilities.sum()).float()
    return probabilities if order is None else torch.zeros(n_vocab).scatter(0, order, probabilities)


def _penalized(logits: Tensor, penalty: float) -> Tensor:
    """Keskar et al. 2019 (CTRL), eq. 1, divides logits by the penalty. Negative ones are multiplied by it, as other
    programs do: divided they would become more likely.
    """
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def generate(
    gpt: GPT,
    prompt_ids: Tensor | Sequence[Tensor],
    *,
    n_vocab: int,
    sampling: SamplingConfig | None = None,
    generators: Sequence[torch.Generator | None] | None = None,
) -> Iterator[Tensor]:
    """Endlessly yield the next token of every text in the batch, (B,) int64.

    Args:
        prompt_ids: (B, T), T at least 1; or texts (T,) of different lengths, each continued as it would be alone.
        n_vocab: as for `read`.
        sampling: how to draw; None: from the model's own distribution.
        generators: sources of randomness, on the CPU, one for each text.

    Raises:
        UserError: the model's logits are not finite.
    """
    if isinstance(prompt_ids, Tensor):
        texts = read(gpt, prompt_ids, n_vocab)
    else:  # read one after the other, then one batch
        texts = cat_states([read(gpt, text.unsqueeze(0), n_vocab) for text in prompt_ids])
    while True:
        probabilities = next_token_probabilities(texts.logits, sampling or SamplingConfig(), texts.seen)
        token_ids = draw(probabilities, generators or [None] * len(probabilities)).to(gpt.embed.weight.device)
        yield token_ids
        texts = read(gpt, token_ids.unsqueeze(1), n_vocab, texts)
