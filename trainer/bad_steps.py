"""Steps whose loss or gradient is not finite: they halt the run, or are skipped."""

from common.console import warn
from common.settings import JsonDict, UserError
from trainer.start import TrainingRun


def skip_step(run: TrainingRun, reason: str) -> JsonDict:
    """Skip a bad step, and return its line; UserError: the run must halt (runtime.on_nonfinite)."""
    config = run.config
    step = run.state.step + 1
    # Name the first gradients that are not finite. All processes gather each of them.
    not_finite = []
    for name, p in run.gpt.named_parameters():
        if p.grad is not None and not run.world.unshard(p.grad).isfinite().all():
            not_finite.append(name)
    if not_finite:
        reason = f"{reason} (first gradients not finite: {', '.join(not_finite[:3])})"
    run.optimizer.zero_grad()
    n_before = 0  # bad steps in a row before this one
    while step - n_before - 1 in run.state.skipped_steps:
        n_before += 1
    halts = config.runtime.on_nonfinite == "halt"
    if halts or n_before >= config.runtime.max_bad_steps:
        often = "" if halts else f", after {n_before} bad steps in a row"
        remedy = f"lower optim.max_lr={config.optim.max_lr:g}, or see runtime.on_nonfinite"
        remedy += ", and start again"
        hint = f"scripts/inspect_dataset.py run_dir={config.run_dir} step={step} shows what it read"
        raise UserError(
            f"step {step}: {reason}{often}; the weights are unchanged: {remedy}; {hint}"
        )
    warn(f"skipping step {step}: {reason}")
    run.update(step=step, skipped_steps={**run.state.skipped_steps, step: reason})
    return run.line(event="skipped", reason=reason)
