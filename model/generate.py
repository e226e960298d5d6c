"""Sampling: tokens one after the other, state in, state out."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from common.settings import UserError
from model.gpt import GPT, GPTState
from model.state import cat_states

_PREFILL = 512  # tokens of a prompt that go through the model at once: bounds memory for prompts of any length


@torch.inference_mode()
def generate(
    gpt: GPT,
    prompt_ids: Tensor | Sequence[Tensor],
    *,
    n_vocab: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Endlessly yield the next token of every text in the batch, (B,) int64.

    Args:
        prompt_ids: (B, T), T at least 1; or texts (T,) of different lengths, each continued as it would be alone.
        n_vocab: ids from here on, the padding of the embedding, are never sampled.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: sample among this many most likely tokens.
        top_p: sample among the fewest tokens whose probabilities add up to this much.
        generator: source of randomness, on the CPU.

    Raises:
        UserError: the model's logits are not finite.
    """
    logits, state = prefill(gpt, prompt_ids) if isinstance(prompt_ids, Tensor) else _prefill_each(gpt, prompt_ids)
    while True:
        # On the CPU, so that a seed gives the same text on any device that computes the same logits.
        probabilities = next_token_probabilities(logits[:, :n_vocab].cpu(), temperature, top_k, top_p)
        if not probabilities.isfinite().all():
            raise UserError("the model's output is not finite: its weights are damaged, or its training diverged")
        token_ids = torch.multinomial(probabilities, 1, generator=generator).to(logits.device)  # (B, 1)
        yield token_ids[:, 0]
        logits, state = _step(gpt, token_ids, state)


def prefill(gpt: GPT, token_ids: Tensor, state: GPTState | None = None) -> tuple[Tensor, GPTState]:
    """Read (B, T) tokens; the logits after the last, (B, n_vocab_padded), and the state."""
    for piece in token_ids.split(_PREFILL, dim=1):
        logits, state = _step(gpt, piece, state)
    assert state is not None, "a prompt of no tokens"
    return logits, state


def _prefill_each(gpt: GPT, texts: Sequence[Tensor]) -> tuple[Tensor, GPTState]:
    """The same for texts (T,) of different lengths: read one after the other, then one batch."""
    logits, states = zip(*(prefill(gpt, text.unsqueeze(0)) for text in texts), strict=True)
    return torch.cat(logits), cat_states(states)


def _step(gpt: GPT, token_ids: Tensor, state: GPTState | None) -> tuple[Tensor, GPTState]:
    logits, after = gpt(token_ids, state, return_state=True)
    return logits[:, -1], after


def next_token_probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Probabilities (B, V) to sample from, float32: filtered by top_k, then by top_p."""
    logits = logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k).indices
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # probability of all that is more likely
        ordered = ordered.where(before < top_p, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities
