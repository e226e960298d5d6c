"""train.py on this machine: in one process a core, or in this one."""

import torch

from common.files import read_json
from common.settings import UserError
from model.gpt import GPT
from runtime.launch import choose_processes, free_memory, launch, may_launch, usable_cores
from trainer.config import TrainConfig
from trainer.loop import fit
from trainer.signals import StopSignals
from trainer.start import open_data

_BYTES_PER_PARAMETER = 16
"""Weight, gradient, and two numbers of the optimizer, in float32."""
_ACTIVATIONS = 40
"""Numbers that a layer keeps for the backward pass, for each feature of each token."""


def launch_training(config: TrainConfig) -> float | None:
    """Like `fit`, in as many processes as runtime.processes asks for."""
    n = n_processes(config)
    if n == 1:
        return fit(config)
    config.tracker.import_packages()
    with StopSignals(leads=True):
        return launch(n, fit, config)


def n_processes(config: TrainConfig) -> int:
    """The number of processes that train; 1: this one alone, with threads."""
    runtime = config.runtime
    if not may_launch():
        return 1
    if runtime.processes != "auto":
        return runtime.processes
    uses_gpu = runtime.device != "cpu" and torch.cuda.is_available()
    cannot_share = runtime.context_parallel > 1 or runtime.strategy == "fsdp"
    if uses_gpu or cannot_share or runtime.micro_batch == "auto":
        return 1
    cores = usable_cores()
    try:  # a resumed run keeps its number: rounding depends on it
        before = read_json(config.run_dir / "config.json")["environment"]["processes"]
    except (UserError, KeyError, TypeError):
        before = None
    if before in range(1, cores + 1):
        return int(before)
    if config.epochs is not None:
        config, *_ = open_data(config)
    with torch.device("meta"):
        gpt = GPT(config.model)
    at_once = min(runtime.micro_batch, config.share_of(cores)) * config.seq_len
    activations = 4 * _ACTIVATIONS * config.model.n_layer * config.model.n_embd * at_once
    bytes_each = max(_BYTES_PER_PARAMETER * gpt.n_params(), activations)
    tokens = config.tokens(1)
    return choose_processes(cores, config.batch_size, tokens, bytes_each, free_memory())
