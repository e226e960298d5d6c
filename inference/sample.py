"""sample.py: text from a checkpoint, printed as it is generated; or a conversation."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator

from common.console import console, count, say, write_text
from common.files import parse_json
from common.settings import JsonDict, UserError
from data.tokenizers.build import Tokenizer
from data.tokenizers.chat import ChatTokenizer
from inference.engine import Engine, PromptCache, stream_text
from inference.generation import Generation, Request
from inference.load import Loaded, ModelConfig, load
from inference.sampling import SamplingConfig
from model.gpt import GPT


class SampleConfig(SamplingConfig, ModelConfig, defaults="sample"):
    """The settings of sample.py: those of SamplingConfig and ModelConfig, and these."""

    prompt: str
    """Text to continue; "-" reads it from standard input; empty: a text from its beginning."""
    message: str
    """A message to a chat model, which answers it."""
    prompts_file: Path | None
    """Read several prompts from this file, one a line; empty lines are skipped."""
    interactive: bool
    """Hold a conversation with a chat model. It begins with the prompt or message, if given."""
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

    @property
    def beginning(self) -> list[tuple[str, str]]:
        """The messages, (role, text), that a conversation begins with."""
        return [("system", self.system)] if self.system else []

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
            "prompts_file": self.prompts_file,
        }
        keys = [key for key, value in prompts.items() if value]
        if len(keys) > 1:
            raise ValueError(f"{' and '.join(keys)} are both given: give one")
        is_chat = self.interactive or self.message
        if self.system and not is_chat:
            raise ValueError(
                "system is for conversations: give interactive=true or message too, or put it into "
                "prompt"
            )
        reads_input = self.prompts_file or "-" in prompts.values()
        if self.interactive and reads_input:
            raise ValueError(
                "a conversation with interactive=true begins with one prompt, and its lines come "
                "from standard input: give prompt"
            )
        return self


def run_sampling(config: SampleConfig) -> list[str]:
    """Print the samples as they come, and write them to sample.txt in the run directory.

    Only samples go to standard output; all messages go to standard error.

    Returns:
        The continuations, or the answers, in order.
    """
    console.stderr = True
    n_threads = torch.get_num_threads()
    try:
        prompts = read_prompts(config)
        loaded = load(config)
        loaded.place(loaded.compute.device, autocast=False)
        if not config.interactive:
            return _continue(loaded, prompts, config)
        tokenizer = _require_chat(loaded, "interactive=true")
        conversation = Conversation(loaded.gpt, tokenizer, config)
        try:
            take_turns(conversation, prompts[0])
        finally:
            loaded.checkpoint.write_result("sample.txt", conversation.text + "\n")
        return [text for role, text in conversation.messages if role == "assistant"]
    finally:
        console.stderr = False
        torch.set_num_threads(n_threads)  # a notebook may train next


def _require_chat(loaded: Loaded, option: str) -> ChatTokenizer:
    """Return the tokenizer of a chat model. Raise UserError if the model is not one."""
    if isinstance(loaded.tokenizer, ChatTokenizer):
        return loaded.tokenizer
    raise UserError(
        f"{option} is for chat models, which this is not: give prompt to continue a text; "
        "train.py experiment=chat makes a model that answers"
    )


def _continue(loaded: Loaded, prompts: list[str], config: SampleConfig) -> list[str]:
    """Print every continuation in order, one while it grows; the others grow with it."""
    is_text = config.output == "text"
    if isinstance(loaded.tokenizer, ChatTokenizer) and not config.message:
        say("this chat model continues prompt as a text: to ask it a question, give message")
    # With the cache, the samples of a prompt read its whole chunks once.
    engine = _build_engine(loaded.gpt, loaded.tokenizer, config.micro_batch)
    # All texts wait in order; the engine writes micro_batch of them at once.
    samples = _list_samples(loaded, prompts, config, engine)
    engine.submit(sample for _, sample in samples)
    started = time.perf_counter()
    try:
        engine.turn()  # the model's own messages come here, not in the middle of a text
        for i, (prompt, sample) in enumerate(samples):
            if is_text:
                heading = _format_heading(i, len(prompts), config.num_samples, sample.request.seed)
                write_text(heading + _format_prompt(prompt, config))
            for text in stream_text(engine, sample):
                if is_text:
                    write_text(text)
            line = "" if is_text else json.dumps(_describe_sample(prompt, sample))
            write_text(f"{line}\n")
    except KeyboardInterrupt:
        write_text("\n")
        raise
    finally:  # interrupted texts are kept too
        texts = [
            _format_prompt(prompt, config) + sample.text
            for prompt, sample in samples
            if sample.drawn
        ]
        if texts:
            loaded.checkpoint.write_result("sample.txt", "\n\n---\n\n".join(texts) + "\n")
            _say_rate(sum(sample.n_tokens for _, sample in samples), time.perf_counter() - started)
    return [sample.text for _, sample in samples]


def _build_engine(gpt: GPT, tokenizer: Tokenizer, max_streams: int) -> Engine:
    """Return an engine that keeps the state of the last prompt."""
    cache = PromptCache(max_states=1, max_bytes=sys.maxsize)
    return Engine(gpt, tokenizer.n_vocab, max_streams, cache=cache)


def _format_prompt(prompt: str, config: SampleConfig) -> str:
    """Return a prompt as it is shown before its continuation, or a message before its answer."""
    return f"> {prompt}\n" if config.message else prompt


def _list_samples(
    loaded: Loaded, prompts: list[str], config: SampleConfig, engine: Engine
) -> list[tuple[str, Generation]]:
    """Return the continuations to draw, with their prompts.

    Raises:
        UserError: a prompt is too long for the model, or a message is for another model.
    """
    samples = []
    for prompt in prompts:
        if config.message:
            tokenizer = _require_chat(loaded, "message")
            ids = _encode_chat(tokenizer, [*config.beginning, ("user", prompt)])
        else:
            # In training, every text follows the end of another.
            ids = (loaded.tokenizer.eot_id, *loaded.tokenizer.encode(prompt))
        for i in range(config.num_samples):
            request = Request(ids, config.max_new_tokens, config, config.seed + i, config.stop)
            engine.check_length(request)
            samples.append((prompt, Generation(request, loaded.tokenizer)))
    return samples


def _encode_chat(tokenizer: ChatTokenizer, messages: list[tuple[str, str]]) -> tuple[int, ...]:
    """Return the ids of a conversation, after which the assistant answers."""
    return (tokenizer.eot_id, *tokenizer.encode_chat(messages, answer=True))


def _describe_sample(prompt: str, sample: Generation) -> JsonDict:
    return {
        "prompt": prompt,
        "text": sample.text,
        "seed": sample.request.seed,
        "prompt_tokens": len(sample.request.ids) - 1,
        "tokens": sample.n_tokens,
        "finish_reason": sample.finish_reason,
    }


def _format_heading(i: int, n_prompts: int, n_samples: int, seed: int) -> str:
    """Return a line that names the i-th of all continuations, or "" if it is the only one."""
    prompt, sample = divmod(i, n_samples)
    names = []
    if n_prompts > 1:
        names.append(f"prompt {prompt + 1} of {n_prompts}")
    if n_samples > 1:
        names.append(f"sample {sample + 1} of {n_samples}")
    return f"--- {', '.join(names)}, seed {seed}\n" if names else ""


def read_prompts(config: SampleConfig) -> list[str]:
    """Return the prompts. The end of the last line of standard input is not part of one.

    Raises:
        UserError: they are not in UTF-8, or there are none.
    """
    path = config.prompts_file
    source = "the prompt" if path is None else f"prompts_file={path}"
    text = config.prompt or config.message
    try:
        if path is not None:
            text = path.read_bytes().decode()
        elif text == "-":  # a file, and what `echo` prints, end with a new line
            text = re.sub(r"\r?\n\Z", "", sys.stdin.read())
        if "\0" in text:  # UTF-16 has them, and text has none
            raise UnicodeError
        # An argument's invalid bytes are surrogates, which fail here.
        f"{config.system}{text}".encode()
    except UnicodeError:
        raise UserError(
            f"{source} is not in UTF-8: convert it, as in iconv -f UTF-16 -t UTF-8 OLD > NEW"
        ) from None
    text = text.removeprefix("\ufeff")  # the byte order mark
    if path is None:
        return [text]
    prompts = [line for line in re.split(r"\r?\n", text) if line]
    if not prompts:
        raise UserError(f"{source} has no prompts: write one per line")
    return prompts


class Conversation:
    """A conversation of a person and a chat model, which reads exactly what was shown."""

    def __init__(self, gpt: GPT, tokenizer: ChatTokenizer, config: SampleConfig) -> None:
        self.messages = config.beginning
        """(role, text) of each message so far."""
        self._gpt = gpt
        self._tokenizer = tokenizer
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed)
        self._engine = _build_engine(gpt, tokenizer, 1)

    @property
    def text(self) -> str:
        """The conversation as it was shown."""
        lines = []
        for role, text in self.messages:
            if role != "system":
                lines.append(f"> {text}" if role == "user" else text)
        return "\n".join(lines)

    def answer(self, message: str) -> Iterator[str]:
        """Yield the model's answer to a message as it comes.

        If the caller stops listening, the answer ends there.

        Raises:
            UserError: the message does not fit into learned positions; the conversation is
                unchanged.
        """
        messages = [*self.messages, ("user", message)]
        ids = _encode_chat(self._tokenizer, messages)
        n_new = self._config.max_new_tokens
        max_len = self._gpt.config.max_len
        if max_len is not None:
            n_new = max(1, min(n_new, max_len - len(ids)))
        request = Request(ids, n_new, self._config, stop=self._config.stop)
        self._engine.check_length(request)
        answer = Generation(request, self._tokenizer)
        answer.generator = self._generator
        self._engine.submit([answer])
        shown = ""
        try:
            for text in stream_text(self._engine, answer):
                shown += text
                yield text
        finally:
            answer.cancelled = True  # first: a second Ctrl-C may interrupt the rest
            self.messages = [*messages, ("assistant", shown)]
            self._engine.turn()  # the answer leaves, and its memory is free


def take_turns(conversation: Conversation, message: str = "") -> None:
    """Take turns at the terminal, or with lines from a pipe, until the input ends.

    `message`: comes before the first of them.
    """
    with contextlib.suppress(ImportError):  # it gives `input` line editing and a history
        import readline  # noqa: F401
    say(
        "Type a message, and the model answers. End a line with \\ to add another line. Ctrl-C "
        "stops an answer, Ctrl-D ends the conversation."
    )
    if message:
        write_text(f"> {message}\n")
    text = message or _read_message()
    while text is not None:
        if text:
            try:
                for new in conversation.answer(text):
                    write_text(new)
            except KeyboardInterrupt:  # it ends this answer only
                pass
            except UserError as error:
                write_text(f"({error})")
            write_text("\n")
        text = _read_message()


def _read_message() -> str | None:
    """Return what a person types, with lines that end in a backslash joined; None at the end.

    Lines from a pipe are shown.
    """
    typing = sys.stdin.isatty() and sys.stdout.isatty()
    text = ""
    while True:
        prompt = "... " if text else "> "
        try:
            line = input(prompt if typing else "")
        except (EOFError, KeyboardInterrupt):
            write_text("\n" if typing else "")
            return None
        if not line.endswith("\\"):
            text += line
            if text and not typing:
                write_text(f"> {text}\n")
            return text
        text += line.removesuffix("\\") + "\n"


def _say_rate(n_tokens: int, seconds: float) -> None:
    """Print how many tokens were drawn, and how fast."""
    note = ": the text ended at once; try another seed or prompt"
    if n_tokens:
        note = f", {n_tokens / seconds:.0f} a second"
    say(f"({count(n_tokens, 'token')}{note})")
