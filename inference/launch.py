"""eval.py on this machine: in one process a core, or in this one."""

from inference.evaluate import EvaluateConfig, run_evaluation
from runtime.checkpoint import MODEL_FILES, open_checkpoint
from runtime.launch import choose_processes, given_processes, launch_processes

_PLENTY = 10**9
"""Windows, and tokens: a process that gets none costs little, as it is a fork."""


def launch_evaluation(config: EvaluateConfig) -> None:
    """Like `run_evaluation`, in as many processes as runtime.processes asks for."""
    n = given_processes(config.runtime)
    if n is None:
        checkpoint = open_checkpoint(config.checkpoint, MODEL_FILES)
        # All processes open this one, and none warns of damaged ones again.
        config = config.model_copy(update={"checkpoint": checkpoint.path})
        state = checkpoint.state
        at_once = config.micro_batch * min(config.seq_len or state.seq_len, 4096)
        n = choose_processes(state.model, _PLENTY, _PLENTY, at_once)
    launch_processes(n, run_evaluation, config)
