"""sample.py: text from a checkpoint, printed as it is generated; or a conversation."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator

from common.console import console, count, say, show
from common.files import parse_json
from common.settings import JsonDict, UserError
from data.chat import ChatTokenizer
from data.tokenizer import Tokenizer
from inference.engine import Engine, stream
from inference.generation import Generation
from inference.load import Loaded, ModelConfig, load
from inference.prefill import Request, prefill
from inference.sampling import SamplingConfig
from inference.state_file import check_place, load_state, save_state
from model.gpt import GPT

_NO_TOKENS = ": the text ended at once; try another seed or prompt, or, to chat, interactive=true"
_LONGEST = 2**28  # characters of a prompt: what is longer, such as a pipe, may have no end


class SampleConfig(SamplingConfig, ModelConfig, defaults="sample"):
    """The settings of sample.py: those of SamplingConfig and ModelConfig, and these."""

    prompt: str
    """Text to continue; "-" reads it from standard input; empty: a text from its beginning."""
    prompt_file: Path | None
    """Read the prompt from this file instead."""
    prompts_file: Path | None
    """Read several prompts from this file, one a line; empty lines are skipped."""
    interactive: bool
    """Hold a conversation that begins with the prompt."""
    system: str
    """The system's message, with which a conversation begins."""
    state_in: Path | None
    """Go on after the text whose state this file has: the prompt follows it."""
    state_out: Path | None
    """Write the state after the prompt, or after the conversation, to this file."""
    max_new_tokens: int = Field(ge=0)
    """Longest continuation, or answer; a text may end before. 0, with state_out: only read the prompt."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...]
    """Strings that end a continuation and are not included in it; on the command line a JSON list of them, or one, in
    which \\n and \\t are a new line and a tab."""
    num_samples: int = Field(ge=1)
    """Continuations of each prompt; number i has seed + i."""
    seed: int = Field(ge=0, lt=2**62)
    """Seed of the sampling."""
    micro_batch: int = Field(ge=1)
    """Continuations that go through the model at once; they are printed in the order of the prompts."""
    output: Literal["text", "json"]
    """json: a line of JSON for each continuation."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_a_list(cls, raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        try:
            text = raw.replace("\\n", "\n").replace(
                "\\t", "\t"
            )  # as they are typed within a shell's quotes
            return parse_json(raw.encode()) if raw.startswith("[") else (text,)
        except ValueError as error:
            raise ValueError(
                f'{error}: give a text, or a JSON list of texts such as \'["\\n\\n", "END"]\''
            ) from None

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
            raise ValueError(
                f"{odd[0]}={getattr(self, odd[0])} cannot be used with interactive=true: leave one out"
            )
        if self.system and not self.interactive:
            raise ValueError(
                "system is for conversations: give interactive=true too, or put it into prompt"
            )
        if self.state_out and self.prompts_file:
            raise ValueError(
                "state_out is for one text: give prompt or prompt_file in place of prompts_file"
            )
        if self.max_new_tokens == 0 and (self.interactive or not self.state_out):
            raise ValueError(
                "max_new_tokens=0 only reads the prompt: give state_out=FILE too, or more tokens"
            )
        return self


def run_sampling(config: SampleConfig) -> None:
    """Print the samples as they come, and write them to sample.txt in the run directory.

    Only samples go to standard output; all messages go to standard error.
    """
    console.stderr = True
    try:
        prompts = read_prompts(config)
        if config.state_out:
            check_place(config.state_out)
        loaded = load(config)
        loaded.place(loaded.runtime.device, autocast=False)
        request = Request(
            (loaded.tokenizer.eot_id,)
        )  # in training, every text follows the end of another
        if config.state_in:
            request = load_state(config.state_in, loaded)
        request = replace(request, sampling=config, seed=config.seed, stop=config.stop)
        if config.interactive:
            _converse(loaded, prompts[0], request, config)
        else:
            _continue(loaded, prompts, request, config)
    finally:
        console.stderr = False


def _converse(loaded: Loaded, prompt: str, request: Request, config: SampleConfig) -> None:
    if config.system:
        if not isinstance(loaded.tokenizer, ChatTokenizer):
            raise UserError("system is for chat models, which this is not: put it into prompt")
        system = loaded.tokenizer.encode_chat([("system", config.system)])
        request = replace(request, ids=(*request.ids, *system))
    conversation = Conversation(loaded.gpt, loaded.tokenizer, request)
    if not conversation.chat:
        conversation.add(prompt)
    try:
        converse(conversation, config.max_new_tokens, prompt if conversation.chat else "")
    finally:
        loaded.checkpoint.write_result("sample.txt", conversation.text + "\n")
    if config.state_out:
        save_state(config.state_out, conversation.request, loaded)


def _continue(loaded: Loaded, prompts: list[str], request: Request, config: SampleConfig) -> None:
    """Print every continuation in order, the current one while it grows; the others grow with it."""
    tokenizer, n_samples, texts = loaded.tokenizer, config.num_samples, config.output == "text"
    engine = Engine(loaded.gpt, tokenizer.n_vocab, config.micro_batch, end_ids=tokenizer.end_ids)
    samples = _samples(loaded, prompts, request, config, engine)
    if not samples:  # max_new_tokens=0
        return
    engine.submit(sample for _, sample in samples)
    started = time.perf_counter()
    try:
        engine.turn()  # the model's own messages come here, not in the middle of a text
        for i, (prompt, sample) in enumerate(samples):
            if texts:
                show(_heading(i, len(prompts), n_samples, sample.request.seed) + prompt)
            for text in stream(engine, sample):
                if texts:
                    show(text)
            show("\n" if texts else json.dumps(_record(prompt, sample)) + "\n")
    except KeyboardInterrupt:
        show("\n")
        raise
    finally:  # interrupted texts are kept too
        if begun := [prompt + sample.text for prompt, sample in samples if sample.drawn]:
            loaded.checkpoint.write_result("sample.txt", "\n\n---\n\n".join(begun) + "\n")
        say_rate(sum(sample.n_tokens for _, sample in samples), time.perf_counter() - started)


def _samples(
    loaded: Loaded, prompts: list[str], request: Request, config: SampleConfig, engine: Engine
) -> list[tuple[str, Generation]]:
    """The continuations to draw, with their prompts. A single prompt is read here, once for all samples.

    Raises:
        UserError: a prompt is too long for the model, or for memory.
    """
    tokenizer, samples = loaded.tokenizer, []
    for prompt in prompts:
        ids = (*request.ids, *tokenizer.encode(prompt))
        asked = replace(request, ids=ids, max_tokens=config.max_new_tokens)
        engine.check(asked)
        if len(prompts) == 1:
            asked = prefill(loaded.gpt, tokenizer, asked)
        if config.state_out:
            save_state(config.state_out, asked, loaded)
        for i in range(config.num_samples if config.max_new_tokens else 0):
            samples.append((prompt, Generation(replace(asked, seed=config.seed + i), tokenizer)))
    return samples


def _record(prompt: str, sample: Generation) -> JsonDict:
    return {
        "prompt": prompt,
        "text": sample.text,
        "seed": sample.request.seed,
        "prompt_tokens": sample.request.n_prompt - 1,
        "tokens": sample.n_tokens,
        "finish_reason": sample.finish_reason,
    }


def _heading(i: int, n_prompts: int, n_samples: int, seed: int) -> str:
    """A line that names the i-th of all continuations; empty if it is the only one."""
    prompt, sample = divmod(i, n_samples)
    which = [f"prompt {prompt + 1} of {n_prompts}"] if n_prompts > 1 else []
    which += [f"sample {sample + 1} of {n_samples}"] if n_samples > 1 else []
    return f"--- {', '.join(which)}, seed {seed}\n" if which else ""


def read_prompts(config: SampleConfig) -> list[str]:
    """The prompts, without the end of the last line of a file or of standard input.

    Raises:
        UserError: they cannot be read, or there are none.
    """
    path = config.prompt_file or config.prompts_file
    try:
        text = sys.stdin.read(_LONGEST) if config.prompt == "-" else config.prompt
        if path:
            with path.open(encoding="utf-8", newline="") as file:
                text = file.read(_LONGEST)
        if "\0" in text:  # UTF-16 has them, and text has none
            raise UnicodeError
        f"{config.system}{text}".encode()  # fails on the surrogates that stand for an argument's invalid bytes
    except (OSError, UnicodeError) as error:
        source = (
            f"{'prompt_file' if config.prompt_file else 'prompts_file'}={path}"
            if path
            else "the prompt"
        )
        if isinstance(error, OSError):
            raise UserError(f"{source} cannot be read: {error.strerror}") from None
        raise UserError(
            f"{source} is not in UTF-8: convert it, as in iconv -f UTF-16 -t UTF-8 OLD > NEW"
        ) from None
    if len(text) == _LONGEST:
        raise UserError(
            f"the prompt has {_LONGEST:,} characters or more, or no end: give a shorter one"
        )
    text = text.removeprefix("\ufeff")  # the byte order mark
    if not config.prompts_file:
        return [
            re.sub(r"\r?\n\Z", "", text) if path or config.prompt == "-" else text
        ]  # how a file or `echo` ends
    if not (prompts := [line for line in re.split(r"\r?\n", text) if line]):
        raise UserError(f"prompts_file={path} has no prompts: write one per line")
    return prompts


class Conversation:
    """A conversation of a person and a model. The model reads exactly the text that was shown.

    An answer may end within a token: before a stop string, or at an incomplete character. So the model rereads the
    shown part of the answer, followed by the next text, from the state before the answer.

    With a chat model, a person's texts are messages, and <|end|> closes every answer, also one that was cut.
    """

    def __init__(self, gpt: GPT, tokenizer: Tokenizer, request: Request) -> None:
        """`request`: the first text, and how to continue it."""
        self.text = ""
        """Everything that was added and answered."""
        self.n_tokens = 0
        """Tokens drawn so far."""
        self.ended = False
        """Whether the model ended the text with the last answer."""
        self.request = request
        """The text so far. Its `ids` are the last answer, which the model has yet to read."""
        self.chat = tokenizer if isinstance(tokenizer, ChatTokenizer) else None
        """The tokenizer, if it has markers."""
        self._gpt, self._tokenizer = gpt, tokenizer
        self._generator = torch.Generator().manual_seed(request.seed)
        self._engine = Engine(gpt, tokenizer.n_vocab, max_streams=1, end_ids=tokenizer.end_ids)

    def add(self, text: str) -> None:
        """Read the last answer and what a person writes after it.

        Raises:
            UserError: the text does not fit into learned positions or memory; the conversation is unchanged.
        """
        new = self._tokenizer.encode(text)
        if self.chat and text:
            new = self.chat.encode_chat([("user", text)], answer=True)
            text = "\n" * bool(self.text) + f"> {text}\n"
        request = replace(self.request, ids=(*self.request.ids, *new))
        self._engine.check(request)
        self.request = prefill(self._gpt, self._tokenizer, request, to_end=True)
        self.text, self.ended = self.text + text, False

    def answer(self, max_new_tokens: int) -> Iterator[str]:
        """Yield what the model writes next as it comes. If the caller stops listening, the answer ends there."""
        self.add("")
        n_new = max_new_tokens if self.left is None else min(max_new_tokens, self.left)
        if n_new == 0:
            return
        # One more token than wanted: at its limit, a generation would show an incomplete last character.
        answer = Generation(replace(self.request, max_tokens=n_new + 1), self._tokenizer)
        answer.generator = self._generator
        self._engine.submit([answer])
        shown = ""
        try:
            for text in islice(stream(self._engine, answer), n_new):
                shown += text
                yield text
        finally:
            answer.cancelled = True  # first: a second Ctrl-C may interrupt the rest
            self.ended = answer.finish_reason == "end_of_text" and not self.chat
            self.n_tokens += answer.n_tokens
            self.text += shown
            drawn = answer.drawn[: answer.n_tokens]
            while not shown.startswith(
                text := self._tokenizer.decode_bytes(drawn).decode(errors="replace")
            ):
                drawn.pop()
            drawn += self._tokenizer.encode(shown[len(text) :])
            drawn += [self.chat.end_id] if self.chat else [self._tokenizer.eot_id] * self.ended
            self.request = replace(self.request, ids=tuple(drawn))
            self._engine.turn()  # the answer leaves, and its memory is free

    @property
    def left(self) -> int | None:
        """How many more tokens the learned positions allow; None: no limit."""
        max_len = self._gpt.config.max_len
        return None if max_len is None else max(0, max_len - self.request.n_prompt)


def converse(conversation: Conversation, max_new_tokens: int, message: str = "") -> None:
    """Take turns at the terminal, or with lines from a pipe, until the input ends. A message comes before the first."""
    with contextlib.suppress(ImportError):  # it gives `input` line editing and a history
        import readline  # noqa: F401
    how = "Type a message, and the model answers."
    if not conversation.chat:
        say(
            "this model continues texts and does not answer: train.py experiment=chat makes one that does"
        )
        how = "Type a text, and the model continues it. Press Enter alone to let it continue."
    say(
        f"{how} End a line with \\ to add another line. Ctrl-C stops an answer, Ctrl-D ends the conversation."
    )
    if before := conversation.text or (f"> {message}" if message else ""):
        show(before + "\n")
    seconds = 0.0
    while (text := message or _ask()) is not None:
        started, end, message = time.perf_counter(), "\n", ""
        if conversation.chat and not text:
            continue
        try:
            conversation.add(text)
            for answer in conversation.answer(max_new_tokens):
                show(answer)
            if conversation.ended:
                end = "\n(the model ends the text here)\n"
        except KeyboardInterrupt:  # it ends this answer only
            pass
        except UserError as error:
            show(f"({error})")
        seconds += time.perf_counter() - started
        show(end)
        if conversation.left == 0:
            say("the conversation has reached the model's last position: start a new one")
            break
    say_rate(conversation.n_tokens, seconds, "")


def _ask() -> str | None:
    """What a person types, with lines that end in a backslash joined; None: the input has ended."""
    typing = sys.stdin.isatty() and sys.stdout.isatty()
    text = ""
    while True:
        try:
            line = input(("... " if text else "> ") if typing else "")
            line.encode()
        except (EOFError, KeyboardInterrupt):
            show("\n" if typing else "")
            return None
        except UnicodeError:
            show("(that line was not UTF-8: type it again)\n")
            continue
        if not line.endswith("\\"):
            return text + line
        text += line.removesuffix("\\") + "\n"


def say_rate(n_tokens: int, seconds: float, none: str = _NO_TOKENS) -> None:
    """Print how many tokens were drawn, and how fast, or `none`."""
    say(
        f"({count(n_tokens, 'token')}{f', {n_tokens / max(seconds, 1e-9):.0f} a second' if n_tokens else none})"
    )
