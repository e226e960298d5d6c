"""A memory of strings: a model sees what followed the last time, however long ago, without
attention."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, one_hot

from model.layers import Linear, Recompute, recomputing
from model.ops.ngrams import NGramState, ngram_followers, no_ngrams

_SLOTS = 2**14
"""For strings of each length: half of them are remembered for 11,000 tokens. A state has 8 bytes
for each slot."""


class NGramMemory(nn.Module):
    """x + W (a_n * e) + b_n, where e is the embedding of the token that followed the last n tokens
    the last time.

    n is the longest of `lengths` for which these tokens occurred before; if there is none, n and e
    are 0. This is an n-gram head (Akyurek et al. 2024, "In-Context Language Learning") that reads
    tokens, and of all occurrences the latest, so that its state has one size. W and b start at 0.
    """

    def __init__(self, lengths: Sequence[int], n_embd: int) -> None:
        super().__init__()
        self.lengths = lengths
        self.proj = Linear(n_embd, n_embd, bias=False, std=0.0)
        # One vector each, because vectors have no weight decay.
        self.gain = nn.Parameter(torch.empty(len(lengths) * n_embd))
        self.bias = nn.Parameter(torch.empty((1 + len(lengths)) * n_embd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a to 1 and b to 0."""
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        state: NGramState | None,
        starts: Tensor | None,
        token_ids: Tensor,
        embed: Tensor,
        recompute: Recompute = "none",
    ) -> tuple[Tensor, NGramState]:
        """(B, T, n_embd) -> (B, T, n_embd), and the state.

        Args:
            starts: Positions.document_starts.
            embed: embeddings of the tokens, (n_vocab_padded, n_embd).
            recompute: what a backward pass computes again of `read`.
        """
        state = state or self.initial_state(len(x), x.device)
        followers, state = ngram_followers(token_ids, self.lengths, state, starts)
        rank = torch.arange(1, 1 + len(self.lengths), device=x.device).unsqueeze(1)
        longest = rank.where(followers >= 0, 0).amax(1)  # (B, T): 1 for the first length; 0: none
        index = (longest - 1).clamp(min=0).unsqueeze(1)
        follower = followers.gather(1, index).squeeze(1).where(longest > 0, token_ids)
        y, b = recomputing(recompute, self.read)(longest, follower, embed, x.dtype)
        return x + y + b, state

    def read(
        self, longest: Tensor, follower: Tensor, embed: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """W (a_n * e) and b_n, both (B, T, n_embd)."""
        # Products with rows of 0 and 1: the gradient of a lookup in so few rows would be slow.
        n = one_hot(longest, 1 + len(self.lengths)).to(dtype)
        gain = self.gain.view(-1, embed.shape[1])
        bias = self.bias.view(-1, embed.shape[1])
        return self.proj(embedding(follower, embed) * (n[..., 1:] @ gain)), n @ bias

    def initial_state(self, B: int, device: torch.device) -> NGramState:
        """The state of B texts before their first tokens."""
        return no_ngrams(B, self.lengths, _SLOTS, device)
