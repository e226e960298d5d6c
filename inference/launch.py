"""eval.py on this machine: in one process a core, or in this one."""

import torch

from data.shards import read_manifest
from inference.evaluate import EvaluateConfig, run_evaluation
from model.gpt import GPT
from runtime.checkpoint import open_checkpoint
from runtime.launch import choose_processes, free_memory, launch, may_launch, usable_cores
from runtime.state import TrainState

_WORTH = 1e11
"""Floating-point operations for which starting processes is worth it: a few seconds."""
_CONTEXT_TOKENS = 65_536
"""Tokens of a passage of the longest context, if eval.py chooses contexts."""
_ACTIVATIONS = 40
"""Numbers that a forward pass holds for each feature of each token."""


def launch_evaluation(config: EvaluateConfig) -> None:
    """Like `run_evaluation`, in as many processes as runtime.processes asks for."""
    launch(n_processes(config), run_evaluation, config)


def n_processes(config: EvaluateConfig) -> int:
    """The number of processes that evaluate; 1: this one alone, with threads."""
    runtime = config.runtime
    if not may_launch():
        return 1
    if runtime.processes != "auto":
        return runtime.processes
    if runtime.device != "cpu" and torch.cuda.is_available():
        return 1
    state = open_checkpoint(config.checkpoint, files=(), key="checkpoint").state
    n_tokens = _tokens(config, state)
    with torch.device("meta"):
        n_params = GPT(state.model).n_params()
    if 2 * n_params * n_tokens < _WORTH:
        return 1
    seq_len = config.seq_len or state.seq_len
    at_once = config.micro_batch * min(seq_len, 4096)
    bytes_each = 4 * max(n_params, _ACTIVATIONS * state.model.n_embd * at_once)
    n_windows = n_tokens // seq_len
    return choose_processes(usable_cores(), n_windows, n_tokens, bytes_each, free_memory())


def _tokens(config: EvaluateConfig, state: TrainState) -> int:
    """About how many tokens go through the model."""
    manifest = read_manifest(config.dataset_dir or state.own_dataset())
    all_tokens = manifest.splits[config.split].total.tokens
    n_batches = config.batches or state.eval_batches
    n_tokens = all_tokens
    if isinstance(n_batches, int):
        n_tokens = min(all_tokens, n_batches * state.batch_tokens)
    if config.stride is not None:
        n_tokens *= (config.seq_len or state.seq_len) // config.stride
    contexts = [_CONTEXT_TOKENS] * 4 if config.contexts is None else config.contexts
    passages = all_tokens
    if config.context_windows is not None and contexts:
        passages = min(all_tokens, config.context_windows * max(contexts))
    return n_tokens + (len(contexts) + 1) * passages if contexts else n_tokens
