"""What a run starts from: data, model and optimizer, and a checkpoint or another run's weights."""

import contextlib
import os
import secrets
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.command_line import format_changes
from common.console import say
from common.numbers import ceil_div
from common.settings import JsonDict, UserError, find_differences
from data.loader import EvalBatches, TrainBatches, open_eval_batches, open_rows
from data.shards import TOKENIZER, Manifest, TokenStream, read_manifest
from data.tokenizers.build import Tokenizer, load_tokenizer
from model.gpt import GPT
from runtime.checkpoint import Checkpoint, delete_old_checkpoints
from runtime.device import Compute, compile_blocks, device_name, should_compile
from runtime.distributed import SequenceGroup, World
from runtime.proof import StoredProof, prove_gradients, use_plain_torch
from runtime.state import FixedSettings, TrainState, seed_process
from trainer.config import TrainConfig
from trainer.init_from import load_init_from, open_init_from
from trainer.micro_batch import choose_micro_batch
from trainer.mup import scale_weights
from trainer.optim import named_state
from trainer.records.samples import read_prompt
from trainer.resume import load_run, open_newest_for_all
from trainer.step import SummedLoss, accumulate_gradients, local_micro_batches

_MAY_DIFFER: Any = {"run_dir": True, "dataset_dir": True, "tracker": True, "runtime": {"device"}}
"""Settings that may differ between processes: where they find the same files, what only the main
process uses, and the device, which `join_world` compares."""


@dataclass
class TrainingRun:
    """A run in progress. A checkpoint holds `state` and `tensors()`."""

    config: TrainConfig
    compute: Compute
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
    state: TrainState
    checkpoint: Checkpoint | None
    """Where the run continues from; None: it is new."""
    micro_batch: int = 1

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The run's tensors by name, as in its checkpoints."""
        return {
            "model": self.gpt.state_dict(),
            "optimizer": named_state(self.gpt, self.optimizer),
        }

    def line(self, **values: Any) -> JsonDict:
        """Return a line of metrics.jsonl."""
        tokens = self.config.tokens(self.state.step)
        return {"step": self.state.step, "tokens": tokens, **values}

    def update(self, **changes: Any) -> None:
        """Change the state."""
        self.state = self.state.model_copy(update=changes)


def open_run(config: TrainConfig, compute: Compute, world: World) -> TrainingRun:
    """Build model and optimizer from the seed, or restore them from the run's newest checkpoint.

    Raises:
        UserError: data, configuration, checkpoint or processes do not fit each other.
    """
    # Open the data, and compare what the processes were given.
    typed = config
    config, manifest, tokenizer, batches, windows = open_data(config)
    _say_fitted(typed, config)
    _check_processes(config, compute, world, manifest)
    if config.data.mixture is not None:
        batches.mix(config.data.mixture)
    # Continue the run in run_dir, or begin one.
    checkpoint = open_newest_for_all(config.run_dir, world)
    if checkpoint is not None and config.resume == "never":
        raise UserError(
            f"run_dir={config.run_dir} holds a run, and resume=never: "
            "choose another, or resume=auto"
        )
    # Build the model from the seed, the same in every process. A new run may start from the
    # weights of another.
    group = SequenceGroup(world, config.runtime.context_parallel)
    gpt, summed_loss = build_model(
        config, compute, world, group, config.data.reset_at(tokenizer.eot_id)
    )
    if config.init_from is not None and checkpoint is None:
        load_init_from(gpt, config.init_from, tokenizer, world)
    # From here on, processes draw different numbers.
    seed_process(f"{config.seed} 0 {world.rank}")
    optimizer = config.optim.build(gpt, world, compute.dtype)
    # Collect it, and load the checkpoint into it.
    state = new_state(config, manifest)
    run = TrainingRun(
        config,
        compute,
        world,
        group,
        tokenizer,
        batches,
        windows,
        gpt,
        summed_loss,
        optimizer,
        state,
        checkpoint,
    )
    if checkpoint is not None:
        run.state = load_run(checkpoint, state, run.tensors(), world)
        # A killed save may have left this undone. Damaged ones stay: their disk may recover.
        if world.is_main and not checkpoint.damaged:
            delete_old_checkpoints(config.run_dir, run.state, config.checkpoint)
    # Choose the size of micro-batches, and prove the first gradient, as it will be computed.
    run.update(eval_batches=config.eval.batches)
    run.micro_batch = _choose_micro_batch(run)
    if compute.proof:
        prove_run(run)
    return run


def open_data(
    config: TrainConfig,
) -> tuple[TrainConfig, Manifest, Tokenizer, TrainBatches, EvalBatches]:
    """Open the dataset of a run, without a mixture, and return the configuration for it.

    Raises:
        UserError: there is none, it is too small, its tokenizer has more ids than the model, or
            eval.prompt is long.
    """
    # Read the manifest, and compare its tokenizer with the model.
    folder = config.dataset_dir
    manifest = read_manifest(folder)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if tokenizer.sha256 != manifest.tokenizer.sha256:
        raise UserError(
            f"{folder / TOKENIZER} is not the manifest's tokenizer: prepare the data again"
        )
    if tokenizer.n_vocab > config.model.n_vocab:
        if config.init_from is not None:
            # Its error says which of the two does not fit.
            open_init_from(config.init_from, config.model, tokenizer)
        raise UserError(
            f"dataset_dir={folder} was made with tokenizer {tokenizer.name} of "
            f"{tokenizer.n_vocab} ids, and model.n_vocab={config.model.n_vocab}: "
            f"set model.n_vocab={tokenizer.n_vocab}, or use another dataset"
        )
    if config.eval.prompt is not None:
        read_prompt(config.eval.prompt, tokenizer, config.model.max_len)
    # Open both splits.
    train = TokenStream(folder, manifest, "train")
    val = TokenStream(folder, manifest, "val")
    if val.n_tokens < 2:
        raise UserError(
            f"dataset_dir={folder} has no text in its split val: prepare it with val_tokens"
        )
    # With epochs, the number of rows decides how many steps there are.
    rows = open_rows(train, config.seq_len, config.data.loss)
    config = config.for_rows(len(rows))
    batches = TrainBatches(rows, config.batch_size, config.seed)
    # Evaluate all of the validation split, or batches spread over it.
    n_windows = None
    if config.eval.batches is not None:
        n_windows = config.eval.batches * config.batch_size
    windows = open_eval_batches(val, config.seq_len, n_windows, loss=config.data.loss)
    return config, manifest, tokenizer, batches, windows


def _say_fitted(typed: TrainConfig, config: TrainConfig) -> None:
    """Say which settings were lowered to fit the epochs of the dataset."""
    sections: Any = {"batch_tokens": True, "eval": True, "checkpoint": True}
    before = typed.model_dump(mode="json", include=sections)
    lowered = find_differences(before, config.model_dump(mode="json", include=sections))
    if lowered:
        changes = ", ".join(format_changes(lowered, "given:"))
        say(f"to fit epochs={typed.epochs:g} of this dataset: {changes}; with max_steps they stay")


def _check_processes(
    config: TrainConfig, compute: Compute, world: World, manifest: Manifest
) -> None:
    """Raise UserError if the processes differ in what must be equal, or cannot share a batch."""
    settings = config.model_dump(mode="json", exclude=_MAY_DIFFER)
    settings["runtime"]["dtype"] = str(compute.dtype).removeprefix("torch.")  # auto's choice
    data = {"dataset_fingerprint": manifest.fingerprint, "tokenizer": manifest.tokenizer.sha256}
    world.check_equal(settings | data | {"init_from": config.init_from is not None})
    share = config.runtime.context_parallel
    if world.size % share:
        raise UserError(
            f"runtime.context_parallel={share} does not divide {world.size} processes: "
            f"start {share} or a multiple of it with torchrun"
        )
    batch = f"batch_tokens={config.batch_tokens} is {config.batch_size} sequences"
    if config.epochs is not None:
        batch += f" with epochs={config.epochs:g} (with max_steps, batch_tokens stays)"
    if config.batch_size < world.size // share:
        groups = f"{world.size // share} groups of {share}" if share > 1 else f"{world.size}"
        raise UserError(
            f"{batch}, fewer than {groups} processes: start fewer, or raise batch_tokens"
        )
    if config.runtime.strategy == "fsdp" and config.batch_size % world.size:
        raise UserError(
            f"{batch}, not divisible among {world.size} processes, as runtime.strategy=fsdp "
            "needs: change one of them, or use runtime.strategy=ddp"
        )


def build_model(
    config: TrainConfig, compute: Compute, world: World, group: SequenceGroup, eot_id: int | None
) -> tuple[GPT, nn.Module]:
    """Return the model with initial weights on its device, and its wrapped SummedLoss.

    Args:
        group: the processes that share sequences.
        eot_id: as for `GPT`.
    """
    torch.manual_seed(config.seed)
    fsdp = config.runtime.strategy == "fsdp"
    # With fsdp, the whole model may not fit here.
    with torch.device("meta") if fsdp else contextlib.nullcontext():
        gpt = GPT(config.model, eot_id).to(compute.param_dtype)
    gpt.recompute = config.runtime.recompute
    summed_loss = SummedLoss(gpt, group)
    compile_blocks(gpt, should_compile(config.runtime, compute))
    wrapped = world.wrap(summed_loss, fsdp, compute.dtype)
    if fsdp:
        gpt.to_empty(device=world.device)
        # Each process draws all weights, one at a time, and keeps its shard.
        gpt.init_weights(world.shard_like)
    scale_weights(gpt, config.optim.transfer)
    return gpt, wrapped


def prove_run(run: TrainingRun) -> None:
    """Run the model as configured if its gradient is right on this GPU, else in plain torch: see
    runtime/proof.py."""
    config = run.config
    world = run.world
    micro_batches = local_micro_batches(
        run.batches, run.state.step, run.group, run.micro_batch, world.device
    )
    token_ids, targets = micro_batches[0]
    chunk = config.runtime.sequence_chunk
    if run.group.size > 1:  # a state goes from half to half as from process to process
        chunk = ceil_div(config.seq_len, 2 * run.group.size)
    options = {
        "runtime": config.runtime.model_dump(mode="json"),
        "documents": run.gpt.eot_id is not None,
        "sequences, tokens": world.exchange(list(token_ids.shape))[0],
    }
    stored = StoredProof(run.gpt, run.compute.dtype, options)
    outcomes = world.exchange(stored.read())
    is_right = outcomes[0]
    if is_right is None or any(outcome != is_right for outcome in outcomes):
        compute = replace(run.compute, sequence_chunk=chunk)
        # With fsdp, no process has the whole model's gradient.
        gpt = _small_model(run) if config.runtime.strategy == "fsdp" else run.gpt
        is_right = prove_micro_batch(gpt, token_ids, targets, compute, world)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one process of each machine
            stored.write(is_right)
    if not is_right:
        use_plain_torch(run.gpt)


def prove_micro_batch(
    gpt: GPT, token_ids: Tensor, targets: Tensor, compute: Compute, world: World
) -> bool:
    """Return whether a model's gradient is right on a micro-batch; with runtime.sequence_chunk, on
    its first two chunks."""
    if compute.sequence_chunk is not None:
        token_ids = token_ids[:, : 2 * compute.sequence_chunk]
        targets = targets[:, : 2 * compute.sequence_chunk]
    if not (targets >= 0).any():  # a question without its answer has no gradient
        targets = token_ids.roll(-1, 1)

    def add_gradients(token_ids: Tensor, targets: Tensor) -> Tensor:
        micro_batches = [(token_ids, targets)]
        loss = accumulate_gradients(SummedLoss(gpt), micro_batches, compute, world, sync=False)
        assert loss is not None
        return loss

    return prove_gradients(gpt, add_gradients, token_ids, targets, compute.dtype, world)


def _small_model(run: TrainingRun) -> GPT:
    """Return a whole model of two blocks, or of as many as the attention pattern has."""
    n_layer = max(2, len(run.config.model.attention_pattern or []))
    with torch.random.fork_rng([]):
        small = GPT(run.config.model.model_copy(update={"n_layer": n_layer}), run.gpt.eot_id)
    small.to(run.world.device, run.compute.param_dtype)
    small.recompute = run.config.runtime.recompute
    compile_blocks(small, should_compile(run.config.runtime, run.compute))
    return small


def _choose_micro_batch(run: TrainingRun) -> int:
    """The configured size, or the largest that fits.

    A run chooses once for each device and number of processes, because rounding depends on it.
    """
    config = run.config
    world = run.world
    state = run.state
    size = config.runtime.micro_batch_on(world.device)
    if size is not None:
        return size
    # Every process must decide the same.
    main_device = world.exchange(device_name(world.device))[0]
    place = f"{world.size} x {main_device}"
    if state.micro_batch is not None and state.micro_batch_for == place:
        return state.micro_batch
    share = config.share_of(world.size)
    size = choose_micro_batch(run.summed_loss, share, config.seq_len, run.compute, world)
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
        **{name: getattr(config, name) for name in FixedSettings.model_fields},
    )
