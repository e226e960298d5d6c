"""sample.py: text from a checkpoint, shown as it is generated."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from common.console import console, show
from common.files import parse_json
from common.settings import UserError
from data.tokenizer import Tokenizer
from inference.continuations import Continuation, grow, pieces
from inference.conversation import Conversation, converse, say_rate
from inference.generate import SamplingConfig
from model.gpt import GPT
from trainer.checkpoint import Checkpoint, load_model, open_model
from trainer.runtime import DeviceConfig, open_runtime


class SampleConfig(SamplingConfig):
    """What sample.py takes: SamplingConfig's keys, and these."""

    checkpoint: Path
    """A run directory (its newest checkpoint), or a checkpoint."""
    prompt: str = ""
    """Text to continue; "-" reads it from standard input; empty: a text from its beginning."""
    prompt_file: Path | None = None
    """Read the prompt from this file instead."""
    prompts_file: Path | None = None
    """Read several prompts from this file, one a line; empty lines are passed over."""
    interactive: bool = False
    """Type, read, continue: a conversation after the prompt, its state kept."""
    max_new_tokens: int = Field(200, ge=1)
    """Longest continuation, or answer; a text may end before."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a continuation and are no part of it; on the command line one, or a JSON list of them."""
    num_samples: int = Field(1, ge=1)
    """Continuations of each prompt; number i has seed + i."""
    temperature: float = Field(0.8, ge=0, allow_inf_nan=False)
    """Below 1 sharpens, above 1 flattens; 0 takes the most likely token."""
    top_k: int | None = Field(200, ge=1)
    """Sample among this many most likely tokens; null: all."""
    seed: int = Field(1, ge=0, lt=2**62)
    """Of the sampling."""
    micro_batch: int = Field(16, ge=1)
    """Continuations that go through the model at once; text in the order of the prompts all the same."""
    output: Literal["text", "json"] = "text"
    """json: a line of JSON for each continuation."""
    runtime: DeviceConfig

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_a_list(cls, raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        try:
            return parse_json(raw.encode()) if raw.startswith("[") else (raw,)
        except ValueError as error:
            raise ValueError(f'{error}: give a text, or a JSON list of texts such as \'["\\n\\n", "END"]\'') from None

    @model_validator(mode="after")
    def _go_together(self) -> "SampleConfig":
        given = [key for key in ("prompt", "prompt_file", "prompts_file") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given: give one")
        usual = {"prompts_file": None, "num_samples": 1, "output": "text"}
        odd = [key for key, value in usual.items() if getattr(self, key) != value]
        if self.prompt == "-":
            odd.append("prompt")
        if self.interactive and odd:
            raise ValueError(f"{odd[0]}={getattr(self, odd[0])} is not for interactive=true: leave out one of the two")
        return self


def run_sampling(config: SampleConfig) -> None:
    """Print the samples as they come, and write them to samples.txt in the run directory.

    Standard output gets them and nothing else: all messages go to standard error.
    """
    with _messages_aside():
        runtime = open_runtime(config.runtime)
        runtime.announce()
        prompts = _read_prompts(config)
        checkpoint = open_model(config.checkpoint)
        gpt, tokenizer = load_model(checkpoint)
        gpt = gpt.to(runtime.device, runtime.dtype).eval()  # without a backward pass, weights may be bfloat16
        if config.interactive:
            _converse(gpt, tokenizer, prompts[0], config, checkpoint)
        else:
            _continue(gpt, tokenizer, prompts, config, checkpoint)


def _converse(gpt: GPT, tokenizer: Tokenizer, prompt: str, config: SampleConfig, checkpoint: Checkpoint) -> None:
    """Talk, from the prompt on."""
    conversation = Conversation(gpt, tokenizer, config, config.stop, config.seed)
    conversation.add(prompt)
    try:
        converse(conversation, config.max_new_tokens)
    finally:
        checkpoint.leave("samples.txt", conversation.text + "\n")


def _continue(
    gpt: GPT, tokenizer: Tokenizer, prompts: Sequence[str], config: SampleConfig, checkpoint: Checkpoint
) -> None:
    """Show every continuation in order, the first while it grows: those behind it grow with it."""
    seeds = range(config.seed, config.seed + config.num_samples)
    texts = [
        Continuation(tokenizer, prompt, seed, config.max_new_tokens, config.stop)
        for prompt in prompts
        for seed in seeds
    ]
    check_lengths(gpt, texts, config.max_new_tokens)
    steps = grow(gpt, texts, n_vocab=tokenizer.n_vocab, sampling=config, at_once=config.micro_batch)
    started = time.perf_counter()
    try:
        next(steps, None)  # before anything is shown: a model says once how it computes, and not amid a text
        for i, text in enumerate(texts):
            _print(text, pieces(text, steps), config, _heading(i, text, len(prompts), config.num_samples))
    except KeyboardInterrupt:
        show("\n")
        raise
    finally:  # what there is, also where it is interrupted
        if begun := [text.prompt + text.text for text in texts if text.n_tokens or text.finish_reason]:
            checkpoint.leave("samples.txt", "\n\n---\n\n".join(begun) + "\n")
        say_rate(sum(text.n_tokens for text in texts), time.perf_counter() - started)


def _heading(i: int, text: Continuation, n_prompts: int, n_samples: int) -> str:
    """What number i of all is; nothing where it is the only one."""
    prompt, sample = divmod(i, n_samples)
    which = [f"prompt {prompt + 1} of {n_prompts}"] if n_prompts > 1 else []
    which += [f"sample {sample + 1} of {n_samples}"] if n_samples > 1 else []
    return f"--- {', '.join(which)}, seed {text.seed}" if which else ""


def _print(text: Continuation, growing: Iterator[str], config: SampleConfig, heading: str) -> None:
    """One continuation, as it grows; or, as JSON, at its end."""
    if config.output == "json":
        for _ in growing:
            pass
        print(json.dumps(text.as_dict()), flush=True)
        return
    if heading:
        show(f"{heading}\n")
    show(text.prompt)
    for piece in growing:
        show(piece)
    show("\n")


def check_lengths(gpt: GPT, texts: Sequence[Continuation], max_new_tokens: int) -> None:
    """Raise UserError where a prompt and its continuation are longer than the model's learned positions."""
    max_len, longest = gpt.config.max_len, max(len(text.prompt_ids) for text in texts)
    if max_len is not None and longest + max_new_tokens - 1 > max_len:  # the last token is not read again
        raise UserError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} are more than the "
            f"model's {max_len} learned positions: shorten the one or the other"
        )


def _read_prompts(config: SampleConfig) -> list[str]:
    path = config.prompt_file or config.prompts_file
    try:
        text = path.read_text(encoding="utf-8") if path else sys.stdin.read() if config.prompt == "-" else config.prompt
        text.encode()  # an argument's bytes that are not UTF-8 have become half characters
    except (OSError, UnicodeError) as error:
        source = f"{'prompt_file' if config.prompt_file else 'prompts_file'}={path}" if path else "the prompt"
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        raise UserError(f"{source} cannot be read: {reason}") from None
    if not config.prompts_file:
        return [text]
    if not (prompts := [line for line in text.split("\n") if line]):
        raise UserError(f"prompts_file={path} has no prompts: write one a line")
    return prompts


@contextlib.contextmanager
def _messages_aside() -> Iterator[None]:
    console.stderr = True
    try:
        yield
    finally:
        console.stderr = False
