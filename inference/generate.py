"""Tokens from a model, in Python: the engine for callers who want token ids and not text."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inference.engine import Engine, Generation
from inference.sampling import SamplingConfig
from model.gpt import GPT

__all__ = ["SamplingConfig", "generate"]


def generate(
    gpt: GPT,
    prompt_ids: Tensor | Sequence[Tensor],
    *,
    n_vocab: int,
    eot_id: int = -1,
    sampling: SamplingConfig | None = None,
    generators: Sequence[torch.Generator | None] | None = None,
) -> Iterator[Tensor]:
    """Endlessly yield the next token of every text in the batch, (B,) int64.

    Args:
        prompt_ids: (B, T) with T at least 1; or texts (T,) of different lengths.
        n_vocab: ids from here on, the padding of the embedding, are never drawn.
        eot_id: the token that ends texts, which no penalty lowers; -1: the last, n_vocab - 1.
        sampling: how to draw; None: from the model's own distribution.
        generators: sources of randomness, on the CPU, one for each text.

    Raises:
        UserError: the model's logits are not finite.
    """
    engine = Engine(gpt, n_vocab, len(prompt_ids), eot_id=eot_id)
    texts = [
        Generation(ids.tolist(), sampling or SamplingConfig(), generator)
        for ids, generator in zip(prompt_ids, generators or [None] * len(prompt_ids), strict=True)
    ]
    engine.submit(texts)
    while True:
        engine.turn()
        for text in texts:
            if text.error:
                raise text.error
        yield torch.tensor([text.token_id for text in texts], device=gpt.embed.weight.device)
