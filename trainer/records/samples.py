"""A short text at every evaluation: how training changes what a model writes.

inference/engine.py generates faster, in one process. Here every process takes part, because with
fsdp each holds a shard of the weights.
"""

from contextlib import nullcontext

import torch

from common.settings import UserError
from data.tokenizers.build import Tokenizer
from data.tokenizers.chat import ChatTokenizer
from model.gpt import GPT
from runtime.device import Compute, is_compiled
from runtime.distributed import World

_TOKENS = 100
_TEMPERATURE = 0.8


def read_prompt(prompt: str, tokenizer: Tokenizer, max_len: int | None) -> tuple[str, list[int]]:
    """Return what a sample begins with: a text, and its tokens after <|endoftext|>, as in training.

    Raises:
        UserError: the tokens do not fit into the model's learned positions.
    """
    ids = [tokenizer.eot_id]
    if prompt and isinstance(tokenizer, ChatTokenizer):
        ids += tokenizer.encode_chat([("user", prompt)], answer=True)
        prompt += "\n"
    else:
        ids += tokenizer.encode(prompt)
    if max_len is not None and len(ids) > max_len:
        raise UserError(
            f"eval.prompt has {len(ids)} tokens, more than the model's {max_len} positions: "
            "shorten it"
        )
    return prompt, ids


@torch.no_grad()
def sample_text(
    gpt: GPT, prompt: str, tokenizer: Tokenizer, compute: Compute, world: World, seed: int
) -> str:
    """Return a prompt and at most 100 tokens that follow. Every process must call this.

    Random numbers come from a generator of its own, so training does not change.
    """
    max_len = gpt.config.max_len
    prompt, prompt_ids = read_prompt(prompt, tokenizer, max_len)
    room = _TOKENS if max_len is None else min(_TOKENS, max_len - len(prompt_ids) + 1)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([prompt_ids], device=world.device)
    state = None
    drawn: list[int] = []
    gpt.eval()
    # Compiling for texts of every length would take minutes.
    with torch.compiler.set_stance("force_eager") if is_compiled(gpt) else nullcontext():
        while len(drawn) < room:
            with compute.autocast():
                logits, state = gpt(ids, state, return_state=True)
            weights = (logits[0, -1, : tokenizer.n_vocab].double().cpu() / _TEMPERATURE).softmax(-1)
            token = torch.multinomial(weights, 1, generator=generator)
            # All processes go on with the token of rank 0.
            ids = world.gather(token.to(world.device))[0].view(1, 1)
            if ids.item() in tokenizer.end_ids:
                break
            drawn.append(int(ids))
    gpt.train()
    return prompt + tokenizer.decode_bytes(drawn).decode(errors="replace")
