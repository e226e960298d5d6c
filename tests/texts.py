"""Tiny texts and models of bytes."""

import torch

from common.settings import decode
from data.tokenizers.build import BytesConfig, build_tokenizer
from data.tokenizers.chat import ChatTokenizer
from inference.engine import PROMPT_CHUNK, read_tokens
from inference.generation import Generation
from inference.sampling import SamplingConfig, sample_next_tokens
from model.config import GPTConfig
from model.gpt import GPT
from model.graphs import DecodingStep
from model.state_trees import cat_states

BYTES = build_tokenizer(BytesConfig(name="bytes"))
CHAT = ChatTokenizer(BYTES)


def gpt_of(eot_id=None, **changes):
    """A model of bytes with random weights, the same at every call. Parts are settings, or names."""
    torch.manual_seed(0)
    raw = {"n_vocab": 257, "n_layer": 2, "n_head": 2, "n_embd": 16, "attention": "log_space", "block": "mlp"}
    raw |= {"position": "log_recurrence"} | changes
    raw = {key: {"name": value} if isinstance(value, str) else value for key, value in raw.items()}
    return GPT(decode(GPTConfig, raw), eot_id).eval()


def drawn_without_engine(gpt, prompts, n, n_vocab, sampling=None, seed=0):
    """The next n tokens of texts of any lengths, (B, n), drawn from what the model gives for one after the other."""
    texts = []
    for prompt in prompts:
        prefix = None
        for chunk in prompt.unsqueeze(0).split(PROMPT_CHUNK, dim=1):
            prefix, _ = read_tokens(gpt, chunk, n_vocab, prefix)
        texts.append(prefix)
    prefix = cat_states(texts)
    step = DecodingStep(gpt, len(texts))
    samplings = [sampling or SamplingConfig()] * len(texts)
    generators = [torch.Generator().manual_seed(seed) for _ in texts]
    drawn = [torch.tensor(sample_next_tokens(prefix.logits, samplings, generators))]
    while len(drawn) < n:
        prefix, _ = read_tokens(gpt, drawn[-1].unsqueeze(1), n_vocab, prefix, step)
        drawn.append(torch.tensor(sample_next_tokens(prefix.logits, samplings, generators)))
    return torch.stack(drawn, dim=1)


class Recorded(Generation):
    """Keeps the logits that each token was drawn from."""

    logits = ()

    def accept(self, token_id, logits):
        self.logits = [*self.logits, logits]
        super().accept(token_id, logits)


def random_ids(n, seed=0):
    return tuple(torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())
