"""What a run starts from: data, model and optimizer as its configuration says, and its newest checkpoint."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.console import say
from common.settings import UserError
from data.loader import EvalBatches, TrainBatches
from data.shards import TOKENIZER, Manifest, TokenStream, read_manifest
from data.tokenizer import Tokenizer, load_tokenizer
from model.gpt import GPT
from trainer.average import Average
from trainer.checkpoint import Checkpoint, retain
from trainer.config import TrainConfig
from trainer.distributed import SequenceGroup, World
from trainer.long import share_sequences
from trainer.memory import step_memory
from trainer.micro_batch import choose_micro_batch
from trainer.optim import named_state
from trainer.randomness import seed_process
from trainer.resume import find_checkpoint, new_state, restore, take_weights
from trainer.runtime import Runtime, device_name, maybe_compile
from trainer.state import TrainState
from trainer.step import SummedLoss
from trainer.transfer import scale_weights


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
    """Where the run goes on from; None: it is new."""
    micro_batch: int = 1

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The run's tensors by name, as in its checkpoints."""
        averages = {} if self.average is None else self.average.tensors
        return {"model": self.gpt.state_dict() | averages, "optimizer": named_state(self.gpt, self.optimizer)}

    def update(self, **changes: Any) -> None:
        """Change the state."""
        self.state = self.state.model_copy(update=changes)


def open_run(config: TrainConfig, runtime: Runtime, world: World) -> Run:
    """Build model and optimizer from the seed, and restore them from the run's newest checkpoint, if there is one.

    Raises:
        UserError: data, configuration, checkpoint or processes do not fit each other.
    """
    manifest, tokenizer, batches, windows = open_data(config)
    _check_processes(config, runtime, world)
    if config.data.mixture is not None:
        batches.mix(config.dataset_dir, manifest, config.data.mixture)
        say(f"sequences are drawn from {batches.mixture}")
    checkpoint = find_checkpoint(config.run_dir, world)
    if checkpoint is not None and config.resume == "never":
        raise UserError(f"run_dir={config.run_dir} holds a run, and resume=never: choose another, or resume=auto")
    group = SequenceGroup(world, config.runtime.context_parallel)
    gpt, summed_loss = build_model(config, runtime, world, group, config.data.reset_at(tokenizer.eot_id))
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
            retain(config.run_dir, run.state, config.checkpoint)  # a killed save may have left this undone
    run.micro_batch = _choose_micro_batch(run)
    return run


def open_data(config: TrainConfig) -> tuple[Manifest, Tokenizer, TrainBatches, EvalBatches]:
    """Open the dataset of a run, without a mixture.

    Raises:
        UserError: there is none, it is too small, or the model has fewer ids than its tokenizer.
    """
    folder = config.dataset_dir
    manifest, tokenizer = read_manifest(folder), load_tokenizer(folder / TOKENIZER)
    if tokenizer.sha256 != manifest.tokenizer.sha256:
        raise UserError(f"{folder / TOKENIZER} is not the manifest's tokenizer: prepare the data again")
    if tokenizer.n_vocab > config.model.n_vocab:
        what = f"dataset_dir={folder} was made with tokenizer {tokenizer.name} of {tokenizer.n_vocab} ids"
        remedy = f"set model.n_vocab={tokenizer.n_vocab}, or use another dataset"
        raise UserError(f"{what}, and model.n_vocab={config.model.n_vocab}: {remedy}")
    train, val = (TokenStream(folder, manifest, split) for split in ("train", "val"))
    if val.n_tokens < 2:
        raise UserError(f"dataset_dir={folder} has no text in its split val: prepare it with val_tokens")
    batches = TrainBatches(train, config.seq_len, config.batch_size, config.seed)
    windows = EvalBatches(val, config.seq_len, config.eval.batches and config.eval.batches * config.batch_size)
    return manifest, tokenizer, batches, windows


def _check_processes(config: TrainConfig, runtime: Runtime, world: World) -> None:
    """Raise UserError if the processes cannot share a batch, or chose different types."""
    share = config.runtime.context_parallel
    if world.size % share:
        what = f"runtime.context_parallel={share} does not divide {world.size} processes"
        raise UserError(f"{what}: start {share} or a multiple of it with torchrun")
    given = f"batch_tokens={config.batch_tokens} is {config.batch_size} sequences"
    if config.batch_size < world.size // share:
        groups = f"{world.size // share} groups of {share}" if share > 1 else f"{world.size}"
        raise UserError(f"{given}, fewer than {groups} processes: start fewer, or raise batch_tokens")
    if config.runtime.strategy == "fsdp" and config.batch_size % world.size:
        needed = f"divisible among {world.size} processes, as runtime.strategy=fsdp needs"
        raise UserError(f"{given}, not {needed}: change one of them, or use runtime.strategy=ddp")
    if len(types := sorted(set(world.gather_text(str(runtime.dtype))))) > 1:
        raise UserError(f"runtime.dtype=auto is {' and '.join(types)} on these machines: name one type")


def sequences_of(rank: int, size: int, batch_size: int) -> tuple[int, int]:
    """The sequences [first, stop) of every global batch that belong to process, or group, `rank` of `size`."""
    return rank * batch_size // size, (rank + 1) * batch_size // size


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
    with torch.device("meta") if fsdp else contextlib.nullcontext():  # fsdp: for models that do not fit here
        gpt = GPT(config.model, eot_id).to(runtime.param_dtype)
    gpt.recompute = config.runtime.recompute
    if group.size > 1:
        share_sequences(gpt, group)
    summed_loss = SummedLoss(gpt)
    maybe_compile(gpt.blocks if fsdp else [summed_loss], config.runtime, runtime, gpt)
    wrapped = world.wrap(summed_loss, fsdp, runtime.dtype)
    if fsdp:
        gpt.to_empty(device=world.device)
        gpt.init_weights(world.shard_like)  # each process draws all weights, one at a time, and keeps its part
    scale_weights(gpt, config.optim.transfer)
    return gpt, wrapped


def _choose_micro_batch(run: Run) -> int:
    """The configured size, or the largest that fits. A run chooses only once, because rounding depends on it."""
    config, world, state = run.config, run.world, run.state
    if config.runtime.micro_batch != "auto":
        return config.runtime.micro_batch
    main_device = world.gather_text(device_name(world.device))[0]  # every process must decide the same
    place = f"{world.size} x {main_device}"
    if state.micro_batch is not None and state.micro_batch_for == place:
        say(f"runtime.micro_batch=auto: {state.micro_batch}, as chosen when this run began on {place}")
        return state.micro_batch

    def predict(size: int) -> int:
        """What a step needs besides weights and optimizer, which are there already."""
        recompute = config.runtime.recompute
        memory = step_memory(run.gpt, size, config.seq_len, run.runtime, world.size, recompute=recompute)
        return memory.peak - memory.weights - memory.optimizer

    share = -(-config.batch_size // world.size)
    size = choose_micro_batch(run.summed_loss, share, config.seq_len, predict, run.runtime, world)
    run.update(micro_batch=size, micro_batch_for=place)
    return size
