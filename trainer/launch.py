"""train.py on this machine: in one process a core, or in this one."""

import traceback
from typing import NamedTuple

import torch

from common.console import copy_lines_to, log_line
from common.files import read_json
from common.settings import JsonDict, UserError, line_for
from data.tokenizers.build import Tokenizer
from model.gpt import GPT
from runtime.checkpoint import load_model
from runtime.launch import choose_processes, given_processes, launch_processes, usable_cores
from trainer.config import TrainConfig
from trainer.loop import fit
from trainer.records.metrics import read_metrics
from trainer.records.run_dir import LOG
from trainer.signals import StopSignals
from trainer.start import open_data


def launch_training(config: TrainConfig) -> float | None:
    """Like `fit`, in as many processes as runtime.processes asks for."""
    with copy_lines_to(config.run_dir / LOG):
        try:
            n = n_processes(config)
            if n == 1:
                return fit(config)
            config.tracker.import_packages()
            with StopSignals(leads=True):
                return launch_processes(n, fit, config)
        except Exception as error:
            log_line(f"error: {line_for(error) or traceback.format_exc()}")
            raise


class Trained(NamedTuple):
    """A trained model, on the CPU."""

    gpt: GPT
    tokenizer: Tokenizer
    metrics: list[JsonDict]
    """The lines of metrics.jsonl."""


def train_here(config: TrainConfig) -> Trained:
    """Like `fit`, in this process alone.

    Raises:
        KeyboardInterrupt: a signal stopped the run, which is saved.
    """
    try:
        fit(config)
    except SystemExit:
        raise KeyboardInterrupt from None
    gpt, tokenizer = load_model(config.run_dir)
    return Trained(gpt, tokenizer, list(read_metrics(config.run_dir / "metrics.jsonl")))


def n_processes(config: TrainConfig) -> int:
    """The number of processes that train; 1: this one alone, with threads."""
    given = given_processes(config.runtime)
    if given is not None:
        return given
    if config.runtime.context_parallel > 1 or config.runtime.strategy == "fsdp":
        return 1  # or an error will say what they need
    cores = usable_cores()
    try:  # a resumed run keeps its number: rounding depends on it
        before = read_json(config.run_dir / "config.json")["environment"]["processes"]
    except (UserError, KeyError, TypeError):
        before = None
    if before in range(1, cores + 1):
        return int(before)
    if config.epochs is not None:
        config, *_ = open_data(config)
    micro_batch = config.runtime.micro_batch_on(torch.device("cpu")) or 1
    at_once = min(micro_batch, config.share_of(cores)) * config.seq_len
    kept = at_once * config.model.n_layer
    return choose_processes(config.model, config.batch_size, config.tokens(1), kept)
