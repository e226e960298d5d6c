"""A memory of strings: a model sees what followed the last time, however long ago, without attention."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from model.ops.ngrams import NGramState, ngram_followers, no_ngrams


class NGramMemory(nn.Module):
    """x + sum_n W_n e_n: e_n is the embedding of the token after the latest earlier occurrence of the last n, or 0.

    These are n-gram heads (Akyurek et al. 2024, "In-Context Language Learning") that read tokens, and the latest
    occurrence alone, so that their state has one size. W_n starts at 0.
    """

    def __init__(self, lengths: Sequence[int], n_slots: int, n_embd: int) -> None:
        super().__init__()
        self.lengths, self.n_slots = lengths, n_slots
        layers = [nn.Linear(n_embd, n_embd, bias=False) for _ in lengths]
        for layer in layers:
            nn.init.zeros_(layer.weight)
        self.proj = nn.ModuleList(layers)

    def forward(
        self, x: Tensor, token_ids: Tensor, embed: Tensor, state: NGramState | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, NGramState]:
        """(B, T, n_embd) -> (B, T, n_embd), and the state.

        Args:
            embed: embeddings of the tokens, (n_vocab_padded, n_embd).
            starts: those of Order.
        """
        state = state or self.initial_state(len(x), x.device)
        followers, state = ngram_followers(token_ids, self.lengths, state, starts)
        for proj, ids in zip(self.proj, followers.unbind(1), strict=True):
            x = x + proj(embedding(ids.clamp(min=0), embed).masked_fill((ids < 0).unsqueeze(-1), 0))
        return x, state

    def initial_state(self, B: int, device: torch.device) -> NGramState:
        """The state of B texts before their first tokens."""
        return no_ngrams(B, self.lengths, self.n_slots, device)
