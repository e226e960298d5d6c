"""The running mean of weights: by its definition, in checkpoints, and wherever a model is loaded."""

import contextlib
import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from test_resume import metrics

from common.settings import UserError
from model.gpt import GPT
from runtime.checkpoint import checkpoint_path, open_model
from runtime.distributed import World
from trainer.average import AVERAGE, Average
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")

AVERAGED = {"average": 0.4, "runtime.dtype": "float64"}


def stored(run_dir, step):
    """A checkpoint's weights, and their means."""
    tensors = load_file(checkpoint_path(run_dir, step) / "model.safetensors")
    means = {name.removeprefix(AVERAGE): value for name, value in tensors.items() if name.startswith(AVERAGE)}
    return {name: value for name, value in tensors.items() if not name.startswith(AVERAGE)}, means


def test_exchanged_and_back_no_bit_changes(tiny):
    gpt = GPT(tiny().model)
    average = Average(gpt, 0.5, World(torch.device("cpu")))
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(torch.randn_like(p))
    before = {name: p.clone() for name, p in gpt.named_parameters()}
    means = {name: mean.clone() for name, mean in average.tensors.items()}
    with contextlib.suppress(UserError), average.in_place():
        for name, p in gpt.named_parameters():
            assert torch.equal(p, means[AVERAGE + name])
        raise UserError("an evaluation that fails")
    for name, p in gpt.named_parameters():
        assert torch.equal(p, before[name])
        assert torch.equal(average.tensors[AVERAGE + name], means[AVERAGE + name])


def test_a_run_has_the_same_weights_and_their_means(tiny, tmp_path):
    every = {"checkpoint": {"every": 1, "keep_last": 10}, "runtime.dtype": "float64"}
    fit(tiny(every | AVERAGED))
    fit(tiny(every | {"run_dir": tmp_path / "plain"}))
    expected = {}
    for step in range(1, 7):
        weights, means = stored(tmp_path / "run", step)
        plain, none = stored(tmp_path / "plain", step)
        assert none == {}
        assert plain.keys() == weights.keys()
        assert all(torch.equal(value, plain[name]) for name, value in weights.items())
        share = min(1, 1 / (0.4 * step))
        for name, mean in means.items():
            expected[name] = (1 - share) * expected.get(name, 0) + share * weights[name]
            torch.testing.assert_close(mean, expected[name], rtol=1e-12, atol=1e-15)
    losses = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("run", "plain")]
    assert losses[0] == losses[1]


def test_commands_take_the_averaged_weights_or_the_last(run_of, command):
    run_dir, losses = run_of(AVERAGED), {}
    for given in ((), ("average=true",), ("average=false",)):
        options = "contexts=[]", "batches=4", "runtime.device=cpu", "runtime.dtype=float64"
        result = command("eval", f"checkpoint={run_dir}", *options, *given)
        assert result.status == 0, result.err
        assert ("averaged weights" in result.out) == (given != ("average=false",))
        found = json.loads((run_dir / "eval.json").read_text())
        assert found["average"] == (given != ("average=false",))
        losses[given] = found["loss"]
    assert losses[()] == losses["average=true",] == pytest.approx(metrics(run_dir)[-1]["val_loss"], rel=1e-9)
    assert abs(losses["average=false",] - losses[()]) > 1e-4
    both = open_model(run_dir)
    assert both.identity(average=True) != both.identity(average=False)
    assert {path.name for path in (run_dir / "evals").iterdir()} >= {
        "step-00000006,average=False,batches=4,contexts=none,runtime.dtype=float64.json"
    }


@pytest.mark.parametrize(("before", "now", "said"), [(None, 0.4, "0.4 (checkpoint: null)"), (0.4, None, "null (check")])
def test_averaging_cannot_begin_or_end_within_a_run(run_of, tiny, before, now, said):
    run_of({"average": before})
    with pytest.raises(UserError, match=re.escape(f"average={said}")):
        fit(tiny({"average": now, "max_steps": 8}))


@pytest.mark.parametrize("share", [0, 0.999, math.nan])
def test_a_share_is_not_the_decay_of_other_programs(tiny, share):
    with pytest.raises(UserError, match="average="):
        tiny({"average": share})
