"""A run in progress: its model, its data and its files, and what happens when a step goes wrong."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from common.console import count, say, warn
from common.settings import UserError
from data.loader import EvalBatches, TrainBatches
from data.prefetch import Prefetch
from data.shards import TOKENIZER, Manifest, TokenStream, read_manifest
from data.tokenizer import Tokenizer, load_tokenizer
from trainer.average import Average
from trainer.build import build_model
from trainer.checkpoint import Saver
from trainer.config import TrainConfig
from trainer.curves import RunCurves, curves_of
from trainer.distributed import SequenceGroup, World
from trainer.guard import bad_steps_before, first_not_finite, why_bad
from trainer.losses import evaluate
from trainer.memory import step_memory
from trainer.metrics import MetricsLog, read_metrics
from trainer.micro_batch import choose_micro_batch, out_of_memory
from trainer.optim import named_state
from trainer.plot import draw_losses
from trainer.randomness import seed_process
from trainer.resume import find_checkpoint, new_state, restore, take_weights
from trainer.run_dir import write_config
from trainer.runtime import Runtime, device_name, peak_flops
from trainer.signals import StopSignals
from trainer.step import Abandoned, MicroBatches, train_step
from trainer.trackers import open_trackers
from trainer.transfer import ratios

_FLOPS_OF_A_CORE = 5e10  # in a second, of a fast core in float32
_LONG_STEP = 120  # seconds
_USUAL_PARAMETERS = 125e6  # of the model that the default learning rate is for


class Run:
    """A run in progress: model, optimizer, data, and the files in its directory."""

    def __init__(self, config: TrainConfig, runtime: Runtime, world: World, signals: StopSignals | None = None) -> None:
        self.config, self.runtime, self.world = config, runtime, world
        self.signals = signals or StopSignals()
        self.stopped_by: str | None = None
        """Why the run stops early, once all processes know."""
        self.manifest, self.tokenizer, self.batches, self.windows = open_data(config)
        _check_split(config, world)
        if len(types := sorted(set(world.gather_text(str(runtime.dtype))))) > 1:
            raise UserError(f"runtime.dtype=auto is {' and '.join(types)} on these machines: name one type")
        self.group = SequenceGroup(world, config.runtime.context_parallel)
        if config.data.mixture is not None:
            self.batches.mix(config.dataset_dir, self.manifest, config.data.mixture)
            say(f"sequences are drawn from {self.batches.mixture}")
        self._ahead: Prefetch[MicroBatches] | None = None
        self.byte_lengths = torch.from_numpy(self.tokenizer.byte_lengths).to(world.device)
        self._begin()
        self.curves = RunCurves()
        """The run's metrics so far, in the main process."""

    def _begin(self) -> None:
        """Build model and optimizer from the seed, or restore them from the run's newest checkpoint."""
        config, world = self.config, self.world
        checkpoint = find_checkpoint(config.run_dir, world)
        self.checkpoint, self.resumed = checkpoint, checkpoint is not None
        if self.resumed and config.resume == "never":
            raise UserError(f"run_dir={config.run_dir} holds a run, and resume=never: choose another, or resume=auto")
        eot_id = config.data.reset_at(self.tokenizer.eot_id)
        self.gpt, self.summed_loss = build_model(config, self.runtime, world, self.group, eot_id)
        if config.init_from is not None and not self.resumed:
            take_weights(self.gpt, config.init_from, self.tokenizer, world)
        seed_process(f"{config.seed} 0 {world.rank}")
        self.optimizer = config.optim.build(self.gpt, world, self.runtime.dtype)
        self.average = None if config.average is None else Average(self.gpt, config.average, world)
        self.flops_per_token = self.gpt.flops_per_token(config.seq_len)
        self.state = new_state(config, self.manifest)
        if checkpoint is not None:
            self.state = restore(checkpoint, self.state, self._tensors(), world)
            say(f"resuming {config.run_dir} after step {self.step}")
        self.micro_batch = self._choose_micro_batch()

    def _choose_micro_batch(self) -> int:
        """The configured size, or the largest that fits. A run chooses only once, because rounding depends on it."""
        config, world = self.config, self.world
        if config.runtime.micro_batch != "auto":
            return config.runtime.micro_batch
        main_device = world.gather_text(device_name(world.device))[0]  # every process must decide the same
        place = f"{world.size} x {main_device}"
        if self.state.micro_batch is not None and self.state.micro_batch_for == place:
            say(f"runtime.micro_batch=auto: {self.state.micro_batch}, as chosen when this run began on {place}")
            return self.state.micro_batch
        share, seq_len = -(-config.batch_size // world.size), config.seq_len

        def predict(size: int) -> int:
            """What a step needs besides weights and optimizer, which are there already."""
            recompute = config.runtime.recompute
            memory = step_memory(self.gpt, size, seq_len, self.runtime, world.size, recompute=recompute)
            return memory.peak - memory.weights - memory.optimizer

        size = choose_micro_batch(self.summed_loss, share, seq_len, predict, self.runtime, world)
        self._update(micro_batch=size, micro_batch_for=place)
        return size

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.state.step

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do, or a process was asked to stop."""
        return self.step >= self.config.last_step or self.stopped_by is not None

    def due(self, every: int) -> bool:
        """Whether something that happens every `every` steps, and at the end of the schedule, is due."""
        return self.step % every == 0 or self.step == self.config.max_steps

    def train_step(self) -> dict[str, Any]:
        """One optimizer step on the next global batch; returns its line for metrics.jsonl.

        Raises:
            Abandoned: a signal came before its last micro-batch.
            UserError: the run must halt, or memory ran out. Weights and optimizer are unchanged.
        """
        started = time.perf_counter()
        try:
            line = self._step()
        except Abandoned:
            self.stopped_by = self._signal()
            raise
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            where = f"step {self.step + 1} with micro-batches of {self.micro_batch} sequences"
            raise UserError(f"out of memory in {where}: lower runtime.micro_batch") from error
        return line if "event" in line else line | self._speed(time.perf_counter() - started)

    def _step(self) -> dict[str, Any]:
        config = self.config
        self.world.at(f"step {self.step + 1}: data")
        micro_batches = self.share(self.step) if self._ahead is None else next(self._ahead)
        factor = config.schedule.factor(self.step, config.max_steps)
        config.optim.schedule(self.optimizer, factor, self.step / config.max_steps)
        lr = config.optim.max_lr * factor
        result = train_step(
            self.summed_loss,
            self.optimizer,
            micro_batches,
            self.runtime,
            self.world,
            grad_clip=config.optim.grad_clip,
            refuse=lambda loss, norm: why_bad(loss, norm, self.state.statistics, config.runtime.spike_sigmas),
            asked_to_stop=lambda: self.signals.received is not None,
            name=f"step {self.step + 1}",
        )
        if result.stop:
            self.stopped_by = self._signal()
        if result.refused is not None:
            return self._bad_step(result.refused)
        if config.runtime.spike_sigmas:
            self._update(statistics=self.state.statistics.after(result.loss))
        self._update(step=self.step + 1)
        if self.average is not None:
            self.average.take(self.step)
        tiles = {"exact_tiles": result.exact_tiles} if result.exact_tiles else {}
        return self._line(loss=result.loss, lr=lr, grad_norm=result.grad_norm, **tiles)

    def _signal(self) -> str:
        """Why the run stops."""
        own = self.signals.received
        return "another process was asked to stop" if own is None else f"stopped by {own.name}"

    def _bad_step(self, reason: str) -> dict[str, Any]:
        """Halt or skip, as runtime.on_nonfinite says."""
        config, step = self.config, self.step + 1
        bad = first_not_finite(self.gpt.named_parameters(), self.world)
        self.optimizer.zero_grad()
        if bad:
            reason = f"{reason} (first gradients not finite: {', '.join(bad)})"
        in_a_row = bad_steps_before(step, self.state.passed_over) + 1
        policy = config.runtime.on_nonfinite
        if policy == "halt" or in_a_row > config.runtime.max_bad_steps:
            often = "" if policy == "halt" else f", after {in_a_row - 1} bad steps in a row"
            look = f"scripts/inspect_dataset.py run_dir={config.run_dir} step={step} shows what it read"
            remedy = f"lower optim.max_lr={config.optim.max_lr:g}, or see runtime.on_nonfinite, and start again"
            raise UserError(f"step {step}: {reason}{often}; the weights are unchanged: {remedy}; {look}")
        warn(f"skipping step {step}: {reason}")
        self._update(passed_over={**self.state.passed_over, step: reason})
        return self._skipped(reason)

    def _skipped(self, reason: str) -> dict[str, Any]:
        self._update(step=self.step + 1)
        return self._line(event="skipped", reason=reason)

    def _line(self, **values: Any) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        return {"step": self.step, "tokens": self.config.tokens(self.step), **values}

    def _update(self, **changes: Any) -> None:
        self.state = self.state.model_copy(update=changes)

    def share(self, step: int) -> MicroBatches:
        """This process's part of the global batch of a step, in pinned memory if a GPU reads it."""
        first, stop = self._sequences()
        whole = map(torch.from_numpy, self.batches.batch(step, first, stop))
        parts = [ids.chunk(self.group.size, dim=1)[self.group.place] for ids in whole]
        if self.world.device.type == "cuda":
            parts = [ids.contiguous().pin_memory() for ids in parts]  # other memory is copied twice
        n = stop - first
        size = -(-n // -(-n // self.micro_batch))  # as equal as possible; the last micro-batch may be smaller
        token_ids, targets = (ids.split(size) for ids in parts)
        return list(zip(token_ids, targets, strict=True))

    def _sequences(self) -> tuple[int, int]:
        """The sequences [first, stop) of a step's batch that belong to this process, or to its group."""
        return sequences_of(self.group.index, self.group.count, self.config.batch_size)

    @contextlib.contextmanager
    def reading_ahead(self) -> Iterator[Prefetch[MicroBatches]]:
        """Read the batches of the remaining steps in the background while the context lasts."""
        with Prefetch(self.share(step) for step in range(self.step, self.config.last_step)) as self._ahead:
            try:
                yield self._ahead
            finally:
                self._ahead = None

    def _speed(self, seconds: float) -> dict[str, float | None]:
        """Throughput of the last step, which took so many seconds."""
        rate = (self.config.tokens(self.step) - self.config.tokens(self.step - 1)) / seconds
        peak = peak_flops(self.world.device, self.runtime.dtype)
        mfu = rate * self.flops_per_token / (peak * self.world.size) if peak else None
        return {"tokens_per_second": round(rate, 1), "mfu": mfu and round(mfu, 4)}

    def evaluate(self) -> bool:
        """Measure and log the validation loss, of the averaged weights if there are any, and redraw loss.png.

        Returns whether it is the lowest so far.
        """
        stretch, size = self.config.seq_len // self.group.size, self.micro_batch
        piece = min(self.runtime.sequence_chunk or stretch, stretch)
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            loss = evaluate(self.gpt, self.windows, self.byte_lengths, size, self.runtime, self.world, piece)
        if not math.isfinite(loss.nats):
            raise UserError(f"step {self.step}: validation loss is {loss.nats}: lower optim.max_lr, and start again")
        bits = {"val_bits_per_byte": loss.bits_per_byte} if loss.bytes else {}
        self.write(self._line(val_loss=loss.per_token, **bits))
        of = "" if self.average is None else " (averaged weights)"
        figures = f"{loss.per_token:.4f} nats/token, {loss.bits_per_byte:.4f} bits/byte"
        say(f"step {self.step}: validation loss{of} {figures}")
        self.draw()
        improved = self.state.best_val_loss is None or loss.per_token < self.state.best_val_loss
        if improved:
            self._update(best_val_loss=loss.per_token, best_step=self.step)
        return improved

    def draw(self) -> None:
        """Redraw loss.png."""
        if self.world.is_main:
            draw_losses(self.curves, self.config.run_dir / "loss.png", str(self.config.run_dir))

    def write(self, line: dict[str, Any]) -> None:
        """Write a line to metrics.jsonl and to the trackers."""
        if self.world.is_main:
            self.log.write(line)
            self.curves.add(line)
            for tracker in self.trackers:
                tracker.log(line)

    def save(self) -> None:
        """Write a checkpoint in the background, and delete those that need not be kept."""
        world = self.world
        world.at(f"step {self.step + 1}: save")
        # Forget skipped steps that are too old to be in a row with later ones.
        first = self.step - self.config.runtime.max_bad_steps
        passed_over = {bad: why for bad, why in self.state.passed_over.items() if bad >= first}
        self._update(passed_over=passed_over)
        self.saver.save(self._tensors(), self.state)

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """The run's tensors by name, as in its checkpoints."""
        averages = {} if self.average is None else self.average.tensors
        return {"model": self.gpt.state_dict() | averages, "optimizer": named_state(self.gpt, self.optimizer)}

    @contextlib.contextmanager
    def open_files(self) -> Iterator[None]:
        """Write config.json; keep metrics, trackers and saver open while the context lasts."""
        self.world.wait_for_all()  # until every process has read what the main process is about to change
        if self.world.is_main:
            self._open_log()
        log = self.log if self.world.is_main else None
        config = self.config
        self.saver = Saver(config.run_dir, self.tokenizer, config.checkpoint, self.world, log, self.checkpoint)
        try:
            yield
            self.world.leave()  # the others do not wait for the last save
            self.saver.finish()
        except BaseException as error:
            self.world.leave(error)
            self.saver.wait()
            if self.world.is_main:
                self._finish_trackers()
                with contextlib.suppress(OSError):  # a warning was printed, and `error` matters more
                    self.log.close()
            raise
        if self.world.is_main:
            self._finish_trackers()
            self.log.close()

    def _finish_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.finish()

    def _open_log(self) -> None:
        """Write config.json, open metrics and trackers, and say what will be trained."""
        config, run_dir = self.config, self.config.run_dir
        dumped = config.model_dump(mode="json")
        found = {
            "micro_batch": self.micro_batch,
            "n_params": self.gpt.n_params(),
            "flops_per_token": self.flops_per_token,
            "dtype": str(self.runtime.dtype).removeprefix("torch."),
        }
        write_config(run_dir / "config.json", dumped, self.world, found, resumed=self.step > 0)
        self.log = MetricsLog(run_dir / "metrics.jsonl", resumed_at=self.step)
        self.curves = curves_of(read_metrics(self.log.path))
        self.trackers = open_trackers(config.tracker, self.state.run_id, run_dir, dumped, resumed_at=self.step)
        self._announce()

    def _announce(self) -> None:
        """Print what will be trained, and warn about settings that probably do not suit it."""
        config, n_params = self.config, self.gpt.n_params()
        rate = torch.get_num_threads() * _FLOPS_OF_A_CORE * 4 / self.runtime.dtype.itemsize
        seconds = self.flops_per_token * config.tokens(1) / self.world.size / rate
        if self.world.device.type == "cpu" and seconds > _LONG_STEP:
            small = "give experiment=quickstart, or a small model and fewer batch_tokens"
            warn(f"a step takes about {seconds / 60:,.0f} minutes on this CPU; for a model that suits it, {small}")
        batch = f"{config.batch_size} x {config.seq_len} tokens a step, {count(config.max_steps, 'step')}"
        say(f"{n_params:,} parameters, {batch}, {config.tokens(config.max_steps):,} tokens")
        tuned_rate, tuned = f"optim.max_lr={config.optim.max_lr:g} was tuned for", config.optim.transfer
        if tuned is not None and ratios(self.gpt, tuned) != (1, 1):
            say(f"{tuned_rate} n_embd={tuned.n_embd}, n_layer={tuned.n_layer}, and is transferred to this model")
        usual = float(config.optim.default_values()["max_lr"])
        if tuned is None and config.optim.max_lr == usual and not 0.25 < n_params / _USUAL_PARAMETERS < 4:
            remedy = "give another, or 'optim.transfer={n_embd:768,n_layer:12}'"
            say(f"{tuned_rate} {_USUAL_PARAMETERS / 1e6:g} M parameters: for this model, {remedy}")


def open_data(config: TrainConfig) -> tuple[Manifest, Tokenizer, TrainBatches, EvalBatches]:
    """Open the dataset of a run, without a mixture.

    Raises:
        UserError: there is none, it is too small, or the model has fewer ids than its tokenizer.
    """
    manifest, tokenizer = read_manifest(config.dataset_dir), load_tokenizer(config.dataset_dir / TOKENIZER)
    _check_vocabulary(config, manifest, tokenizer)
    train, val = (TokenStream(config.dataset_dir, manifest, split) for split in ("train", "val"))
    if val.n_tokens < 2:
        raise UserError(f"dataset_dir={config.dataset_dir} has no text in its split val: prepare it with val_tokens")
    batches = TrainBatches(train, config.seq_len, config.batch_size, config.seed)
    windows = EvalBatches(val, config.seq_len, config.eval.batches and config.eval.batches * config.batch_size)
    return manifest, tokenizer, batches, windows


def _check_vocabulary(config: TrainConfig, manifest: Manifest, tokenizer: Tokenizer) -> None:
    if tokenizer.sha256 != manifest.tokenizer.sha256:
        raise UserError(f"{config.dataset_dir / TOKENIZER} is not the manifest's tokenizer: prepare the data again")
    if tokenizer.n_vocab > config.model.n_vocab:
        what = f"dataset_dir={config.dataset_dir} was made with tokenizer {tokenizer.name} of {tokenizer.n_vocab} ids"
        remedy = f"set model.n_vocab={tokenizer.n_vocab}, or use another dataset"
        raise UserError(f"{what}, and model.n_vocab={config.model.n_vocab}: {remedy}")


def _check_split(config: TrainConfig, world: World) -> None:
    share = config.runtime.context_parallel
    if world.size % share:
        what = f"runtime.context_parallel={share} does not divide {world.size} processes"
        raise UserError(f"{what}: start {share} or a multiple of it with torchrun")
    given, sequences = f"batch_tokens={config.batch_tokens} is {config.batch_size} sequences", config.batch_size
    if sequences < world.size // share:
        groups = f"{world.size // share} groups of {share}" if share > 1 else f"{world.size}"
        raise UserError(f"{given}, fewer than {groups} processes: start fewer, or raise batch_tokens")
    if config.runtime.strategy == "fsdp" and sequences % world.size:
        needed = f"divisible among {world.size} processes, as runtime.strategy=fsdp needs"
        raise UserError(f"{given}, not {needed}: change one of them, or use runtime.strategy=ddp")


def sequences_of(rank: int, size: int, batch_size: int) -> tuple[int, int]:
    """The sequences [first, stop) of every global batch that belong to process, or group, `rank` of `size`."""
    return rank * batch_size // size, (rank + 1) * batch_size // size
