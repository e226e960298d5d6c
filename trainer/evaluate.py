"""Loss on held-out text: weighted by tokens, the same for any number of processes and any micro-batch."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from common.console import Track, say
from common.settings import Settings, UserError
from data.loader import IGNORED, EvalBatches
from data.shards import TokenStream, read_manifest
from model.gpt import GPT
from trainer.checkpoint import load_model, open_model
from trainer.distributed import World, join_world
from trainer.runtime import DeviceConfig, Runtime, open_runtime


@dataclass(frozen=True)
class Loss:
    """Cross-entropy of a stretch of text."""

    nats: float
    """Sum over its tokens."""
    tokens: int
    """Tokens that were predicted."""
    bytes: int
    """UTF-8 bytes of those tokens; the end of a document has none."""

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / math.log(2) / self.bytes

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(self.per_token)


@torch.no_grad()
def evaluate(
    gpt: GPT, windows: EvalBatches, byte_lengths: Tensor, micro_batch: int, runtime: Runtime, world: World
) -> Loss:
    """The loss over all windows, shared among the processes and summed in float64.

    Args:
        byte_lengths: (n_vocab,), UTF-8 bytes of each token id.
        micro_batch: windows that go through the model at once.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # nats, tokens, bytes
    gpt.eval()
    together = world.size * micro_batch
    with Track("evaluating", len(windows)) as track:
        for first in range(0, len(windows), together):
            world.at(f"evaluating window {first}")
            start = first + world.rank * micro_batch
            token_ids, targets = map(torch.from_numpy, windows.rows(start, min(start + micro_batch, len(windows))))
            if not len(targets):  # the others still have some, and of a model that is shared all must do every pass
                token_ids, targets = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), IGNORED)
            token_ids, targets = token_ids.to(world.device), targets.to(world.device)
            with runtime.autocast():
                losses = gpt.token_losses(token_ids, targets)
            counted = targets >= 0
            n_bytes = byte_lengths[targets.clamp(min=0)].where(counted, 0)
            sums += torch.stack([losses.sum(dtype=torch.float64), counted.sum(), n_bytes.sum()])
            track.advance(min(together, len(windows) - first))
    gpt.train()
    nats, tokens, n_bytes = world.sum(sums).tolist()
    return Loss(nats, int(tokens), int(n_bytes))


class EvaluateConfig(Settings):
    """What eval.py takes."""

    checkpoint: Path
    """A run directory (its newest checkpoint), or a checkpoint."""
    dataset_dir: Path | None = None
    """Dataset to evaluate on; null: the one the model was trained on."""
    split: Literal["train", "val"] = "val"
    """Its split: train or val."""
    batches: int | None = Field(None, ge=1)
    """Batches of micro_batch windows, spread evenly over the split; null: all of it."""
    seq_len: int | None = Field(None, ge=1)
    """Tokens of a window; null: as in training."""
    micro_batch: int = Field(16, ge=1)
    """Windows that go through the model at once."""
    runtime: DeviceConfig


def run_evaluation(config: EvaluateConfig) -> None:
    """Evaluate a checkpoint, print the result, and write it to eval.json in the run directory."""
    runtime = open_runtime(config.runtime)
    checkpoint = open_model(config.checkpoint)
    gpt, tokenizer = load_model(checkpoint)
    dataset_dir = config.dataset_dir or checkpoint.state.dataset_dir
    manifest = read_manifest(dataset_dir)
    if manifest.tokenizer.sha256 != tokenizer.sha256:
        raise UserError(
            f"dataset_dir={dataset_dir} was made with tokenizer {manifest.tokenizer.name} "
            f"(n_vocab {manifest.tokenizer.n_vocab}), the model with {tokenizer.name} (n_vocab {tokenizer.n_vocab}): "
            f"prepare the dataset with the model's tokenizer"
        )
    seq_len, max_len = config.seq_len or checkpoint.state.seq_len, gpt.config.max_len
    if max_len is not None and seq_len > max_len:
        raise UserError(f"seq_len={seq_len} is longer than the model's {max_len} learned positions: lower it")
    n_windows = None if config.batches is None else config.batches * config.micro_batch
    stream = TokenStream(dataset_dir, manifest, config.split)
    windows = EvalBatches(stream, seq_len, n_windows)
    with join_world(runtime.device) as world:
        runtime.announce()
        gpt = gpt.to(world.device, runtime.param_dtype)
        byte_lengths = torch.from_numpy(tokenizer.byte_lengths).to(world.device)
        loss = evaluate(gpt, windows, byte_lengths, config.micro_batch, runtime, world)
        say(
            f"{checkpoint.path} on {dataset_dir} ({config.split}, {loss.tokens:,} tokens): "
            f"loss {loss.per_token:.4f} nats per token, perplexity {loss.perplexity:.3f}, "
            f"{loss.bits_per_byte:.4f} bits per byte"
        )
        if world.is_main:
            result = {
                "checkpoint": checkpoint.path.name,
                "step": checkpoint.state.step,
                "dataset_dir": str(dataset_dir),
                "split": config.split,
                "tokens": loss.tokens,
                "bytes": loss.bytes,
                "loss": loss.per_token,
                "perplexity": loss.perplexity,
                "bits_per_byte": loss.bits_per_byte,
            }
            checkpoint.leave("eval.json", json.dumps(result, indent=2) + "\n")
