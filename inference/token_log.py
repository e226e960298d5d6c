"""What the server reports about a text's tokens: where each begins, its log-probability, and the likeliest others."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from data.text_stream import TextStream
from data.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # lower values are raised to it, as in OpenAI's API: JSON has no infinity


class Token(NamedTuple):
    """A token of a text; its log-probability is the model's own, before any sampling setting."""

    id: int
    offset: int
    """Characters of the text before it. A character that began in an earlier token is not counted."""
    logprob: float | None
    """In nats; None: nothing was read before it."""
    top: dict[int, float]
    """Log-probabilities of the most likely tokens in its place and of itself, by id."""


class TokenLog:
    """Collects the tokens of a growing text."""

    def __init__(self, tokenizer: Tokenizer, n_top: int) -> None:
        self._n_top = n_top
        self._tokenizer, self._text = tokenizer, TextStream(tokenizer)
        self._n_chars = 0
        self._tokens: list[Token] = []

    def add(self, ids: Sequence[int], logits: Tensor) -> None:
        """Add up to T tokens with the logits (T, n_vocab) that they were drawn from."""
        logprobs = logits.float().log_softmax(-1).clamp(min=_LEAST_LOGPROB)
        values, indices = (x.tolist() for x in logprobs.topk(min(self._n_top, logprobs.shape[-1])))
        for i, token_id in enumerate(ids):
            logprob = logprobs[i, token_id].item()
            self._add(token_id, logprob, dict(zip(indices[i], values[i], strict=True)) | {token_id: logprob})

    def add_first(self, token_id: int) -> None:
        """Add a token that nothing predicts."""
        self._add(token_id, None, {})

    def end_prompt(self) -> None:
        """End the prompt: a character that it leaves incomplete counts as one, and the continuation begins after it."""
        self._n_chars += len(self._text.end())
        self._text = TextStream(self._tokenizer)

    def take(self, n_chars: int) -> tuple[Token, ...]:
        """Remove and return the tokens that begin in the first `n_chars` characters of the text."""
        taken = tuple(token for token in self._tokens if token.offset < n_chars)
        self._tokens = self._tokens[len(taken) :]
        return taken

    def _add(self, token_id: int, logprob: float | None, top: dict[int, float]) -> None:
        self._tokens.append(Token(token_id, self._n_chars, logprob, top))
        self._n_chars += len(self._text.push(token_id))
