"""The training loop."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from common.console import Track, say
from common.files import make_directory
from common.settings import UserError
from data.loader import EvalBatches, TrainBatches
from data.mixture import open_mixture
from data.prefetch import Prefetch
from data.shards import TOKENIZER, Manifest, TokenStream, read_manifest
from data.tokenizer import Tokenizer, load_tokenizer
from model.gpt import GPT
from trainer.checkpoint import retain, save_checkpoint
from trainer.config import TrainConfig
from trainer.distributed import World, join_world
from trainer.evaluate import evaluate
from trainer.metrics import MetricsLog, Tracker, read_metrics
from trainer.optim import named_state, set_lr
from trainer.plot import draw_losses
from trainer.resume import resume, write_config
from trainer.runtime import Runtime, maybe_compile, open_runtime, peak_flops

Share = list[tuple[Tensor, Tensor]]
"""A process's micro-batches of a step: token_ids and targets, int64 (micro_batch, seq_len), on the CPU."""


def fit(config: TrainConfig) -> None:
    """Train, or go on training, until config.last_step; everything worth keeping is in config.run_dir."""
    runtime = open_runtime(config.runtime)
    make_directory(config.run_dir, "run_dir")
    with join_world(runtime.device) as world:
        runtime.announce()
        _train(Run(config, runtime, world), config)


def _train(run: "Run", config: TrainConfig) -> None:
    if run.step >= config.last_step:
        say(f"{config.run_dir} is already at step {run.step} of {config.last_step}: nothing to train")
        return
    with (
        run.open_files(),
        run.reading_ahead(),
        Track("training", config.last_step * config.batch_tokens, run.step * config.batch_tokens) as track,
    ):
        while run.step < config.last_step:
            line = run.train_step()
            track.advance(config.batch_tokens, f"tokens, loss {line['loss']:.3f}")
            if run.due(config.tracker.every):
                run.write(line | run.speed())
            improved = run.due(config.eval.every) and run.evaluate()
            if improved or run.due(config.checkpoint.every) or run.step == config.last_step:
                run.save()
        run.draw()
    run_dir = config.run_dir
    say(f"step {run.step} of {config.max_steps} saved in {run_dir}; loss curve: {run_dir / 'loss.png'}")


class Run:
    """A run in progress: model, optimizer, data, and the files in its directory."""

    def __init__(self, config: TrainConfig, runtime: Runtime, world: World) -> None:
        self.config, self.runtime, self.world = config, runtime, world
        manifest = read_manifest(config.dataset_dir)
        self.tokenizer = load_tokenizer(config.dataset_dir / TOKENIZER)
        _check_vocabulary(config, manifest, self.tokenizer)
        _check_split(config, world)
        train, val = (TokenStream(config.dataset_dir, manifest, split) for split in ("train", "val"))
        self.batches = TrainBatches(train, config.seq_len, config.batch_size, config.seed)
        if config.data.mixture is not None:
            self.batches.mixture = open_mixture(
                config.dataset_dir, manifest, config.data.mixture, config.seq_len, config.seed
            )
            say(f"sequences are drawn from {self.batches.mixture}")
        self._ahead: Prefetch[Share] | None = None
        n_windows = None if config.eval.batches is None else config.eval.batches * config.batch_size
        self.windows = EvalBatches(val, config.seq_len, n_windows)
        self.byte_lengths = torch.from_numpy(self.tokenizer.byte_lengths).to(world.device)

        torch.manual_seed(config.seed)
        self.gpt = GPT(config.model).to(world.device, runtime.param_dtype)
        self.optimizer = config.optim.build(self.gpt)
        self.state = resume(config, manifest, self.gpt, self.optimizer)
        self.summed_loss = world.wrap(maybe_compile(SummedLoss(self.gpt), config.runtime, world.device))
        self._since: tuple[int, float] = (0, 0.0)  # tokens and seconds of training since the last line

    @property
    def step(self) -> int:
        """Steps done."""
        return self.state.step

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end of the schedule, happens now."""
        return self.step % every == 0 or self.step == self.config.max_steps

    def train_step(self) -> dict[str, Any]:
        """One optimizer step on the next global batch; returns its line for metrics.jsonl."""
        started = time.perf_counter()
        config = self.config
        lr = config.optim.max_lr * config.schedule.factor(self.step, config.max_steps)
        set_lr(self.optimizer, lr)
        loss = self._accumulate_gradients().item()
        grad_norm = nn.utils.clip_grad_norm_(self.gpt.parameters(), config.optim.grad_clip or math.inf).item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise UserError(
                f"step {self.step + 1}: loss is {loss} and the gradient's norm {grad_norm}; the weights are "
                f"as they were: lower optim.max_lr={config.optim.max_lr:g}, and start again"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = self.state.model_copy(update={"step": self.step + 1})
        tokens, seconds = self._since
        self._since = (tokens + config.batch_tokens, seconds + time.perf_counter() - started)
        tokens = self.step * config.batch_tokens
        return {"step": self.step, "tokens": tokens, "loss": loss, "lr": lr, "grad_norm": grad_norm}

    def _accumulate_gradients(self) -> Tensor:
        """Backward passes over this process's share of the batch; returns the loss of the global batch.

        The gradient is that of the mean over all valid tokens of the global batch, however they are shared among
        processes and micro-batches: each micro-batch's sum is divided by the global count.
        """
        world = self.world
        micro_batches = self.share(self.step) if self._ahead is None else next(self._ahead)
        counts = [float((targets >= 0).sum()) for _, targets in micro_batches]
        valid = world.sum(torch.tensor(sum(counts), dtype=torch.float64, device=world.device))
        total = torch.zeros_like(valid)
        for i, micro_batch in enumerate(micro_batches, start=1):
            x, y = (ids.to(world.device, non_blocking=True) for ids in micro_batch)
            with world.sync_gradients(self.summed_loss, now=i == len(micro_batches)):
                with self.runtime.autocast():
                    loss = self.summed_loss(x, y)
                (loss * (world.size / valid)).backward()  # DDP averages over processes: hence times their number
            total += loss.detach()
        return world.sum(total) / valid

    def share(self, step: int) -> Share:
        """This process's part of global batch `step`; in pinned memory, where a GPU will fetch it."""
        count = self.config.batch_size // self.world.size
        first = self.world.rank * count
        parts = [torch.from_numpy(ids) for ids in self.batches.batch(step, first, first + count)]
        if self.world.device.type == "cuda":
            parts = [ids.contiguous().pin_memory() for ids in parts]  # others are copied before they are fetched
        token_ids, targets = (ids.split(self.config.runtime.micro_batch) for ids in parts)
        return list(zip(token_ids, targets, strict=True))

    @contextlib.contextmanager
    def reading_ahead(self) -> Iterator[Prefetch[Share]]:
        """Have the steps that are left read in the background, as long as the context."""
        with Prefetch(self.share(step) for step in range(self.step, self.config.last_step)) as self._ahead:
            try:
                yield self._ahead
            finally:
                self._ahead = None

    def speed(self) -> dict[str, float | None]:
        """Throughput since it was last asked for."""
        (tokens, seconds), self._since = self._since, (0, 0.0)
        rate = tokens / seconds
        peak = peak_flops(self.world.device)
        flops = self.gpt.flops_per_token(self.config.seq_len)
        mfu = rate * flops / (peak * self.world.size) if peak else None
        return {"tokens_per_second": round(rate, 1), "mfu": mfu and round(mfu, 4)}

    def evaluate(self) -> bool:
        """Measure the validation loss, write it down, redraw loss.png; True if it is the lowest so far."""
        loss = evaluate(
            self.gpt, self.windows, self.byte_lengths, self.config.runtime.micro_batch, self.runtime, self.world
        )
        if not math.isfinite(loss.nats):
            raise UserError(f"step {self.step}: validation loss is {loss.nats}: lower optim.max_lr, and start again")
        tokens = self.step * self.config.batch_tokens
        self.write(
            {"step": self.step, "tokens": tokens, "val_loss": loss.per_token, "val_bits_per_byte": loss.bits_per_byte}
        )
        say(f"step {self.step}: validation loss {loss.per_token:.4f} nats/token, {loss.bits_per_byte:.4f} bits/byte")
        self.draw()
        improved = self.state.best_val_loss is None or loss.per_token < self.state.best_val_loss
        if improved:
            self.state = self.state.model_copy(update={"best_val_loss": loss.per_token, "best_step": self.step})
        return improved

    def draw(self) -> None:
        """Redraw loss.png."""
        if self.world.is_main:
            run_dir = self.config.run_dir
            draw_losses(read_metrics(run_dir / "metrics.jsonl"), run_dir / "loss.png", title=str(run_dir))

    def write(self, line: dict[str, Any]) -> None:
        """Write a line to metrics.jsonl and to the tracker."""
        if self.world.is_main:
            self.log.write(line)
            self.tracker.log(line)

    def save(self) -> None:
        """Write a checkpoint, and delete those that are not to be kept."""
        if self.world.is_main:
            self.log.sync()
            tensors = named_state(self.gpt, self.optimizer)
            save_checkpoint(self.config.run_dir, self.gpt.state_dict(), tensors, self.state, self.tokenizer)
            retain(self.config.run_dir, self.config.checkpoint.keep_last)
        self.world.wait_for_all()

    @contextlib.contextmanager
    def open_files(self) -> Iterator[None]:
        """Write down what is run, and where; keep metrics and tracker open as long as the context."""
        config, run_dir = self.config, self.config.run_dir
        self.world.wait_for_all()  # every process has read what the main one is about to change
        if not self.world.is_main:
            yield
            return
        dumped = config.model_dump(mode="json")
        write_config(run_dir / "config.json", dumped, self.world, resumed=self.step > 0)
        self.log = MetricsLog(run_dir / "metrics.jsonl", resumed_at=self.step)
        self.tracker: Tracker = config.tracker.open(self.state.run_id, run_dir, dumped)
        say(
            f"{self.gpt.n_params():,} parameters, {config.batch_size} x {config.seq_len} tokens a step, "
            f"{config.max_steps:,} steps, {config.max_steps * config.batch_tokens:,} tokens"
        )
        try:
            yield
        finally:
            self.tracker.finish()
            self.log.close()


class SummedLoss(nn.Module):
    """The loss as a module of its own, so that DDP and torch.compile see one forward pass from tokens to loss."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """(B, T) ids and targets -> the sum of the losses, in nats."""
        return self.gpt.summed_loss(token_ids, targets)


def _check_vocabulary(config: TrainConfig, manifest: Manifest, tokenizer: Tokenizer) -> None:
    if tokenizer.sha256 != manifest.tokenizer.sha256:
        raise UserError(
            f"{config.dataset_dir / TOKENIZER} is not the tokenizer of manifest.json: prepare the data again"
        )
    if tokenizer.n_vocab > config.model.n_vocab:
        raise UserError(
            f"dataset_dir={config.dataset_dir} was made with tokenizer {tokenizer.name} of {tokenizer.n_vocab} ids, "
            f"and model.n_vocab={config.model.n_vocab}: set model.n_vocab={tokenizer.n_vocab}, or use another dataset"
        )


def _check_split(config: TrainConfig, world: World) -> None:
    together = config.runtime.micro_batch * world.size
    if config.batch_size % together:
        raise UserError(
            f"batch_tokens={config.batch_tokens} is {config.batch_size} sequences, not divisible among {world.size} "
            f"processes x runtime.micro_batch={config.runtime.micro_batch}: change one of the three"
        )
