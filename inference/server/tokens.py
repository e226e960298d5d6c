"""What is told of a text's tokens: where each begins, how likely it was, and what else could have come."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from data.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # stands for all below, as in OpenAI's API: JSON has no infinity


@dataclass(frozen=True)
class Token:
    """A token of a text, and how likely it was for the model itself, before any setting of the sampling."""

    id: int
    offset: int
    """Characters of the text before it; a character that it does not begin, but goes on with, is not before it."""
    logprob: float | None
    """In nats; None: nothing was read before it."""
    top: dict[int, float]
    """The most likely tokens in its place and itself, by id."""


class TokenLog:
    """The tokens of a text that grows."""

    def __init__(self, tokenizer: Tokenizer, n_top: int) -> None:
        self._tokenizer, self._n_top = tokenizer, n_top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._n_chars = 0
        self._tokens: list[Token] = []

    def add(self, ids: Sequence[int], logits: Tensor) -> None:
        """Take note of T more tokens, and of what each was drawn from: logits (T, n_vocab)."""
        logprobs = logits.float().log_softmax(-1).clamp(min=_LEAST_LOGPROB)
        values, indices = (x.tolist() for x in logprobs.topk(min(self._n_top, logprobs.shape[-1])))
        for i, token_id in enumerate(ids):
            logprob = logprobs[i, token_id].item()
            self._note(token_id, logprob, dict(zip(indices[i], values[i], strict=True)) | {token_id: logprob})

    def add_first(self, token_id: int) -> None:
        """Take note of a token that nothing foretells."""
        self._note(token_id, None, {})

    def take(self, n_chars: int) -> tuple[Token, ...]:
        """Tokens that begin in the first so many characters of the text, but for those that were taken before."""
        taken = tuple(token for token in self._tokens if token.offset < n_chars)
        self._tokens = self._tokens[len(taken) :]
        return taken

    def _note(self, token_id: int, logprob: float | None, top: dict[int, float]) -> None:
        self._tokens.append(Token(token_id, self._n_chars, logprob, top))
        self._n_chars += len(self._decoder.decode(self._tokenizer.decode_bytes([token_id])))
