"""A GPT as lm-evaluation-harness sees it: texts in; log-likelihoods and continuations out."""

import json
from collections import defaultdict
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows

from common.console import Track
from common.settings import UserError, decode
from data.text_stream import TextStream
from data.tokenizer import Tokenizer
from inference.generate import SamplingConfig, generate
from inference.scoring import Text, score
from model.gpt import GPT
from trainer.runtime import Runtime

_MAX_NEW_TOKENS = 256  # of a task that does not say; as for the harness's other models


class HarnessModel(TemplateLM):
    """Contexts are read as they are; what has none follows the end of another text, as in training."""

    def __init__(
        self, gpt: GPT, tokenizer: Tokenizer, max_length: int | None, micro_batch: int, runtime: Runtime
    ) -> None:
        """`max_length`: most tokens that the model may read, its state carried along; None: any number."""
        super().__init__()
        self.gpt, self.texts, self.runtime = gpt, tokenizer, runtime
        self.max_length, self.micro_batch = max_length, micro_batch

    @property
    def eot_token_id(self) -> int:
        """The token between texts."""
        return self.texts.eot_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; there are no special ones to add."""
        return self.texts.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._fitting(context, continuation) for _, context, continuation in requests]
        scores = score(self.gpt, texts, self.micro_batch, self.runtime, "choices")
        return [(found.log_likelihood, found.is_greedy) for found in scores]

    def _fitting(self, context: list[int], continuation: list[int]) -> Text:
        """Both, without as much of the context's beginning as is too long for the model."""
        if self.max_length is not None and len(continuation) > self.max_length:
            raise UserError(
                f"a task asks for {len(continuation)} tokens at once, and the model may read {self.max_length}: "
                "raise max_length, or leave the task out"
            )
        most = None if self.max_length is None else self.max_length + 1
        ids = (context + continuation)[-most if most else 0 :]
        return Text(ids, len(ids) - len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts of any length: with the state carried along, or in windows of max_length."""
        windows: list[Text] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            length = self.max_length or max(1, len(ids))
            for read, scored in get_rolling_token_windows(ids, self.prefix_token_id, length, context_len=1):
                windows.append(Text([*read, scored[-1]], len(read) + 1 - len(scored)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, found in zip(owners, score(self.gpt, windows, self.micro_batch, self.runtime, "texts"), strict=True):
            totals[owner] += found.log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each up to the first of its stop strings; those of the same settings are made together."""
        same: defaultdict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            same[json.dumps(request.args[1], sort_keys=True, default=str)].append(i)
        answers = [""] * len(requests)
        with Track("continuations", len(requests)) as track:
            for members in same.values():
                members.sort(key=lambda i: -len(requests[i].args[0]))
                for first in range(0, len(members), self.micro_batch):
                    rows = members[first : first + self.micro_batch]
                    texts = self._continue([requests[i].args[0] for i in rows], requests[rows[0]].args[1])
                    for i, text in zip(rows, texts, strict=True):
                        answers[i] = text
                    track.advance(len(rows))
        return answers

    def _continue(self, contexts: list[str], settings: dict[str, Any]) -> list[str]:
        settings = dict(normalize_gen_kwargs(settings, _MAX_NEW_TOKENS))
        n_new = settings["max_gen_toks"]
        if self.max_length is not None and n_new >= self.max_length:
            raise UserError(f"a task asks for {n_new} new tokens, and the model may read {self.max_length} in all")
        room = 0 if self.max_length is None else self.max_length - n_new
        prompts = [(self.tok_encode(context) or [self.eot_token_id])[-room:] for context in contexts]
        streams = [TextStream(self.texts, [text for text in settings["until"] if text]) for _ in prompts]
        answers, ended = [""] * len(prompts), [False] * len(prompts)
        tokens = generate(
            self.gpt,
            [torch.tensor(ids, device=self.runtime.device) for ids in prompts],
            n_vocab=self.texts.n_vocab,
            sampling=_sampling(settings),
            generators=[torch.Generator().manual_seed(row) for row in range(len(prompts))],
        )
        for _, token_ids in zip(range(n_new), tokens, strict=False):
            for row, token_id in enumerate(token_ids.tolist()):
                if not ended[row]:
                    ended[row] = token_id == self.eot_token_id
                    answers[row] += streams[row].end() if ended[row] else streams[row].push(token_id)
                    ended[row] |= streams[row].stopped
            if all(ended):
                break
        rest = ("" if end else stream.end() for end, stream in zip(ended, streams, strict=True))
        return [answer + more for answer, more in zip(answers, rest, strict=True)]


def _sampling(settings: dict[str, Any]) -> SamplingConfig:
    """The knobs that a task gives; without them the most likely token is taken."""
    given = {name: settings[name] for name in SamplingConfig.model_fields if settings.get(name) is not None}
    return decode(SamplingConfig, {"temperature": 1.0 if settings.get("do_sample") else 0.0} | given)
