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
from model.gpt import GPT

_NO_TOKENS = ": the text ended at once; try another seed or prompt, or, to chat, interactive=true"
_LONGEST = 2**28  # characters of a prompt: what is longer, such as a pipe, may have no end


class SampleConfig(SamplingConfig, ModelConfig, defaults="sample"):
    """The settings of sample.py: those of SamplingConfig and ModelConfig, and these."""

    prompt: str
    """Text to continue; "-" reads it from standard input; empty: a text from its beginning."""
    message: str
    """A message to a chat model, which answers it."""
    prompt_file: Path | None
    """Read the prompt from this file instead."""
    prompts_file: Path | None
    """Read several prompts from this file, one a line; empty lines are skipped."""
    interactive: bool
    """Hold a conversation that begins with the prompt."""
    system: str
    """The system's message, with which a conversation begins."""
    max_new_tokens: int = Field(ge=1)
    """Longest continuation, or answer; a text may end before."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...]
    """Strings that end a continuation and are not included in it.

    On the command line it is a JSON list of them, or one, in which \\n and \\t are a new line and a
    tab.
    """
    num_samples: int = Field(ge=1)
    """Continuations of each prompt; number i has seed + i."""
    seed: int = Field(ge=0, lt=2**62)
    """Seed of the sampling."""
    micro_batch: int = Field(ge=1)
    """Continuations that go through the model at once; they are printed in order."""
    output: Literal["text", "json"]
    """json: a line of JSON for each continuation."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_a_list(cls, raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        if not raw.startswith("["):  # as it is typed within a shell's quotes
            return (raw.replace("\\n", "\n").replace("\\t", "\t"),)
        try:
            return parse_json(raw.encode())
        except ValueError as error:
            raise ValueError(
                f'{error}: give a text, or a JSON list of texts such as \'["\\n\\n", "END"]\''
            ) from None

    @model_validator(mode="after")
    def _go_together(self) -> "SampleConfig":
        prompts = {
            "prompt": self.prompt,
            "message": self.message,
            "prompt_file": self.prompt_file,
            "prompts_file": self.prompts_file,
        }
        keys = [key for key, value in prompts.items() if value]
        if len(keys) > 1:
            raise ValueError(f"{' and '.join(keys)} are both given: give one")
        if self.system and not (self.interactive or self.message):
            raise ValueError(
                "system is for conversations: give interactive=true or message too, or put it into "
                "prompt"
            )
        if self.interactive and self.message:
            raise ValueError("interactive=true begins with prompt: give that instead of message")
        if self.interactive and (self.prompts_file or self.prompt == "-"):
            raise ValueError(
                "a conversation with interactive=true begins with one prompt, and its lines come "
                "from standard input: give prompt or prompt_file"
            )
        return self


def run_sampling(config: SampleConfig) -> None:
    """Print the samples as they come, and write them to sample.txt in the run directory.

    Only samples go to standard output; all messages go to standard error.
    """
    console.stderr = True
    try:
        prompts = read_prompts(config)
        loaded = load(config)
        loaded.place(loaded.runtime.device, autocast=False)
        # In training, every text follows the end of another.
        request = Request(
            (loaded.tokenizer.eot_id,), sampling=config, seed=config.seed, stop=config.stop
        )
        if config.interactive or config.message:
            request = _after_system(loaded, request, config)
        if config.interactive:
            _converse(loaded, prompts[0], request, config)
        else:
            _continue(loaded, prompts, request, config)
    finally:
        console.stderr = False


def _after_system(loaded: Loaded, request: Request, config: SampleConfig) -> Request:
    """Return the request after the system's message, if there is one."""
    tokenizer = loaded.tokenizer
    if isinstance(tokenizer, ChatTokenizer):
        system = [("system", config.system)] if config.system else []
        return replace(request, ids=(*request.ids, *tokenizer.encode_chat(system)))
    if config.system or config.message:
        key = "system" if config.system else "message"
        raise UserError(f"{key} is for chat models, which this is not: put it into prompt")
    return request


def _converse(loaded: Loaded, prompt: str, request: Request, config: SampleConfig) -> None:
    conversation = Conversation(loaded.gpt, loaded.tokenizer, request)
    if not conversation.chat:
        conversation.add(prompt)
    try:
        converse(conversation, config.max_new_tokens, prompt if conversation.chat else "")
    finally:
        loaded.checkpoint.write_result("sample.txt", conversation.text + "\n")


def _continue(loaded: Loaded, prompts: list[str], request: Request, config: SampleConfig) -> None:
    """Print every continuation in order, one while it grows; the others grow with it."""
    tokenizer = loaded.tokenizer
    is_text = config.output == "text"
    before, after = ("> ", "\n") if config.message else ("", "")
    if isinstance(tokenizer, ChatTokenizer) and not config.message:
        say("this chat model continues prompt as a text: to ask it a question, give message")
    engine = Engine(loaded.gpt, tokenizer.n_vocab, config.micro_batch, end_ids=tokenizer.end_ids)
    samples = _samples(loaded, prompts, request, config, engine)
    engine.submit(sample for _, sample in samples)
    started = time.perf_counter()
    try:
        engine.turn()  # the model's own messages come here, not in the middle of a text
        for i, (prompt, sample) in enumerate(samples):
            if is_text:
                heading = _heading(i, len(prompts), config.num_samples, sample.request.seed)
                show(heading + before + prompt + after)
            for text in stream(engine, sample):
                if is_text:
                    show(text)
            show("\n" if is_text else json.dumps(_record(prompt, sample)) + "\n")
    except KeyboardInterrupt:
        show("\n")
        raise
    finally:  # interrupted texts are kept too
        begun = [
            before + prompt + after + sample.text for prompt, sample in samples if sample.drawn
        ]
        if begun:
            loaded.checkpoint.write_result("sample.txt", "\n\n---\n\n".join(begun) + "\n")
        say_rate(sum(sample.n_tokens for _, sample in samples), time.perf_counter() - started)


def _samples(
    loaded: Loaded, prompts: list[str], request: Request, config: SampleConfig, engine: Engine
) -> list[tuple[str, Generation]]:
    """The continuations to draw, with their prompts. A single prompt is read here, for all samples.

    Raises:
        UserError: a prompt is too long for the model, or for memory.
    """
    tokenizer = loaded.tokenizer
    samples = []
    for prompt in prompts:
        new = tokenizer.encode(prompt)
        if config.message:
            assert isinstance(tokenizer, ChatTokenizer)
            new = tokenizer.encode_chat([("user", prompt)], answer=True)
        ids = (*request.ids, *new)
        continuation = replace(request, ids=ids, max_tokens=config.max_new_tokens)
        engine.check(continuation)
        if len(prompts) == 1:
            continuation = prefill(loaded.gpt, tokenizer, continuation)
        for i in range(config.num_samples):
            sample = Generation(replace(continuation, seed=config.seed + i), tokenizer)
            samples.append((prompt, sample))
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
    names = []
    if n_prompts > 1:
        names.append(f"prompt {prompt + 1} of {n_prompts}")
    if n_samples > 1:
        names.append(f"sample {sample + 1} of {n_samples}")
    return f"--- {', '.join(names)}, seed {seed}\n" if names else ""


def read_prompts(config: SampleConfig) -> list[str]:
    """The prompts, without the end of the last line of a file or of standard input.

    Raises:
        UserError: they cannot be read, or there are none.
    """
    path = config.prompt_file or config.prompts_file
    source = "the prompt"
    if config.prompt_file:
        source = f"prompt_file={path}"
    elif config.prompts_file:
        source = f"prompts_file={path}"
    try:
        text = config.prompt or config.message
        is_piped = text == "-"
        if is_piped:
            text = sys.stdin.read(_LONGEST)
        if path:
            with path.open(encoding="utf-8", newline="") as file:
                text = file.read(_LONGEST)
        if "\0" in text:  # UTF-16 has them, and text has none
            raise UnicodeError
        # An argument's invalid bytes are surrogates, which fail here.
        f"{config.system}{text}".encode()
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise UserError(
            f"{source} is not in UTF-8: convert it, as in iconv -f UTF-16 -t UTF-8 OLD > NEW"
        ) from None
    if len(text) == _LONGEST:
        raise UserError(
            f"the prompt has {_LONGEST:,} characters or more, or no end: give a shorter one"
        )
    text = text.removeprefix("\ufeff")  # the byte order mark
    if config.prompts_file:
        prompts = [line for line in re.split(r"\r?\n", text) if line]
        if not prompts:
            raise UserError(f"prompts_file={path} has no prompts: write one per line")
        return prompts
    if path or is_piped:  # a file, and what `echo` prints, end with a new line
        text = re.sub(r"\r?\n\Z", "", text)
    return [text]


class Conversation:
    """A conversation of a person and a model. The model reads exactly the text that was shown.

    An answer may end within a token: before a stop string, or at an incomplete character. So the
    model rereads what was shown of the answer, followed by the next text, from the state before the
    answer.

    With a chat model, a person's texts are messages, and <|end|> closes every answer, also one that
    was cut.
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
        self._gpt = gpt
        self._tokenizer = tokenizer
        self._generator = torch.Generator().manual_seed(request.seed)
        self._engine = Engine(gpt, tokenizer.n_vocab, max_streams=1, end_ids=tokenizer.end_ids)

    def add(self, text: str) -> None:
        """Read the last answer and what a person writes after it.

        Raises:
            UserError: the text does not fit into learned positions or memory; the conversation is
                unchanged.
        """
        new = self._tokenizer.encode(text)
        if self.chat and text:
            new = self.chat.encode_chat([("user", text)], answer=True)
            text = f"\n> {text}\n" if self.text else f"> {text}\n"
        request = replace(self.request, ids=(*self.request.ids, *new))
        self._engine.check(request)
        self.request = prefill(self._gpt, self._tokenizer, request, to_end=True)
        self.text += text
        self.ended = False

    def answer(self, max_new_tokens: int) -> Iterator[str]:
        """Yield what the model writes next as it comes.

        If the caller stops listening, the answer ends there.
        """
        self.add("")
        n_new = max_new_tokens if self.left is None else min(max_new_tokens, self.left)
        if n_new == 0:
            return
        # One more token than wanted: at its limit, a generation would show an incomplete last
        # character.
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
            self.request = replace(self.request, ids=self._read_again(answer, shown))
            self._engine.turn()  # the answer leaves, and its memory is free

    def _read_again(self, answer: Generation, shown: str) -> tuple[int, ...]:
        """Return the ids of what was shown of an answer, and of its end."""
        ids = answer.drawn[: answer.n_tokens]
        text = self._decoded(ids)
        while not shown.startswith(text):
            ids.pop()
            text = self._decoded(ids)
        ids += self._tokenizer.encode(shown[len(text) :])
        if self.chat:
            ids.append(self.chat.end_id)
        elif self.ended:
            ids.append(self._tokenizer.eot_id)
        return tuple(ids)

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode_bytes(ids).decode(errors="replace")

    @property
    def left(self) -> int | None:
        """How many more tokens the learned positions allow; None: no limit."""
        max_len = self._gpt.config.max_len
        return None if max_len is None else max(0, max_len - self.request.n_prompt)


def converse(conversation: Conversation, max_new_tokens: int, message: str = "") -> None:
    """Take turns at the terminal, or with lines from a pipe, until the input ends.

    `message`: comes before the first of them.
    """
    with contextlib.suppress(ImportError):  # it gives `input` line editing and a history
        import readline  # noqa: F401
    how = "Type a message, and the model answers."
    if not conversation.chat:
        say(
            "this model continues texts and does not answer: train.py experiment=chat makes one "
            "that does"
        )
        how = "Type a text, and the model continues it. Press Enter alone to let it continue."
    say(
        f"{how} End a line with \\ to add another line. Ctrl-C stops an answer, Ctrl-D ends the "
        "conversation."
    )
    if conversation.text:
        show(conversation.text + "\n")
    elif message:
        show(f"> {message}\n")
    seconds = 0.0
    text = message or _ask(echo="> " if conversation.chat else "")
    while text is not None:
        if text or not conversation.chat:
            started = time.perf_counter()
            end = _show_answer(conversation, text, max_new_tokens)
            seconds += time.perf_counter() - started
            show(end)
        if conversation.left == 0:
            say("the conversation has reached the model's last position: start a new one")
            break
        text = _ask(echo="> " if conversation.chat else "")
    say_rate(conversation.n_tokens, seconds, "")


def _show_answer(conversation: Conversation, text: str, max_new_tokens: int) -> str:
    """Show the answer to a text as it comes, and return what to show after it."""
    try:
        conversation.add(text)
        for answer in conversation.answer(max_new_tokens):
            show(answer)
        if conversation.ended:
            return "\n(the model ends the text here)\n"
    except KeyboardInterrupt:  # it ends this answer only
        pass
    except UserError as error:
        show(f"({error})")
    return "\n"


def _ask(echo: str) -> str | None:
    """What a person types, with lines that end in a backslash joined; None: the input has ended.

    Lines from a pipe are shown, after `echo`.
    """
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
            if not typing and text + line:
                show(f"{echo}{text}{line}\n" if echo else text + line)
            return text + line
        text += line.removesuffix("\\") + "\n"


def say_rate(n_tokens: int, seconds: float, none: str = _NO_TOKENS) -> None:
    """Print how many tokens were drawn, and how fast, or `none`."""
    rate = f", {n_tokens / max(seconds, 1e-9):.0f} a second" if n_tokens else none
    say(f"({count(n_tokens, 'token')}{rate})")
