"""The interface of lm-evaluation-harness: it asks for the log-likelihoods of texts, and for continuations."""

from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows

from common.console import Track
from common.settings import UserError, decode
from data.tokenizer import Tokenizer
from inference.engine import Engine, stream
from inference.generation import Generation
from inference.prefill import Request
from inference.sampling import SamplingConfig
from inference.scoring import Text, score
from model.gpt import GPT
from trainer.runtime import Runtime

_MAX_NEW_TOKENS = 256  # for tasks without a limit, as in the harness's other models


class HarnessModel(TemplateLM):
    """Contexts are read as they are; an empty one is <|endoftext|>, which every text follows in training."""

    def __init__(
        self, gpt: GPT, tokenizer: Tokenizer, max_length: int | None, micro_batch: int, runtime: Runtime
    ) -> None:
        """`max_length`: most tokens that the model may read; None: any number, with the state carried along."""
        super().__init__()
        self.gpt, self._tokenizer, self.runtime = gpt, tokenizer, runtime
        self.max_length, self.micro_batch = max_length, micro_batch

    @property
    def eot_token_id(self) -> int:
        """The id of <|endoftext|>."""
        return self._tokenizer.eot_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text; there are no special tokens to add."""
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._fitting(context, continuation) for _, context, continuation in requests]
        scores = score(self.gpt, texts, self.micro_batch, self.runtime, "choices")
        return [(found.log_likelihood, found.is_greedy) for found in scores]

    def _fitting(self, context: list[int], continuation: list[int]) -> Text:
        """Context and continuation, without the context's beginning if both are too long for the model."""
        if self.max_length is not None and len(continuation) > self.max_length:
            raise UserError(
                f"a task asks for {len(continuation)} tokens at once, but the model may read {self.max_length}: "
                "raise max_length, or leave the task out"
            )
        most = None if self.max_length is None else self.max_length + 1
        ids = (context + continuation)[-most if most else 0 :]
        return Text(ids, len(ids) - len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts of any length, with the state carried along or in windows of max_length."""
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
        """The continuation of each context, up to the first of its stop strings."""
        texts = [
            Generation(self._request(request.args[0], request.args[1], seed), self._tokenizer)
            for seed, request in enumerate(requests)
        ]
        engine = Engine(self.gpt, self._tokenizer.n_vocab, self.micro_batch, eot_id=self._tokenizer.eot_id)
        engine.submit(sorted(texts, key=lambda text: -len(text.request.ids)))
        with Track("continuations", len(texts)) as track, self.runtime.autocast():
            for text in texts:
                for _ in stream(engine, text):
                    pass
                track.advance(1)
        return [text.text for text in texts]

    def _request(self, context: str, settings: dict[str, Any], seed: int) -> Request:
        settings = dict(normalize_gen_kwargs(settings, _MAX_NEW_TOKENS))
        n_new = settings["max_gen_toks"]
        if self.max_length is not None and n_new >= self.max_length:
            raise UserError(f"a task asks for {n_new} new tokens, but the model may read {self.max_length} in all")
        room = 0 if self.max_length is None else self.max_length - n_new
        ids = (self.tok_encode(context) or [self.eot_token_id])[-room:]
        return Request(tuple(ids), n_new, _sampling(settings), seed, tuple(filter(None, settings["until"])))


def _sampling(settings: dict[str, Any]) -> SamplingConfig:
    """The sampling settings of a task; without any, the most likely token is taken."""
    given = {name: settings[name] for name in SamplingConfig.model_fields if settings.get(name) is not None}
    return decode(SamplingConfig, {"temperature": 1.0 if settings.get("do_sample") else 0.0} | given)
