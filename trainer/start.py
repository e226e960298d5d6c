"""What a run starts from: data, model and optimizer, and its newest checkpoint or the weights of another run."""

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.console import say, warn
from common.settings import UserError, differences
from data.loader import EvalBatches, TrainBatches
from data.shards import TOKENIZER, Manifest, TokenStream, read_manifest
from data.tokenizer import Tokenizer, load_tokenizer
from model.gpt import GPT, GPTConfig, call_layer
from trainer.average import Average
from trainer.checkpoint import (
    Checkpoint,
    Tensors,
    open_checkpoint,
    open_model,
    open_newest,
    read_weights,
    retain,
)
from trainer.config import TrainConfig
from trainer.distributed import SequenceGroup, World
from trainer.long import share_sequences
from trainer.memory import memory_of, step_memory
from trainer.micro_batch import choose_micro_batch, room_on_cpu
from trainer.optim import named_state
from trainer.randomness import RANDOM, random_tensors, seed_process, set_random_state
from trainer.run_dir import changes_of
from trainer.runtime import Runtime, device_name, maybe_compile
from trainer.samples import read_prompt
from trainer.state import FixedSettings, TrainState
from trainer.step import SummedLoss
from trainer.transfer import scale_weights

_BY_ID = ("embed.weight", "output.weight")
"""Parameters with a row for each id."""
_FIXED = set(FixedSettings.model_fields)
_MAY_DIFFER: Any = {"run_dir": True, "dataset_dir": True, "tracker": True, "runtime": {"device"}}
"""Settings of each process: where it finds what is the same, and what only the main process uses."""


@dataclass
class Run:
    """A run in progress. A checkpoint holds `state` and `tensors()`."""

    config: TrainConfig
    runtime: Runtime
    world: World
    group: SequenceGroup
    tokenizer: Tokenizer
    batches: TrainBatches
    windows: EvalBatches
    """The validation split, or the part of it that is evaluated."""
    gpt: GPT
    summed_loss: nn.Module
    """The model's SummedLoss, as processes share it: wrapped and compiled."""
    optimizer: torch.optim.Optimizer
    average: Average | None
    state: TrainState
    checkpoint: Checkpoint | None
    """Where the run continues from; None: it is new."""
    micro_batch: int = 1

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The run's tensors by name, as in its checkpoints."""
        averages = {} if self.average is None else self.average.tensors
        return {
            "model": self.gpt.state_dict() | averages,
            "optimizer": named_state(self.gpt, self.optimizer),
        }

    def update(self, **changes: Any) -> None:
        """Change the state."""
        self.state = self.state.model_copy(update=changes)


def open_run(config: TrainConfig, runtime: Runtime, world: World) -> Run:
    """Build model and optimizer from the seed, and restore them from the run's newest checkpoint, if there is one.

    Raises:
        UserError: data, configuration, checkpoint or processes do not fit each other.
    """
    manifest, tokenizer, batches, windows = open_data(config)
    _check_processes(config, runtime, world, manifest)
    if world.is_main and runtime.device.type == "cpu" and config.runtime.micro_batch != "auto":
        _compare_memory(config, runtime, world, config.runtime.micro_batch)
    if config.data.mixture is not None:
        batches.mix(config.dataset_dir, manifest, config.data.mixture)
    checkpoint = find_checkpoint(config.run_dir, world)
    if checkpoint is not None and config.resume == "never":
        raise UserError(
            f"run_dir={config.run_dir} holds a run, and resume=never: choose another, or resume=auto"
        )
    group = SequenceGroup(world, config.runtime.context_parallel)
    gpt, summed_loss = build_model(
        config, runtime, world, group, config.data.reset_at(tokenizer.eot_id)
    )
    if config.init_from is not None and checkpoint is None:
        take_weights(gpt, config.init_from, tokenizer, world)
    seed_process(f"{config.seed} 0 {world.rank}")
    optimizer = config.optim.build(gpt, world, runtime.dtype)
    average = None if config.average is None else Average(gpt, config.average, world)
    state, model = new_state(config, manifest), (gpt, summed_loss, optimizer, average)
    run = Run(config, runtime, world, group, tokenizer, batches, windows, *model, state, checkpoint)
    if checkpoint is not None:
        run.state = restore(checkpoint, state, run.tensors(), world)
        say(f"resuming {config.run_dir} after step {run.state.step}")
        if world.is_main and not checkpoint.damaged:  # else newer ones stay: their disk may recover
            retain(
                config.run_dir, run.state, config.checkpoint
            )  # a killed save may have left this undone
    run.micro_batch = _choose_micro_batch(run)
    return run


def open_data(config: TrainConfig) -> tuple[Manifest, Tokenizer, TrainBatches, EvalBatches]:
    """Open the dataset of a run, without a mixture.

    Raises:
        UserError: there is none, it is too small, its tokenizer has more ids than the model, or eval.prompt is long.
    """
    folder = config.dataset_dir
    manifest, tokenizer = read_manifest(folder), load_tokenizer(folder / TOKENIZER)
    if tokenizer.sha256 != manifest.tokenizer.sha256:
        raise UserError(
            f"{folder / TOKENIZER} is not the manifest's tokenizer: prepare the data again"
        )
    if tokenizer.n_vocab > config.model.n_vocab:
        if config.init_from is not None:
            open_source(
                config.init_from, config.model, tokenizer
            )  # which says what of the two does not fit
        what = f"dataset_dir={folder} was made with tokenizer {tokenizer.name} of {tokenizer.n_vocab} ids"
        remedy = f"set model.n_vocab={tokenizer.n_vocab}, or use another dataset"
        raise UserError(f"{what}, and model.n_vocab={config.model.n_vocab}: {remedy}")
    if config.eval.prompt is not None:
        read_prompt(config.eval.prompt, tokenizer, config.model.max_len)
    train, val = (
        TokenStream(folder, manifest, split, config.data.loss) for split in ("train", "val")
    )
    if val.n_tokens < 2:
        raise UserError(
            f"dataset_dir={folder} has no text in its split val: prepare it with val_tokens"
        )
    batches = TrainBatches(train, config.seq_len, config.batch_size, config.seed)
    windows = EvalBatches(
        val, config.seq_len, config.eval.batches and config.eval.batches * config.batch_size
    )
    if not windows.has_targets:
        raise UserError(
            f"eval.batches={config.eval.batches} has no answer to evaluate: give more, or null for all"
        )
    return manifest, tokenizer, batches, windows


def _check_processes(
    config: TrainConfig, runtime: Runtime, world: World, manifest: Manifest
) -> None:
    """Raise UserError if the processes differ in what must be equal, or cannot share a batch."""
    settings = config.model_dump(mode="json", exclude=_MAY_DIFFER)
    settings["runtime"]["dtype"] = str(runtime.dtype).removeprefix("torch.")  # what auto has chosen
    data = {"dataset_fingerprint": manifest.fingerprint, "tokenizer": manifest.tokenizer.sha256}
    world.check_equal("settings", settings | data | {"init_from": config.init_from is not None})
    share = config.runtime.context_parallel
    if world.size % share:
        what = f"runtime.context_parallel={share} does not divide {world.size} processes"
        raise UserError(f"{what}: start {share} or a multiple of it with torchrun")
    given = f"batch_tokens={config.batch_tokens} is {config.batch_size} sequences"
    if config.batch_size < world.size // share:
        groups = f"{world.size // share} groups of {share}" if share > 1 else f"{world.size}"
        raise UserError(
            f"{given}, fewer than {groups} processes: start fewer, or raise batch_tokens"
        )
    if config.runtime.strategy == "fsdp" and config.batch_size % world.size:
        needed = f"divisible among {world.size} processes, as runtime.strategy=fsdp needs"
        raise UserError(f"{given}, not {needed}: change one of them, or use runtime.strategy=ddp")


def _compare_memory(config: TrainConfig, runtime: Runtime, world: World, micro_batch: int) -> None:
    """Warn if a step is planned to take most of this machine's memory: it may stand still, or kill the process."""
    with torch.device("meta"):
        gpt = GPT(config.model)
    size = min(micro_batch, config.share_of(world.size))
    planned, room = memory_of(gpt, config, runtime, world.size, size).peak, room_on_cpu(world)
    if planned > 0.8 * room:
        what = f"a step is planned to take {planned / 1e9:.1f} GB of memory, and {room / 1e9:.1f} GB are available"
        warn(f"{what}: use a smaller model, seq_len or runtime.micro_batch (now {micro_batch})")


def build_model(
    config: TrainConfig, runtime: Runtime, world: World, group: SequenceGroup, eot_id: int | None
) -> tuple[GPT, nn.Module]:
    """Return the model with initial weights, on its device, and its summed loss, which the processes share.

    Args:
        group: the processes that share sequences.
        eot_id: as for `GPT`.
    """
    torch.manual_seed(config.seed)
    fsdp = config.runtime.strategy == "fsdp"
    with (
        torch.device("meta") if fsdp else contextlib.nullcontext()
    ):  # fsdp: for models that do not fit here
        gpt = GPT(config.model, eot_id).to(runtime.param_dtype)
    gpt.recompute = config.runtime.recompute
    summed_loss = SummedLoss(gpt, share_sequences(group) if group.size > 1 else call_layer)
    maybe_compile(gpt.blocks if fsdp else [summed_loss], config.runtime, runtime, gpt)
    wrapped = world.wrap(summed_loss, fsdp, runtime.dtype)
    if fsdp:
        gpt.to_empty(device=world.device)
        gpt.init_weights(
            world.shard_like
        )  # each process draws all weights, one at a time, and keeps its part
    scale_weights(gpt, config.optim.transfer)
    return gpt, wrapped


def _choose_micro_batch(run: Run) -> int:
    """The configured size, or the largest that fits. A run chooses only once, because rounding depends on it."""
    config, world, state = run.config, run.world, run.state
    if config.runtime.micro_batch != "auto":
        return config.runtime.micro_batch
    main_device = world.exchange("device", device_name(world.device))[
        0
    ]  # every process must decide the same
    place = f"{world.size} x {main_device}"
    if state.micro_batch is not None and state.micro_batch_for == place:
        return state.micro_batch

    def predict(size: int) -> int:
        """What a step needs besides weights and optimizer, which are there already."""
        recompute = config.runtime.recompute
        memory = step_memory(
            run.gpt, size, config.seq_len, run.runtime, world.size, recompute=recompute
        )
        return memory.peak - memory.weights - memory.optimizer

    share = config.share_of(world.size)
    size = choose_micro_batch(run.summed_loss, share, config.seq_len, predict, run.runtime, world)
    run.update(micro_batch=size, micro_batch_for=place)
    return size


def new_state(config: TrainConfig, manifest: Manifest) -> TrainState:
    """The state of a run before its first step."""
    return TrainState(
        optimizer=config.optim.name,
        step=0,
        run_id=secrets.token_hex(4),
        dataset_dir=config.dataset_dir.absolute(),
        dataset_fingerprint=manifest.fingerprint,
        **{name: getattr(config, name) for name in _FIXED},
    )


def find_checkpoint(run_dir: Path, world: World) -> Checkpoint | None:
    """The newest whole checkpoint of a run, the same in all processes, or None if it has no checkpoints.

    Raises:
        UserError: none of its checkpoints is whole, or this process does not see the one that the main process found.
    """
    world.at(f"reading the checkpoints of {run_dir}")
    found = open_newest(run_dir) if world.is_main else None
    name, identity = world.exchange(
        "checkpoint", (found.path.name, found.identity()) if found else ("", "")
    )[0]
    if world.is_main or not name:
        return found
    path = run_dir / "checkpoints" / name
    try:
        if (
            found := open_checkpoint(path, files=())
        ).identity() != identity:  # the main process has verified it
            raise UserError("its weights are others")
    except UserError as error:
        why = f"process {world.rank} cannot see {path} as the main process does ({error})"
        raise UserError(f"{why}: put run_dir where all machines see it") from None
    return found


def restore(
    checkpoint: Checkpoint, fresh: TrainState, tensors: Tensors, world: World
) -> TrainState:
    """Load a checkpoint into a run's tensors and random generators, and return its state.

    Args:
        fresh: the state in which the run would start.
        tensors: those of "model" and "optimizer".

    Raises:
        UserError: the checkpoint belongs to a run with another model or other data.
    """
    state = checkpoint.state
    _check_same_run(checkpoint.path, state, fresh)
    for file, of_run in tensors.items():
        world.at(f"reading {file}")
        expected = {name: (value.shape, (value.dtype,)) for name, value in of_run.items()}
        stored = checkpoint.tensors(file, expected, world.rows(of_run))
        with torch.no_grad():
            for name, value in of_run.items():
                world.local(value).copy_(stored[name])
    saved_states = checkpoint.tensors("random", random_tensors(state.processes, state.device))[
        RANDOM
    ]
    if (state.processes, state.device) == (world.size, world.device.type):
        set_random_state(saved_states[world.rank], world.device)
    else:  # other processes than before: each gets a new generator
        seed_process(f"{state.seed} {state.step} {world.rank}")
    return state.model_copy(update={"dataset_dir": fresh.dataset_dir})


def _check_same_run(path: Path, before: TrainState, now: TrainState) -> None:
    if not before.dataset_fingerprint:
        run_dir = path.parent.parent
        raise UserError(
            f"run_dir={run_dir} is an imported model: train it with init_from={run_dir} in another run_dir"
        )
    if before.dataset_fingerprint != now.dataset_fingerprint:
        what = f"{path} was trained on {before.dataset_dir}, whose content is not that of dataset_dir={now.dataset_dir}"
        raise UserError(f"{what}: use that dataset, or another run_dir")
    was, wanted = (
        state.model_dump(mode="json", include={*_FIXED, "optimizer"}) for state in (before, now)
    )
    if changed := differences(was, wanted):
        listed = ", ".join(changes_of(changed, "checkpoint:"))
        raise UserError(
            f"{path} belongs to another run: {listed}; use the checkpoint's settings, or another run_dir"
        )


def open_source(
    path: Path, config: GPTConfig, tokenizer: Tokenizer
) -> tuple[Checkpoint, Tokenizer]:
    """Open the checkpoint init_from=path, whose weights a run with this model and tokenizer starts from.

    The tokenizer may have markers that the checkpoint's tokenizer lacks. Their rows of the embedding are padding rows
    of the checkpoint, or new rows by another model.pad_vocab.

    Returns:
        The checkpoint and its tokenizer.

    Raises:
        UserError: there is no whole checkpoint, or it has another model or tokenizer.
    """
    source = open_model(path, key="init_from")
    trained = load_tokenizer(source.path / "tokenizer.json")
    if not tokenizer.extends(trained.sha256):
        before, here = (f"{each.name} (n_vocab {each.n_vocab})" for each in (trained, tokenizer))
        what = (
            f"init_from={path} was trained with the tokenizer {before}, and the dataset has {here}"
        )
        goes_on = trained.extends(tokenizer.sha256)
        remedy = (
            "a chat model goes on with data=chat"
            if goes_on
            else "prepare the dataset with the model's tokenizer"
        )
        raise UserError(f"{what}: {remedy}")
    model = source.state.model
    ours, theirs = (each.model_dump(mode="json") for each in (config, model))
    if tokenizer.n_vocab > trained.n_vocab:
        if tokenizer.n_vocab > model.n_vocab_padded and config.pad_vocab == model.pad_vocab:
            what = f"init_from={path} has rows for {model.n_vocab_padded} ids, and the dataset has {tokenizer.n_vocab}"
            raise UserError(
                f"{what}, with its markers: add rows by model.pad_vocab={max(64, 2 * model.pad_vocab)}"
            )
        if config.n_vocab_padded >= model.n_vocab_padded:
            theirs |= {key: ours[key] for key in ("n_vocab", "pad_vocab")}
    if changed := differences({"model": ours}, {"model": theirs}):
        listed = ", ".join(changes_of(changed, "here:"))
        remedy = "leave out the model and its settings: they are those of init_from"
        raise UserError(f"init_from={path} has another model: {listed}; {remedy}")
    return source, trained


def take_weights(gpt: GPT, path: Path, tokenizer: Tokenizer, world: World) -> None:
    """Load the weights of the checkpoint init_from=path into the model: averaged weights, if the checkpoint has them.

    Raises:
        UserError: as `open_source`; or the processes do not all find the same checkpoint.
    """
    world.at(f"reading init_from={path}")
    source, trained = open_source(path, gpt.config, tokenizer)
    with torch.device("meta"):
        before = GPT(source.state.model)
    weights = gpt.state_dict()
    rows = world.rows(weights)
    world.check_equal("init_from", {"the weights of init_from": source.identity()})
    stored = read_weights(
        source, before, rows={name: own for name, own in rows.items() if name not in _BY_ID}
    )
    with torch.no_grad():
        for name, value in weights.items():
            found = stored[name]
            if name in _BY_ID:
                found = _extended(found, trained.n_vocab, tokenizer.n_vocab, len(value))[
                    rows.get(name, slice(None))
                ]
            world.local(value).copy_(found)
    averaged = "" if source.state.average is None else "averaged "
    say(f"starting from the {averaged}weights of {source.path}")


def _extended(table: Tensor, n_trained: int, n_ids: int, n_rows: int) -> Tensor:
    """Return a table (rows, n_embd) with n_rows rows, where the ids from n_trained to n_ids, and added rows, are new.

    New rows are the mean of the trained ones, so their logits are the mean of all logits (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Rows that pad the table stay as they are.
    """
    known, rest = table[:n_trained], table[n_ids:]
    new = known.mean(0, keepdim=True).expand(n_rows - n_trained - len(rest), -1)
    return torch.cat([known, new[: n_ids - n_trained], rest, new[n_ids - n_trained :]])
