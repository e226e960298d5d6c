"""Tiny texts and models of bytes."""

import torch

from data.chat import ChatTokenizer
from data.tokenizer import BytesConfig, build_tokenizer
from inference.generation import Generation

BYTES = build_tokenizer(BytesConfig(name="bytes"))
CHAT = ChatTokenizer(BYTES)


class Recorded(Generation):
    """Keeps the logits that each token was drawn from."""

    logits = ()

    def accept(self, token_id, logits):
        self.logits = [*self.logits, logits]
        super().accept(token_id, logits)


def random_ids(n, seed=0):
    return tuple(torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())
