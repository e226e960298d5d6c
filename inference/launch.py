"""eval.py on this machine: in one process a core, or in this one."""

from inference.evaluate import EvaluateConfig, run_evaluation
from runtime.checkpoint import open_checkpoint
from runtime.launch import choose_processes, given_processes, launch

_PLENTY = 10**9
"""Windows, and tokens: a process that gets none costs little, as it is a fork."""


def launch_evaluation(config: EvaluateConfig) -> None:
    """Like `run_evaluation`, in as many processes as runtime.processes asks for."""
    launch(n_processes(config), run_evaluation, config)


def n_processes(config: EvaluateConfig) -> int:
    """The number of processes that evaluate; 1: this one alone, with threads."""
    given = given_processes(config.runtime)
    if given is not None:
        return given
    state = open_checkpoint(config.checkpoint, files=(), key="checkpoint").state
    at_once = config.micro_batch * min(config.seq_len or state.seq_len, 4096)
    return choose_processes(state.model, _PLENTY, _PLENTY, at_once)
