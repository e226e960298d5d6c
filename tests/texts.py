"""Tiny texts and models of bytes."""

import torch

from common.settings import decode
from data.chat import ChatTokenizer
from data.tokenizer import BytesConfig, build_tokenizer
from inference.generation import Generation
from model.gpt import GPT, GPTConfig

BYTES = build_tokenizer(BytesConfig(name="bytes"))
CHAT = ChatTokenizer(BYTES)


def gpt_of(eot_id=None, **changes):
    """A model of bytes with random weights, the same at every call. Parts are settings, or names."""
    torch.manual_seed(0)
    raw = {"n_vocab": 257, "n_layer": 2, "n_head": 2, "n_embd": 16, "attention": "log_space", "block": "mlp"}
    raw |= {"position": "log_recurrence"} | changes
    raw = {key: {"name": value} if isinstance(value, str) else value for key, value in raw.items()}
    return GPT(decode(GPTConfig, raw), eot_id).eval()


class Recorded(Generation):
    """Keeps the logits that each token was drawn from."""

    logits = ()

    def accept(self, token_id, logits):
        self.logits = [*self.logits, logits]
        super().accept(token_id, logits)


def random_ids(n, seed=0):
    return tuple(torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())
