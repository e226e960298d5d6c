"""A model for lm-evaluation-harness: log-likelihoods of texts, and continuations."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from common.console import Track
from common.settings import UserError, decode
from data.tokenizers.build import Tokenizer
from data.tokenizers.chat import IGNORED, parse_message
from inference.engine import Engine, stream_text
from inference.generation import Generation, Request
from inference.sampling import SamplingConfig
from model.gpt import GPT, GPTState
from runtime.device import Compute

# It precedes a marker in the harness's texts. Markers that a task's text spells remain text.
_IS_MARKER = "\0"
_MAX_NEW_TOKENS = 256  # for tasks without a limit, as in the harness's other models
# Tokens of a text that go through the model at once: bounds memory for texts of any length.
_TEXT_CHUNK = 512
# Logits that are computed at once.
_LOGITS = 2**26

Text = tuple[list[int], int]
"""Token ids, and how many of them at the beginning, at least 1, are read but not scored."""
Score = tuple[float, bool]
"""The log-likelihood of the scored tokens, and whether all of them are the likeliest.

It is in nats, of each token given all tokens before it.
"""


class HarnessModel(TemplateLM):
    """Contexts are read unchanged.

    An empty context becomes <|endoftext|>, which precedes every text in training.
    """

    def __init__(
        self,
        gpt: GPT,
        tokenizer: Tokenizer,
        max_length: int | None,
        micro_batch: int,
        compute: Compute,
    ) -> None:
        """`max_length`: most tokens that the model reads; None: no limit, the state is carried."""
        super().__init__()
        self.gpt = gpt
        self._tokenizer = tokenizer
        self._markers = {
            f"{_IS_MARKER}{tokenizer.tokens[token_id].decode()}": token_id
            for token_id in tokenizer.end_ids
        }
        self.max_length = max_length or 2**62
        self.micro_batch = micro_batch
        self.compute = compute

    @property
    def eot_token_id(self) -> int:
        """The id of <|endoftext|>."""
        return self._tokenizer.eot_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text; there are no special tokens to add."""
        ids: list[int] = []
        any_marker = "|".join(map(re.escape, self._markers))
        for text in re.split(f"({any_marker})", string):
            ids += [self._markers[text]] if text in self._markers else self._tokenizer.encode(text)
        return ids

    @property
    def tokenizer_name(self) -> str:
        """The name that the harness keeps contexts by."""
        return self._tokenizer.name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as `tok_encode` reads it.

        add_generation_prompt: True: the assistant is to answer; False: it continues the last
            message.
        """
        text = f"{_IS_MARKER}<|endoftext|>"
        end = f"{_IS_MARKER}<|end|>"
        for role, content in map(parse_message, chat_history):
            text += f"{_IS_MARKER}<|{role}|>{content}"
            if role == "assistant":
                text += end
        if add_generation_prompt:
            return f"{text}{_IS_MARKER}<|assistant|>"
        return text.removesuffix(end)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[Score]:
        texts = [self._fit(context, continuation) for _, context, continuation in requests]
        return score_texts(self.gpt, texts, self.micro_batch, self.compute)

    def _fit(self, context: list[int], continuation: list[int]) -> Text:
        """Return context and continuation. If both are too long, the context loses its start."""
        if len(continuation) > self.max_length:
            raise UserError(
                f"a task needs {len(continuation)} tokens, max_length is {self.max_length}: "
                "raise max_length, or leave the task out"
            )
        ids = (context + continuation)[-self.max_length - 1 :]
        return ids, len(ids) - len(continuation)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of whole texts of any length, in windows of max_length.

        Each token is scored once, and the last window is full, as the harness does for other
        models. Without a max_length, the state is carried along.
        """
        windows: list[Text] = []
        request_of: list[int] = []  # each window's
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            length = min(self.max_length, max(1, len(ids)))
            for window in get_rolling_token_windows(
                ids, self.prefix_token_id, length, context_len=1
            ):
                windows.append(self._fit(*make_disjoint_window(window)))
                request_of.append(index)
        sums = [0.0] * len(requests)
        scores = score_texts(self.gpt, windows, self.micro_batch, self.compute)
        for index, (log_likelihood, _) in zip(request_of, scores, strict=True):
            sums[index] += log_likelihood
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the first of its stop strings."""
        texts = [
            Generation(self._translate(request, seed), self._tokenizer)
            for seed, request in enumerate(requests)
        ]
        engine = Engine(self.gpt, self._tokenizer.n_vocab, self.micro_batch)
        engine.submit(sorted(texts, key=lambda text: -len(text.request.ids)))
        with Track("continuations", len(texts)) as track, self.compute.autocast():
            for text in texts:
                for _ in stream_text(engine, text):
                    pass
                track.advance(1)
        return [text.text for text in texts]

    def _translate(self, instance: Instance, seed: int) -> Request:
        context, settings = instance.args
        settings = dict(normalize_gen_kwargs(settings, _MAX_NEW_TOKENS))
        n_new = settings["max_gen_toks"]
        if n_new >= self.max_length:
            raise UserError(
                f"a task asks for {n_new} new tokens, but the model may read {self.max_length} "
                "in all"
            )
        ids = self.tok_encode(context) or [self.eot_token_id]
        ids = ids[n_new - self.max_length :]
        # A task may give no temperature.
        sampling = {"temperature": 1.0 if settings.get("do_sample") else 0.0}
        given = {name: settings.get(name) for name in SamplingConfig.model_fields}
        sampling |= {name: value for name, value in given.items() if value is not None}
        stop = tuple(filter(None, settings["until"]))
        return Request(tuple(ids), n_new, decode(SamplingConfig, sampling), seed, stop)


def score_texts(gpt: GPT, texts: Sequence[Text], micro_batch: int, compute: Compute) -> list[Score]:
    """Return the score of each text, in order.

    `micro_batch` texts of similar length go through the model at once.
    """
    scores: dict[int, Score] = {}
    longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
    with Track("scoring", len(texts)) as track, torch.inference_mode(), compute.autocast():
        for first in range(0, len(texts), micro_batch):
            rows = longest_first[first : first + micro_batch]
            scores |= zip(rows, _score_batch(gpt, [texts[row] for row in rows]), strict=True)
            track.advance(len(rows))
    return [scores[row] for row in range(len(texts))]


def _score_batch(gpt: GPT, texts: Sequence[Text]) -> list[Score]:
    # The last token is only a target. A text of one token has none, and is read all the same.
    token_ids = [ids[:-1] or ids for ids, _ in texts]
    targets = [[IGNORED] * (n - 1) + ids[n:] for ids, n in texts]
    token_chunks = _pad_and_split(token_ids, 0, gpt.device)
    target_chunks = _pad_and_split(targets, IGNORED, gpt.device)
    # Log-likelihood, and the number of tokens that are not the likeliest.
    sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=gpt.device)
    n_at_once = max(1, _LOGITS // gpt.config.n_vocab_padded)
    state: GPTState | None = None
    for tokens, chunk_targets in zip(token_chunks, target_chunks, strict=True):
        x, state = gpt.features(tokens, state, return_state=True)
        # Logits take much memory: they are computed only where there are targets.
        for places in (chunk_targets >= 0).nonzero().split(n_at_once):
            rows, positions = places.unbind(1)
            target = chunk_targets[rows, positions]
            logits = gpt.logits(x[rows, positions])  # (N, V)
            nats = cross_entropy(logits, target, reduction="none")  # autocast uses float32
            is_missed = logits.argmax(-1) != target
            sums.index_add_(0, rows, torch.stack([-nats.double(), is_missed], dim=1))
    return [(log_likelihood, n_missed == 0) for log_likelihood, n_missed in sums.tolist()]


def _pad_and_split(rows: list[list[int]], padding: int, device: torch.device) -> tuple[Tensor, ...]:
    """Pad rows at their ends to (B, T), and split them into chunks of _TEXT_CHUNK columns."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, True, padding).to(device).split(_TEXT_CHUNK, dim=1)
