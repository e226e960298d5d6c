"""What a run prints before its first step and while it trains: lines, and a bar on a terminal."""

from collections import Counter
from statistics import harmonic_mean, mean

import common.console
from common.console import Track, count, log_line, say, warn
from common.settings import JsonDict
from data.conversations import Conversations
from data.mixture import format_epochs, warn_of_epochs
from model.attention import AttentionConfig
from runtime.device import is_compiled
from trainer.mup import ratios
from trainer.start import TrainingRun


def announce_run(run: TrainingRun, last: tuple[int, float] | None) -> None:
    """Print what will be trained, and warn if the learning rate jumps, as with another max_steps.

    Args:
        last: the last step of a run that goes on, and its learning rate.
    """
    config = run.config
    if run.checkpoint is not None:
        say(f"resuming {config.run_dir} after step {run.state.step}")
    show_header = log_line if common.console.has_shown_header else say
    show_header("\n".join(start_lines(run)))
    if run.batches.mixture is None:
        warn_of_epochs(_n_epochs(run))
    if last is None:
        return
    schedule = config.schedule
    max_lr = config.optim.max_lr
    step, before = last
    repeated = max_lr * schedule.factor(step - 1, config.max_steps)
    now = max_lr * schedule.factor(run.state.step, config.max_steps)
    # No jump if the schedule still gives the last step its rate, or gives it to the next step.
    if min(abs(before - repeated), abs(before - now)) <= 1e-6 * before:
        return
    jump = f"the learning rate goes from {before:.3g} (step {step}) to {now:.3g}"
    jump += f" (step {run.state.step + 1})"
    if schedule.longer and now - before > 0.1 * max_lr:  # such a rise costs loss
        jump += f"; for a longer run without this jump: {schedule.longer}"
    warn(jump)


def _n_epochs(run: TrainingRun) -> float:
    return run.config.last_step * run.config.batch_size / len(run.batches.rows)


def start_lines(run: TrainingRun) -> list[str]:
    """What is trained on what, for how long, where, and what is kept, without settings' names."""
    return [
        f"model     {_model(run)}",
        f"data      {_data(run)}",
        f"batch     {_batch(run)}",
        f"schedule  {_schedule(run)}",
        f"device    {_device(run)}",
        f"run       {_kept(run)}",
    ]


def _model(run: TrainingRun) -> str:
    model = run.config.model
    layers = Counter(_attention(layer) for layer in model.layers)
    attention = ", ".join(layers)
    if len(layers) > 1:
        attention = ", ".join(f"{name} in {count(n, 'layer')}" for name, n in layers.items())
    sizes = f"{count(model.n_layer, 'layer')}, {count(model.n_head, 'head')}"
    sizes += f", {count(model.n_embd, 'feature')}"
    return f"{run.gpt.size(run.tokenizer.n_vocab)}: {sizes}; {attention}"


def _attention(layer: AttentionConfig) -> str:
    forgets = " that forgets" if getattr(layer, "decay", "none") == "head" else ""
    return f"{layer.name.replace('_', '-')} attention{forgets}"


def _data(run: TrainingRun) -> str:
    config = run.config
    n_tokens = run.batches.rows.stream.n_tokens
    n_read = config.tokens(config.last_step)
    tokenizer = f"tokenizer {run.tokenizer.name}, {run.tokenizer.n_vocab:,} ids"
    corpus = f"{n_tokens:,} tokens in {config.dataset_dir} ({tokenizer})"
    mixed = ""
    if run.batches.mixture is not None:
        shares = run.batches.mixture.shares(config.last_step * config.batch_size)
        mixed = f", drawn from {shares}"
    rows = run.batches.rows
    packed = f"; {rows.summary()}" if isinstance(rows, Conversations) else ""
    passes = format_epochs(_n_epochs(run))
    return f"{corpus}{packed}; training reads {n_read:,} tokens, {passes}{mixed}"


def _batch(run: TrainingRun) -> str:
    config = run.config
    at_once = min(run.micro_batch, config.share_of(run.world.size))
    where = " in each process" if run.group.count > 1 else ""
    sequences = f"{count(config.batch_size, 'sequence')} of {config.seq_len:,}"
    return f"{config.tokens(1):,} tokens a step: {sequences}, {at_once:,} at a time{where}"


def _schedule(run: TrainingRun) -> str:
    config = run.config
    schedule = config.schedule
    last = config.max_steps
    max_lr = config.optim.max_lr
    warmup = schedule.warmup(last)
    fall = schedule.falls_after(last)
    steps = count(last, "step")
    if config.last_step < last:
        steps += f" (this time to step {config.last_step:,})"
    course = []
    if warmup:
        rise = f"rises to {max_lr:.3g} in {count(warmup, 'step')}"
        if 1 <= schedule.warmup_steps > warmup:
            rise += f" ({schedule.warmup_steps:,} would not fit)"
        course.append(rise)
    if fall > warmup:
        course.append(f"stays at {max_lr:.3g} until step {fall:,}")
    if fall < last:
        course.append(f"falls to {max_lr * schedule.factor(last - 1, last):.3g}")
    scaled = ""
    tuned = config.optim.transfer
    if tuned is not None and ratios(run.gpt, tuned) != (1, 1):
        sizes = f"{count(tuned.n_layer, 'layer')} and {count(tuned.n_embd, 'feature')}"
        scaled = f"; tuned for {sizes}, and scaled to this model"
    optimizer = type(config.optim).__name__.removesuffix("Config")
    return f"{steps} of {optimizer}; the learning rate {', then '.join(course)}{scaled}"


def _device(run: TrainingRun) -> str:
    device = run.compute.shared_by(run.world.size)
    if is_compiled(run.summed_loss):
        device += ", compiled"
    if run.config.runtime.strategy == "fsdp":
        device += ", with a shard of the weights"
    if run.group.size > 1:
        device += f"; {run.group.size} share a sequence"
    return device


def _kept(run: TrainingRun) -> str:
    config = run.config
    windows = run.windows
    rows = windows.all_rows
    if isinstance(rows, Conversations):
        share = "all" if len(windows) == len(rows) else f"{len(windows):,} of"
        text = f"the answers of {share} {rows.summary()}"
    else:
        n_tokens = windows.stream.n_tokens - 1
        n_read = min(len(windows) * windows.seq_len, n_tokens)
        share = "all" if n_read == n_tokens else f"{n_read:,} of"
        text = f"{share} {n_tokens:,} validation tokens"
    saved = _rhythm(config.checkpoint.every)
    evaluated = _rhythm(config.eval.every)
    return f"{config.run_dir}: saved {saved}, evaluated {evaluated} on {text}"


def _rhythm(every: int | None) -> str:
    return "at the end" if every is None else f"every {count(every, 'step')}"


class TrainingProgress(Track):
    """Counts steps, and follows the lines of metrics.jsonl."""

    lines_beside_bar = True

    def __init__(self, last: int, step: int) -> None:
        """Begin after `step`; `last` is the step after which this run stops."""
        super().__init__("training: step", last, step)
        self._lines: list[JsonDict] = []  # of training, since the last that was printed

    def take(self, line: JsonDict) -> None:
        """Count a step."""
        if "loss" in line:
            self._lines.append(line)
        self.advance(1, f"loss {line['loss']:.4f}" if "loss" in line else "")

    def line(self) -> str:
        """The step, figures of the steps since the last line, and the time left, as printed."""
        figures = _figures(self._lines) if self._lines else []
        self._lines = []
        last = f"{self.total:,}"
        return ", ".join([f"step {self.done:{len(last)},} of {last}", *figures, *self.left()])


def _figures(lines: list[JsonDict]) -> list[str]:
    last = lines[-1]
    loss = f"loss {last['loss']:.4f}"
    if len(lines) > 1:
        loss += f" (mean {mean(line['loss'] for line in lines):.4f})"
    figures = [
        loss,
        f"learning rate {last['lr']:.3g}",
        f"gradient norm {last['grad_norm']:.3g}",
        f"{harmonic_mean(line['tokens_per_second'] for line in lines):,.0f} tokens/s",
    ]
    mfu = [line["mfu"] for line in lines if line["mfu"]]
    if mfu:
        figures.append(f"MFU {harmonic_mean(mfu):.1%}")
    return figures
