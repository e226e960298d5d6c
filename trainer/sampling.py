"""sample.py: text from a checkpoint, shown as it is generated."""

import codecs
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from pydantic import Field, model_validator

from common.console import console, say
from common.settings import Settings, UserError
from data.tokenizer import Tokenizer
from model.generate import generate
from model.gpt import GPT
from trainer.checkpoint import load_model, open_model
from trainer.runtime import DeviceConfig, Runtime, open_runtime


class SampleConfig(Settings):
    """What sample.py takes."""

    checkpoint: Path
    """A run directory (its newest checkpoint), or a checkpoint."""
    prompt: str = ""
    """Text to continue; "-" reads it from standard input; empty: a text from its beginning."""
    prompt_file: Path | None = None
    """Read the prompt from this file instead."""
    max_new_tokens: int = Field(200, ge=1)
    """Longest continuation; a text may end before."""
    num_samples: int = Field(1, ge=1)
    """Continuations, one after the other; number i has seed + i."""
    temperature: float = Field(0.8, ge=0)
    """Below 1 sharpens, above 1 flattens; 0 takes the most likely token."""
    top_k: int | None = Field(200, ge=1)
    """Sample among this many most likely tokens; null: all."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample among the fewest tokens whose probabilities add up to this much; null: all."""
    seed: int = Field(1, ge=0, lt=2**62)
    """Of the sampling."""
    runtime: DeviceConfig

    @model_validator(mode="after")
    def _one_prompt(self) -> "SampleConfig":
        if self.prompt and self.prompt_file:
            raise ValueError("prompt and prompt_file are both given: give one")
        return self


def run_sampling(config: SampleConfig) -> None:
    """Print the samples as they come, and write them to samples.txt in the run directory."""
    runtime = open_runtime(config.runtime)
    runtime.announce()
    checkpoint = open_model(config.checkpoint)
    gpt, tokenizer = load_model(checkpoint)
    gpt = gpt.to(runtime.device, runtime.dtype).eval()  # without a backward pass, weights may be bfloat16
    prompt = _read_prompt(config)
    check_length(gpt, tokenizer, prompt, config)
    texts: list[str] = []
    started, n_tokens = time.perf_counter(), 0
    try:
        for i in range(config.num_samples):
            if config.num_samples > 1:
                say(f"--- sample {i + 1} of {config.num_samples}, seed {config.seed + i}")
            texts.append(prompt)
            _show(prompt)
            for piece in stream(gpt, tokenizer, prompt, config, config.seed + i, runtime):
                texts[-1] += piece
                n_tokens += 1
                _show(piece)
            _show("\n")
    finally:  # what there is, also of a sample that is interrupted
        checkpoint.leave("samples.txt", "\n\n---\n\n".join(texts) + "\n")
    say(f"({n_tokens} tokens, {n_tokens / (time.perf_counter() - started):.0f} a second)")


def stream(
    gpt: GPT, tokenizer: Tokenizer, prompt: str, config: SampleConfig, seed: int, runtime: Runtime
) -> Iterator[str]:
    """One continuation of `prompt`, a piece of text for each token; a character that is not whole yet waits."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    tokens = generate(
        gpt,
        torch.tensor([_prompt_ids(tokenizer, prompt)], device=runtime.device),
        n_vocab=tokenizer.n_vocab,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        generator=torch.Generator().manual_seed(seed),
    )
    for token in islice(tokens, config.max_new_tokens):
        if token.item() == tokenizer.eot_id:
            break
        yield decoder.decode(tokenizer.decode_bytes([int(token.item())]))
    if rest := decoder.decode(b"", final=True):  # of a character
        yield rest


def _prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """In training, every text follows the end of another."""
    return [tokenizer.eot_id, *tokenizer.encode(prompt)]


def check_length(gpt: GPT, tokenizer: Tokenizer, prompt: str, config: SampleConfig) -> None:
    """Raise UserError where prompt and continuation are longer than the model's learned positions."""
    n_prompt = len(_prompt_ids(tokenizer, prompt))
    max_len = gpt.config.max_len
    if max_len is not None and n_prompt + config.max_new_tokens - 1 > max_len:  # the last token is not read again
        raise UserError(
            f"a prompt of {n_prompt} tokens and max_new_tokens={config.max_new_tokens} are more than the "
            f"model's {max_len} learned positions: shorten the one or the other"
        )


def _read_prompt(config: SampleConfig) -> str:
    try:
        if config.prompt == "-":
            prompt = sys.stdin.read()
        elif config.prompt_file is not None:
            prompt = config.prompt_file.read_text(encoding="utf-8")
        else:
            prompt = config.prompt
        prompt.encode()  # an argument's bytes that are not UTF-8 have become half characters
    except (OSError, UnicodeError) as error:
        source = f"prompt_file={config.prompt_file}" if config.prompt_file else "the prompt"
        raise UserError(f"{source} cannot be read: {error}") from None
    return prompt


def _show(text: str) -> None:
    """Text as it is, at once: no wrapping, no markup."""
    console.file.write(text)
    console.file.flush()
