"""eval.py: a checkpoint's loss on held-out text, by set, by position, and at long contexts."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from common.figures import draw_or_warn
from common.settings import JsonDict, UserError
from data.document_index import read_sets
from data.loader import CutWindows, EvalBatches, Windows, open_eval_batches
from data.shards import TokenStream, read_manifest
from inference.bounds import find_shares_beyond_bounds
from inference.eval_report import draw_evaluation, show_evaluation
from inference.load import Loaded, ModelConfig, load
from model.gpt import GPT
from runtime.checkpoint import MODEL_FILES, open_checkpoint
from runtime.device import ProcessesConfig
from runtime.distributed import World, join_world
from runtime.launch import choose_processes, given_processes, launch_processes
from runtime.losses import Loss, LossSums, window_losses

_CONTEXTS = (1024, 4096, 16384, 65536)
# Tokens of a window that are read at once, where the state has one size.
_WINDOW_CHUNK = 4096
# Tokens of a long context that are read at once.
_CONTEXT_CHUNK = 512
_PLENTY = 10**9
"""Windows, and tokens: a process that gets none costs little, as it is a fork."""


class EvaluateConfig(ModelConfig, defaults="eval"):
    """The settings of eval.py."""

    runtime: ProcessesConfig
    dataset_dir: Path | None
    """Dataset to evaluate on; null: the one the model was trained on."""
    split: Literal["train", "val"]
    """Its split: train or val."""
    batches: Annotated[int, Field(ge=1)] | Literal["all"] | None
    """Batches of as many windows as in training, spread evenly over the split; null: as many as
    training evaluates; all: the whole split."""
    seq_len: int | None = Field(ge=1)
    """Tokens of a window; null: as in training."""
    stride: int | None = Field(ge=1)
    """Distance between the beginnings of windows; null: seq_len, windows side by side.

    Only tokens that are new in a window count, so every token has at least seq_len - stride tokens
    before it.
    """
    contexts: list[Annotated[int, Field(ge=1)]] | None
    """Context lengths to measure the loss at, with the state carried along; []: none.

    null: 1024, 4096, 16384 and 65536, as far as the text and the model's learned positions reach.
    seq_len is measured, too, on the same text.
    """
    context_windows: int | None = Field(ge=1)
    """Passages of the longest context, spread evenly over the split; null: the whole split."""
    micro_batch: int = Field(ge=1)
    """Windows that go through the model at once."""


def launch_evaluation(config: EvaluateConfig) -> None:
    """Like `run_evaluation`, in as many processes as runtime.processes asks for."""
    n = given_processes(config.runtime)
    if n is None:
        checkpoint = open_checkpoint(config.checkpoint, MODEL_FILES)
        # All processes open this one, and none warns of damaged ones again.
        config = config.model_copy(update={"checkpoint": checkpoint.path})
        state = checkpoint.state
        at_once = config.micro_batch * min(config.seq_len or state.seq_len, _WINDOW_CHUNK)
        n = choose_processes(state.model, _PLENTY, _PLENTY, at_once)
    launch_processes(n, run_evaluation, config)


class Evaluation(NamedTuple):
    """A model and the text to evaluate it on, checked."""

    config: EvaluateConfig
    loaded: Loaded
    windows: EvalBatches
    """What everything except `contexts` is measured on."""
    contexts: list[int]
    batches: int | None
    """How many batches `windows` are; None: the whole split."""


def run_evaluation(config: EvaluateConfig) -> JsonDict:
    """Evaluate a checkpoint, print the results, and write them into the run directory.

    evals/ keeps one file per checkpoint and settings; eval.json and eval.png hold the latest
    result.

    Returns:
        The content of eval.json.
    """
    evaluation = open_evaluation(config)
    checkpoint = evaluation.loaded.checkpoint
    stream = evaluation.windows.stream
    if stream.dataset_dir == checkpoint.state.dataset_dir:
        config = config.model_copy(update={"dataset_dir": None})
    # Processes must agree on what they share: settings, weights and text.
    with join_world(evaluation.loaded.compute.device) as world:
        settings = config.model_dump(mode="json", exclude={"checkpoint", "dataset_dir", "runtime"})
        data = {
            "weights": checkpoint.identity,
            "dataset_fingerprint": stream.manifest.fingerprint,
        }
        world.check_equal(settings | data)
        # All of them evaluate; the main one writes.
        result = evaluate(evaluation, world)
        show_evaluation(result, str(checkpoint.path))
        if world.is_main:
            evaluation.loaded.write_result(result, config, "eval")
            trained_on = checkpoint.state.seq_len
            picture = None
            if result["by_position"]:
                picture = draw_or_warn("eval.png", lambda: draw_evaluation(result, trained_on))
            if picture is not None:
                checkpoint.write_result("eval.png", picture)
    return result


def open_evaluation(config: EvaluateConfig) -> Evaluation:
    """Load the model, and open the text to evaluate it on.

    Raises:
        UserError: checkpoint and dataset do not match, or a length is longer than text or model
            allow.
    """
    # The model, and the dataset it can read.
    loaded = load(config)
    state = loaded.checkpoint.state
    dataset_dir = config.dataset_dir or state.own_dataset()
    manifest = read_manifest(dataset_dir)
    made_with = manifest.tokenizer
    tokenizer = loaded.tokenizer
    if not tokenizer.extends(made_with.sha256):
        raise UserError(
            f"dataset_dir={dataset_dir} was made with tokenizer {made_with.name} (n_vocab "
            f"{made_with.n_vocab}), the model with {tokenizer.name} (n_vocab {tokenizer.n_vocab}): "
            "prepare the dataset with the model's tokenizer"
        )
    # The split, and which of its tokens count: as in training, if it has conversations.
    loss = state.data.loss if made_with.markers else "all"
    stream = TokenStream(dataset_dir, manifest, config.split)
    if stream.n_tokens < 2:
        raise UserError(
            f"dataset_dir={dataset_dir} has no text in its split {config.split}: "
            "choose another split"
        )
    # The lengths that the text, the model and each other allow.
    seq_len = config.seq_len or state.seq_len
    if config.stride is not None and config.stride > seq_len:
        raise UserError(
            f"stride={config.stride} would skip text between windows of {seq_len} tokens: lower it"
        )
    if loss == "answers" and (config.stride or config.contexts):
        raise UserError(
            "stride and contexts are for texts, and this loss is on the answers of conversations: "
            "leave them out, or give dataset_dir= of a text"
        )
    contexts = _choose_contexts(config, loaded, stream, seq_len, loss)
    # As many windows as those batches have in training; None: all.
    n_batches = None
    n_windows = None
    if config.batches != "all":
        n_batches = config.batches or state.eval_batches
    if n_batches is not None:
        n_windows = n_batches * max(1, state.batch_tokens // seq_len)
    windows = open_eval_batches(stream, seq_len, n_windows, config.stride, loss)
    return Evaluation(config, loaded, windows, contexts, n_batches)


def _choose_contexts(
    config: EvaluateConfig, loaded: Loaded, stream: TokenStream, seq_len: int, loss: str
) -> list[int]:
    """Return the lengths of contexts to measure.

    Raises:
        UserError: a length is longer than text or model allow.
    """
    longest = loaded.gpt.config.max_len or max(seq_len, stream.n_tokens)
    contexts = config.contexts or []
    if loss == "all":  # rows of conversations are padded
        longest = min(longest, stream.n_tokens - 1)
        if config.contexts is None:
            contexts = [context for context in _CONTEXTS if context <= longest]
    lengths = {"contexts": max(contexts, default=0), "seq_len": config.seq_len or 0}
    for key, length in lengths.items():
        if length > longest:
            raise UserError(
                f"{key}={length} is longer than the text or the learned positions: "
                f"use at most {longest}"
            )
    return sorted({*contexts, min(seq_len, longest)}) if contexts else []


def evaluate(evaluation: Evaluation, world: World) -> JsonDict:
    """Return the content of eval.json; every process calls this."""
    config = evaluation.config
    windows = evaluation.windows
    set_names = windows.stream.manifest.set_names
    # One pass over this process's windows. A model whose state has one size reads them in chunks.
    gpt = evaluation.loaded.place(world.device, autocast=True)
    byte_lengths = torch.from_numpy(evaluation.loaded.tokenizer.byte_lengths).to(world.device)
    by_set = LossSums(len(set_names), byte_lengths)
    by_position = _PositionSums(windows.seq_len, byte_lengths)
    chunk = min(windows.seq_len, _WINDOW_CHUNK) if gpt.config.has_constant_state else None
    for first, targets, losses in window_losses(
        gpt, windows, config.micro_batch, evaluation.loaded.compute, world, chunk
    ):
        by_set.add(_find_sets(windows, first, len(targets)), targets, losses)
        by_position.add(by_position.bins, targets, losses)
    # Sums of all processes; the last is that of everything.
    *losses_of_sets, loss = by_set.losses(world)
    losses_by_set = zip(set_names, losses_of_sets, strict=True)
    largest_first = sorted(losses_by_set, key=lambda item: -item[1].tokens)
    *losses_of_bins, _ = by_position.losses(world)
    positions = by_position.rows(losses_of_bins)
    if windows.loss == "answers":
        positions = []  # a position in a row of several conversations says nothing
    return {
        **evaluation.loaded.describe(),
        "dataset_dir": str(windows.stream.dataset_dir),
        "split": config.split,
        "batches": evaluation.batches,
        "loss_of": windows.loss,
        **describe_loss(loss),
        "seq_len": windows.seq_len,
        "stride": min(config.stride or windows.seq_len, windows.seq_len),
        "context_windows": config.context_windows,
        "sets": {name: describe_loss(loss) for name, loss in largest_first if loss.tokens},
        "by_position": positions,
        "beyond_bounds": find_shares_beyond_bounds(gpt, windows, evaluation.loaded.compute),
        "contexts": [
            _measure_context(evaluation, gpt, context, byte_lengths, world)
            for context in evaluation.contexts
        ],
    }


def _measure_context(
    evaluation: Evaluation, gpt: GPT, context: int, byte_lengths: Tensor, world: World
) -> JsonDict:
    """Return the loss in windows of `context` tokens, cut from those of the longest context."""
    stream = evaluation.windows.stream
    longest = Windows(stream, max(evaluation.contexts))
    windows = EvalBatches(CutWindows(longest, evaluation.config.context_windows, context))
    rows = max(1, evaluation.config.micro_batch * evaluation.windows.seq_len // context)
    by_position = _PositionSums(context, byte_lengths)
    for _, targets, losses in window_losses(
        gpt, windows, rows, evaluation.loaded.compute, world, _CONTEXT_CHUNK
    ):
        by_position.add(by_position.bins, targets, losses)
    *losses_of_bins, loss = by_position.losses(world)
    return {
        "context": context,
        **describe_loss(loss),
        "by_position": by_position.rows(losses_of_bins),
    }


def _find_sets(windows: EvalBatches, first: int, n_windows: int) -> Tensor:
    """Return the index of each target's set, (n_windows, T); 0 where there is no target."""
    sets = np.zeros((n_windows, windows.seq_len), np.int64)
    if len(windows.stream.manifest.set_names) > 1:
        for row in range(n_windows):
            length = 0
            for start, stop in windows.ranges(first + row):
                targets = slice(length, length + stop - start)
                sets[row, targets] = read_sets(windows.stream, start, stop)
                length = targets.stop
    return torch.from_numpy(sets)


def choose_position_bins(length: int) -> list[int]:
    """Return the edges of bins of positions, two per octave: 0 1 2 3 4 6 8 12 ... and `length`."""
    powers = [2**k for k in range(length.bit_length())]
    between = [3 * n // 2 for n in powers]
    return [0, *sorted(n for n in {*powers, *between} if n < length), length]


class _PositionSums(LossSums):
    """Sums of losses by bins of positions in windows of `length` tokens."""

    def __init__(self, length: int, byte_lengths: Tensor) -> None:
        self._edges = choose_position_bins(length)
        super().__init__(len(self._edges) - 1, byte_lengths)
        edges = torch.tensor(self._edges)
        self.bins = torch.bucketize(torch.arange(length), edges, right=True).unsqueeze(0) - 1
        """The bin of each position, int64 (1, length)."""

    def rows(self, losses: list[Loss]) -> list[JsonDict]:
        """Return the bins [start, stop) that have targets, with their losses."""
        rows = []
        for (start, stop), loss in zip(pairwise(self._edges), losses, strict=True):
            if loss.tokens:
                mean = _finite(loss.per_token)
                rows.append({"start": start, "stop": stop, "tokens": loss.tokens, "loss": mean})
        return rows


def describe_loss(loss: Loss) -> JsonDict:
    """Return a loss as eval.json stores it, with None for numbers that are not finite."""
    return {
        "tokens": loss.tokens,
        "bytes": loss.bytes,
        "loss": _finite(loss.per_token),
        "loss_stderr": _finite(loss.stderr),
        "perplexity": _finite(loss.perplexity),
        "bits_per_byte": _finite(loss.bits_per_byte),
        "bits_per_byte_stderr": _finite(loss.bits_stderr),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
