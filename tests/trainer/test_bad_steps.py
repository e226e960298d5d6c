"""A loss or gradient that is not finite, on any process, never reaches the weights."""

import pytest
import ranks
import torch
from alone import open_run
from safetensors.torch import load_file
from test_resume import assert_same_run, metrics
from test_torchrun import assert_same_checkpoint

from common.settings import UserError
from model.gpt import GPT
from runtime.checkpoint import find_newest, open_checkpoint
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")


def test_halt_names_gradients_and_leaves_the_run_as_it_was(tiny, tmp_path, factor_at):
    factor_at({5: float("nan")})
    named = r"step 5: loss is nan and .* \(first gradients not finite: embed.weight, [^,]*, [^,]*\)"
    line = rf"{named}; .* lower optim.max_lr.*inspect_dataset.py run_dir=\S+ step=5 "
    with pytest.raises(UserError, match=line):
        fit(tiny())
    assert open_checkpoint(tmp_path / "run").state.step == 4


def reference_without(config, bad):
    """The weights after plain steps on all batches except those of the `bad` steps."""
    run = open_run(config)
    gpt = GPT(config.model).double()
    gpt.load_state_dict(run.gpt.state_dict())
    optimizer = config.optim.build(gpt)
    for step in range(config.max_steps):
        if step + 1 in bad:
            continue
        ids, targets = (torch.from_numpy(x) for x in run.batches.batch(step))
        logits = gpt(ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), config.optim.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = config.optim.max_lr * config.schedule.factor(step, config.max_steps)
        optimizer.step()
        optimizer.zero_grad()
    return dict(gpt.named_parameters())


def test_skip_passes_over_the_batch_and_nothing_else(tiny, tmp_path, factor_at):
    changes = {"runtime.on_nonfinite": "skip", "runtime.dtype": "float64"}
    expected = reference_without(tiny(changes | {"run_dir": tmp_path / "other"}), {3, 4})
    factor_at({3: float("nan"), 4: float("-inf")})
    fit(tiny(changes))
    weights = load_file(find_newest(tmp_path / "run") / "model.safetensors")
    for name, value in expected.items():  # 6 steps of sums in another order
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-9, atol=1e-11)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "val_loss" not in line] == [1, 2, 3, 4, 5, 6]
    assert [(line["step"], line["event"]) for line in lines if "event" in line] == [(3, "skipped"), (4, "skipped")]


def test_a_run_that_skipped_goes_on_to_the_bit(tiny, tmp_path, factor_at):
    changes = {"runtime.on_nonfinite": "skip", "runtime.max_bad_steps": 2}
    factor_at({3: float("nan"), 4: float("nan")})
    fit(tiny(changes | {"run_dir": tmp_path / "whole"}))
    fit(tiny(changes | {"stop_at": 3}))
    fit(tiny(changes))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_too_many_in_a_row_halt_even_across_a_restart(tiny, factor_at):
    changes = {"runtime.on_nonfinite": "skip", "runtime.max_bad_steps": 2}
    factor_at(dict.fromkeys([1, 3, 4, 5], float("nan")))
    fit(tiny(changes | {"stop_at": 4}))
    with pytest.raises(
        UserError, match=r"step 5: loss is nan.*, after 2 bad steps in a row; the weights are unchanged"
    ):
        fit(tiny(changes))


def test_a_gradient_that_is_not_finite_is_named(tiny, monkeypatch):
    build = GPT.__init__

    def building(self, config, *eot_id):
        build(self, config, *eot_id)
        self.norm.bias.register_hook(lambda grad: grad * float("inf"))

    monkeypatch.setattr(GPT, "__init__", building)
    with pytest.raises(
        UserError,
        match=r"step 1: loss is \d.* and the gradient's norm (inf|nan) \(first gradients not finite: norm.bias\);",
    ):
        fit(tiny())


POISONED = ranks.IN_STEP.format(
    when="step == 2 and rank == run.world.size - 1",
    fault="hook = run.gpt.norm.register_forward_hook(lambda *given: hook.remove() or given[2] * float('nan'))",
)


@pytest.mark.parametrize("policy", ["skip", "halt"])
@pytest.mark.slow
def test_what_is_bad_on_one_process_is_bad_on_all(tiny_args, tmp_path, policy):
    args = [*tiny_args, "runtime.micro_batch=1", "runtime.dtype=float64", f"runtime.on_nonfinite={policy}"]
    ranks.run(2, "-c", POISONED, *args, status=int(policy == "halt"))
    if policy != "halt":
        ranks.run(1, "-c", POISONED, *args, f"run_dir={tmp_path / 'alone'}")
        assert_same_checkpoint(find_newest(tmp_path / "alone"), find_newest(tmp_path / "run"), tolerance=1e-9)
