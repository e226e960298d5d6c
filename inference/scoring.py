"""Log-likelihoods of given tokens, for texts of any length, many at once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.console import Track
from data.loader import IGNORED
from model.gpt import GPT, GPTState
from trainer.runtime import Runtime

_PIECE = 512  # tokens of a text that go through the model at once: bounds memory for texts of any length
_LOGITS = 2**26  # computed at once


class Text(NamedTuple):
    """Tokens to score."""

    ids: Sequence[int] | np.ndarray
    n_before: int
    """The number of tokens at the beginning, at least 1, that are read but not scored."""


class Score(NamedTuple):
    """How likely the model finds a text's scored tokens."""

    log_likelihood: float
    """The sum over the scored tokens, in nats, each given all tokens before it."""
    is_greedy: bool
    """Whether every scored token is the most likely one at its position."""


def features_in_pieces(gpt: GPT, token_ids: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Read texts of any length in pieces of T positions, with the state carried along.

    Yields the features (B, T, n_embd) and the targets (B, T) of each piece, on the model's device.
    """
    device = gpt.embed.weight.device
    state: GPTState | None = None
    for start in range(0, token_ids.shape[1], _PIECE):
        piece, wanted = (x[:, start : start + _PIECE].to(device) for x in (token_ids, targets))
        x, state = gpt.features(piece, state, return_state=True)
        yield x, wanted


def padded(texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """Token ids and targets of texts side by side, int64 (B, T); padding at the ends counts nowhere."""
    longest = max(len(text.ids) for text in texts) - 1
    token_ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    targets = torch.full((len(texts), longest), IGNORED)
    for row, (ids, n_before) in enumerate(texts):
        token_ids[row, : len(ids) - 1] = torch.as_tensor(ids[:-1])
        targets[row, n_before - 1 : len(ids) - 1] = torch.as_tensor(ids[n_before:])
    return token_ids, targets


def score(gpt: GPT, texts: Sequence[Text], micro_batch: int, runtime: Runtime, what: str = "scoring") -> list[Score]:
    """The score of each text, in order; `micro_batch` texts of similar length go through the model at once."""
    scores = [Score(0.0, True)] * len(texts)
    longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))
    with Track(what, len(texts)) as track, torch.inference_mode(), runtime.autocast():
        for first in range(0, len(texts), micro_batch):
            rows = longest_first[first : first + micro_batch]
            for row, found in zip(rows, _score_batch(gpt, [texts[row] for row in rows]), strict=True):
                scores[row] = found
            track.advance(len(rows))
    return scores


def _score_batch(gpt: GPT, texts: Sequence[Text]) -> list[Score]:
    device, n_logits = gpt.embed.weight.device, gpt.config.n_vocab_padded
    sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=device)  # log-likelihood; not greedy
    for x, wanted in features_in_pieces(gpt, *padded(texts)):
        for places in (wanted >= 0).nonzero().split(max(1, _LOGITS // n_logits)):
            rows, positions = places.unbind(1)
            target, logits = wanted[rows, positions], gpt.logits(x[rows, positions])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (N, V)
            log_p = logits.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1)
            sums.index_add_(0, rows, torch.stack([log_p.double(), (logits.argmax(-1) != target).double()], dim=1))
    return [Score(log_p, misses == 0) for log_p, misses in sums.tolist()]
