"""The log-likelihood of given tokens after others, for texts of any length, many at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.console import Track
from model.gpt import GPT, GPTState
from trainer.runtime import Runtime

_PIECE = 512  # tokens of a text that go through the model at once: bounds memory for texts of any length
_LOGITS = 2**26  # at once


class Text(NamedTuple):
    """Tokens to be scored after others."""

    ids: Sequence[int]
    n_before: int
    """The first so many, at least 1, are only read."""


class Score(NamedTuple):
    """How likely a model finds a text's tokens."""

    log_likelihood: float
    """The sum over the tokens that are scored, in nats, given all before each."""
    is_greedy: bool
    """Whether each of them is the most likely one in its place."""


def score(gpt: GPT, texts: Sequence[Text], micro_batch: int, runtime: Runtime, what: str = "scoring") -> list[Score]:
    """The score of each text, in order; `micro_batch` of about the same length go through the model at once."""
    scores = [Score(0.0, True)] * len(texts)
    longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))
    with Track(what, len(texts)) as track:
        for first in range(0, len(texts), micro_batch):
            rows = longest_first[first : first + micro_batch]
            for row, found in zip(rows, _score_batch(gpt, [texts[row] for row in rows], runtime), strict=True):
                scores[row] = found
            track.advance(len(rows))
    return scores


@torch.inference_mode()
def _score_batch(gpt: GPT, texts: Sequence[Text], runtime: Runtime) -> list[Score]:
    """Shorter texts are filled at their ends, which nothing that is scored sees."""
    device = gpt.embed.weight.device
    longest = max(len(text.ids) for text in texts) - 1
    token_ids, targets = torch.zeros(len(texts), longest, dtype=torch.int64), torch.full((len(texts), longest), -1)
    for row, (ids, n_before) in enumerate(texts):
        token_ids[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[row, n_before - 1 : len(ids) - 1] = torch.tensor(ids[n_before:])
    sums = torch.zeros(2, len(texts), dtype=torch.float64, device=device)  # log-likelihoods; tokens that are not greedy
    state: GPTState | None = None
    for start in range(0, longest, _PIECE):
        piece, wanted = (x[:, start : start + _PIECE].to(device) for x in (token_ids, targets))
        with runtime.autocast():
            x, state = gpt.features(piece, state, return_state=True)
            rows, positions = (wanted >= 0).nonzero(as_tuple=True)
            _add(sums, rows, *_compare(gpt, x[rows, positions], wanted[rows, positions]))
    return [Score(log_p, misses == 0) for log_p, misses in sums.T.tolist()]


def _compare(gpt: GPT, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability (N,) of each target after features x (N, n_embd), and whether another one is more likely."""
    log_p, misses = [x.new_empty(0)], [targets.new_empty(0, dtype=torch.bool)]
    n = max(1, _LOGITS // gpt.config.n_vocab_padded)
    for x_n, target in zip(x.split(n), targets.split(n), strict=True):
        logits = x_n @ gpt.embed.weight.T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (n, V)
        log_p.append(logits.log_softmax(-1).gather(1, target.unsqueeze(1)).squeeze(1))
        misses.append(logits.argmax(-1) != target)
    return torch.cat(log_p), torch.cat(misses)


def _add(sums: Tensor, rows: Tensor, log_p: Tensor, misses: Tensor) -> None:
    sums.index_add_(1, rows, torch.stack([log_p.double(), misses.double()]))
