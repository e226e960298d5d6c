"""What a run prints before its first step, and while it trains: a line per interval, and on a terminal a bar below."""

from collections import Counter
from statistics import harmonic_mean, mean

from common.console import Track, count, say, warn
from common.settings import JsonDict
from data.mixture import epochs
from model.attention import AttentionConfig
from trainer.runtime import is_compiled
from trainer.start import Run
from trainer.transfer import ratios


def announce(run: Run, last: tuple[int, float] | None) -> None:
    """Print what will be trained, and warn if the learning rate does not go on as it was, as with another max_steps.

    Args:
        last: the last step of a run that goes on, and its learning rate.
    """
    say("\n".join(start_lines(run)))
    if last is None:
        return
    config, schedule, (step, before) = run.config, run.config.schedule, last
    again, now = (
        config.optim.max_lr * schedule.factor(n, config.max_steps)
        for n in (step - 1, run.state.step)
    )
    if min(abs(before - again), abs(before - now)) > 1e-6 * before:
        rates = f"the learning rate goes from {before:.3g} (step {step}) to {now:.3g} (step {run.state.step + 1})"
        jumps = (
            now - before > 0.1 * config.optim.max_lr and schedule.longer
        )  # such a rise costs loss
        warn(f"{rates}; for a longer run without this jump: {schedule.longer}" if jumps else rates)


def start_lines(run: Run) -> list[str]:
    """What is trained on what, for how long, where, and what is kept, in words that need no settings' names."""
    return [
        f"model     {_model(run)}",
        f"data      {_data(run)}",
        f"batch     {_batch(run)}",
        f"schedule  {_schedule(run)}",
        f"device    {_device(run)}",
        f"run       {_kept(run)}",
    ]


def _model(run: Run) -> str:
    model = run.config.model
    layers = Counter(map(_attention, model.layers)).items()
    attention = ", ".join(
        f"{name} in {count(n, 'layer')}" if len(layers) > 1 else name for name, n in layers
    )
    sizes = f"{count(model.n_layer, 'layer')}, {count(model.n_head, 'head')}, {count(model.n_embd, 'feature')}"
    return f"{run.gpt.size(run.tokenizer.n_vocab)}: {sizes}; {attention}"


def _attention(layer: AttentionConfig) -> str:
    forgets = " that forgets" if getattr(layer, "decay", "none") != "none" else ""
    return f"{layer.name.replace('_', '-')} attention{forgets}"


def _data(run: Run) -> str:
    config, tokenizer, there = run.config, run.tokenizer, run.batches.stream.n_tokens
    read, mixture = config.tokens(config.last_step), run.batches.mixture
    mixed = (
        ""
        if mixture is None
        else f", drawn from {mixture.shares(config.last_step * config.batch_size)}"
    )
    corpus = f"{there:,} tokens in {config.dataset_dir} (tokenizer {tokenizer.name}, {tokenizer.n_vocab:,} ids)"
    return f"{corpus}; training reads {read:,} tokens, {epochs(read / there)}{mixed}"


def _batch(run: Run) -> str:
    config = run.config
    at_once = min(run.micro_batch, config.share_of(run.world.size))
    each = " in each process" if run.group.count > 1 else ""
    sequences = f"{count(config.batch_size, 'sequence')} of {config.seq_len:,}"
    return f"{config.tokens(1):,} tokens a step: {sequences}, {at_once:,} at a time{each}"


def _schedule(run: Run) -> str:
    config, schedule, last = run.config, run.config.schedule, run.config.max_steps
    highest, warmup, fall = config.optim.max_lr, schedule.warmup(last), schedule.falls_after(last)
    steps = count(last, "step") + (
        f" (this time to step {config.last_step:,})" if config.last_step < last else ""
    )
    short = f" ({schedule.warmup_steps:,} would not fit)" if warmup < schedule.warmup_steps else ""
    rises = [f"rises to {highest:.3g} in {count(warmup, 'step')}{short}"] if warmup else []
    stays = [f"stays at {highest:.3g} until step {fall:,}"] if fall > warmup else []
    falls = [f"falls to {highest * schedule.factor(last - 1, last):.3g}"] if fall < last else []
    tuned, scaled = config.optim.transfer, ""
    if tuned is not None and ratios(run.gpt, tuned) != (1, 1):
        sizes = f"{count(tuned.n_layer, 'layer')} and {count(tuned.n_embd, 'feature')}"
        scaled = f"; tuned for {sizes}, and scaled to this model"
    optimizer, course = (
        type(config.optim).__name__.removesuffix("Config"),
        ", then ".join([*rises, *stays, *falls]),
    )
    return f"{steps} of {optimizer}; the learning rate {course}{scaled}"


def _device(run: Run) -> str:
    n, together = run.world.size, run.group.size
    each = f"{n:,} processes, each on " if n > 1 else ""
    shared = ", with a part of the weights" if run.config.runtime.strategy == "fsdp" else ""
    shared += f"; {together} share a sequence" if together > 1 else ""
    return f"{each}{run.runtime}{', compiled' if is_compiled(run.summed_loss) else ''}{shared}"


def _kept(run: Run) -> str:
    config, windows = run.config, run.windows
    there = windows.stream.n_tokens - 1
    read = min(len(windows) * windows.seq_len, there)
    part = "all" if read == there else f"{read:,} of"
    evaluated = f"evaluated every {config.eval.every:,} on {part} {there:,} validation tokens"
    return f"{config.run_dir}: saved every {count(config.checkpoint.every, 'step')}, {evaluated}"


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
        self.advance(1)

    def line(self) -> str:
        """Return what is printed: the step, then figures of the steps since the last line, and the time left."""
        lines, self._lines = self._lines, []
        figures, last = _figures(lines) if lines else [], f"{self.total:,}"
        return ", ".join([f"step {self.done:{len(last)},} of {last}", *figures, *self.left()])


def _figures(lines: list[JsonDict]) -> list[str]:
    last, over = (
        lines[-1],
        f" (mean {mean(line['loss'] for line in lines):.4f})" if len(lines) > 1 else "",
    )
    mfu = [line["mfu"] for line in lines if line["mfu"]]
    return [
        f"loss {last['loss']:.4f}{over}",
        f"learning rate {last['lr']:.3g}",
        f"gradient norm {last['grad_norm']:.3g}",
        f"{harmonic_mean(line['tokens_per_second'] for line in lines):,.0f} tokens/s",
        *([f"MFU {harmonic_mean(mfu):.1%}"] if mfu else []),
    ]
