"""Training with carried state: each sequence of the batch reads a text of its own, from step to step."""

import itertools
import json
import math
import re

import pytest
import ranks
import torch
from alone import open_run
from faults import metrics
from forged import sign
from safetensors.torch import load_file, save_file
from test_resume import assert_same_run
from test_torchrun import assert_same_steps
from torch import Tensor
from torch.utils._pytree import tree_map_only

import trainer.step
from common.settings import UserError
from data.loader import step_windows
from inference.evaluate import EvaluateConfig, run_evaluation
from model.gpt import GPT
from trainer.checkpoint import newest, open_checkpoint
from trainer.loop import fit
from trainer.run import Run

pytestmark = pytest.mark.usefixtures("restored_torch")

CARRIED = {"data.carry_state": True, "runtime.dtype": "float64"}
FLAGSHIP = {"name": "log_space", "product": True, "d_key": 4, "decay": "head", "conv": 4}
MODELS = {
    "flagship": {"model.attention": FLAGSHIP, "model.block": {"name": "mlp", "conv": 4}, "model.position.name": "none"},
    "log_space": {"model.n_layer": 2},
    "signed": {"model.attention": {"name": "log_space_signed"}, "model.position.name": "none"},
    "linear": {
        "model.attention": {"name": "linear", "decay": "head"},
        "model.block": {"name": "glu"},
        "model.position.name": "rotary",
    },
    "windows": {"model.attention": {"name": "sliding_window", "window": [5, 40], "dilation": [1, None]}},
    "ngrams": {"model.ngrams": [1, 3], "model.position.name": "none"},
    "both": {"model.attention_pattern": ["log_space", "sliding_window"], "model.n_layer": 2},
}


def texts(run, steps, rows=4):
    """All tokens that each row reads in so many steps, (rows, steps * seq_len + 1)."""
    places = [step_windows(run.batches, step + 1) for step in range(steps)]
    for row in range(rows):
        for before, after in itertools.pairwise(places):
            assert after[row][0] == before[row][1] - 1, "the next step goes on where this one ended"
    return torch.stack(
        [torch.from_numpy(run.batches.stream.read(places[0][row][0], places[-1][row][1])) for row in range(rows)]
    )


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_steps_are_the_forward_pass_of_the_whole_text_without_its_gradients(tiny, changes, documents):
    """With a learning rate of nearly 0: a step's loss is that of its stretch, given all text before it."""
    sizes = {"seq_len": 65, "batch_tokens": 4 * 65, "optim.max_lr": 1e-300, "optim.grad_clip": None}
    run = open_run(tiny(CARRIED | changes | sizes | {"data.document_reset": documents}))
    ids, gpt = texts(run, 3), run.gpt
    assert (ids[:, 65:] == run.tokenizer.eot_id).any()
    assert (gpt.eot_id is None) != documents
    state = tree_map_only(Tensor, Tensor.detach, gpt.features(ids[:, :130], return_state=True)[1])
    last, _ = gpt.summed_loss(ids[:, 130:-1], ids[:, 131:], state, return_state=True)
    wanted = torch.autograd.grad(last / 260, list(gpt.parameters()))
    with torch.no_grad():
        whole = gpt.token_losses(ids[:, :-1], ids[:, 1:])
    gradients, step = [], run.optimizer.step
    run.optimizer.step = lambda: (gradients.append([p.grad.clone() for p in gpt.parameters()]), step())
    for losses in whole.split(65, dim=1):
        assert run.train_step()["loss"] == pytest.approx(float(losses.mean()), rel=1e-12)
    for ours, theirs in zip(gradients[-1], wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_without_carried_state_the_losses_differ(tiny):
    """So the test above would see a state that is not carried."""
    run = open_run(tiny(CARRIED | {"optim.max_lr": 1e-300}))
    ids = texts(run, 2)
    run.train_step()
    with torch.no_grad():
        alone = float(run.gpt.token_losses(ids[:, 16:-1], ids[:, 17:]).mean())
    assert abs(run.train_step()["loss"] - alone) > 1e-6


def test_a_row_that_comes_to_the_end_of_the_corpus_begins_again_without_a_state(tiny):
    config = tiny(
        CARRIED | {"seq_len": 256, "batch_tokens": 4 * 256, "optim.max_lr": 1e-300, "data.document_reset": True}
    )
    run = open_run(config)
    n = run.batches.n_windows
    begins = [step for step in range(1, n + 1) if (run.batches.starts(step) == 0).any()]
    assert len(begins) == 4, "each row comes there once"
    run.state = run.state.model_copy(update={"step": begins[0] - 1})
    run.train_step()
    row = run.batches.starts(run.step).tolist().index(0)
    assert step_windows(run.batches, run.step + 1)[row][0] == 0
    seen = []
    run.gpt.summed_loss = lambda ids, targets, state, want: (
        seen.append(state) or GPT.summed_loss(run.gpt, ids, targets, state, want)
    )
    run.train_step()
    finite = [bool(layer.isfinite().any()) for state in seen for layer in state.layers[0].log_z]
    assert finite == [each != row for each in range(4)]


@pytest.mark.parametrize("name", ["flagship", pytest.param("windows", marks=pytest.mark.slow)])
def test_a_run_goes_on_to_the_bit(tiny, tmp_path, name):
    changes = (
        CARRIED | MODELS[name] | {"max_steps": 8, "runtime.dtype": "float32", "checkpoint.every": 4, "eval.every": 8}
    )
    fit(tiny(changes | {"run_dir": tmp_path / "whole"}))
    fit(tiny(changes | {"stop_at": 5}))
    fit(tiny(changes))
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    first, second = (load_file(newest(tmp_path / run) / "random.safetensors") for run in ("whole", "run"))
    assert len(first) > 1
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("micro_batch", [1, 3, 4, "auto"])
def test_micro_batches_change_rounding_only(tiny, micro_batch):
    two, other = (
        open_run(tiny(CARRIED | MODELS["flagship"] | {"runtime.micro_batch": size})) for size in (2, micro_batch)
    )
    for _ in range(3):
        lines = [run.train_step() for run in (two, other)]
        for key in ("loss", "grad_norm"):
            assert lines[0][key] == pytest.approx(lines[1][key], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_any_number_of_processes_takes_the_same_steps_and_resumes(tiny_args, tmp_path, strategy):
    """3 processes have 4 sequences unevenly; fsdp has them evenly."""
    args = [*tiny_args, "data.carry_state=true", "data.document_reset=true", "runtime.dtype=float64", "max_steps=12"]
    several = 2 if strategy == "fsdp" else 3
    for stop, processes in ((12, 1), (5, several), (8, 1), (12, 2)):
        name = "whole" if stop == 12 and processes == 1 else "elastic"
        how = [f"runtime.strategy={strategy}"] if processes > 1 else []
        for result in ranks.run(processes, "train.py", *args, f"run_dir={tmp_path / name}", f"stop_at={stop}", *how):
            assert result.status == 0, result.err
    assert_same_steps(tmp_path / "whole", tmp_path / "elastic", tolerance=1e-9)
    first, second = (load_file(newest(tmp_path / run) / "random.safetensors") for run in ("whole", "elastic"))
    carried = [key for key in first if key.startswith("carried.")]
    assert len(carried) == 3
    for key in carried:
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(command, tiny_args, tmp_path):
    args = [*tiny_args, "data.carry_state=true", "runtime.dtype=float64", "runtime.micro_batch=1"]
    assert command("train", *args, f"run_dir={tmp_path / 'one'}").status == 0
    assert [result.status for result in ranks.run(2, "train.py", *args)] == [0, 0]
    assert_same_steps(tmp_path / "one", tmp_path / "run", tolerance=1e-9)


def bad_at(monkeypatch, step, times=1):
    """Make the loss of a step, counted from 1, not a number, so many times."""
    left, step_of, forward = {step: times}, Run._step, trainer.step.SummedLoss.forward
    now = {}

    def stepping(run):
        now["bad"] = left.get(run.step + 1, 0) > 0
        if now["bad"]:
            left[run.step + 1] -= 1
        return step_of(run)

    def bad(*args):
        loss, state = forward(*args)
        return loss * (float("nan") if now["bad"] else 1.0), state

    monkeypatch.setattr(Run, "_step", stepping)
    monkeypatch.setattr(trainer.step.SummedLoss, "forward", bad)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_step_after_a_bad_one_goes_on_from_the_state_before_it(tiny, monkeypatch, policy):
    """Both policies, and a run that was stopped in between, end alike."""
    config = tiny(CARRIED | {"runtime.on_nonfinite": policy, "optim.max_lr": 1e-300, "max_steps": 5})
    bad_at(monkeypatch, 3)
    fit(config)
    lines = {line["step"]: line["loss"] for line in metrics(config.run_dir) if "loss" in line}
    assert sorted(lines) == [1, 2, 4, 5]
    ids = texts(open_run(tiny(CARRIED | {"run_dir": config.run_dir.parent / "other"})), 5)
    gpt = open_run(tiny(CARRIED | {"run_dir": config.run_dir.parent / "other"})).gpt
    with torch.no_grad():
        state = gpt.features(ids[:, :32], return_state=True)[1]
        losses, _ = gpt.token_losses(ids[:, 48:-1], ids[:, 49:], state, return_state=True)
    assert lines[4] == pytest.approx(float(losses[:, :16].mean()), rel=1e-12)
    assert lines[5] == pytest.approx(float(losses[:, 16:].mean()), rel=1e-12)


@pytest.mark.parametrize("batches", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_evaluation_reads_each_stream_in_order(tiny, batches):
    """Against one pass over each stretch of the split; eval.py measures what training did."""
    config = tiny(CARRIED | {"eval.batches": batches, "max_steps": 3, "runtime.micro_batch": 3})
    fit(config)
    run = open_run(config)
    val = run.windows.stream
    length = 16 * (batches or math.ceil(math.ceil((val.n_tokens - 1) / 16) / 4))
    begins = range(0, val.n_tokens - 1, length) if batches is None else [run.windows.span(row)[0] for row in range(4)]
    assert len(begins) == 4
    nats = 0.0
    for begin in begins:
        ids = torch.from_numpy(val.read(begin, min(begin + length + 1, val.n_tokens))).unsqueeze(0)
        with torch.no_grad():
            nats += float(run.gpt.token_losses(ids[:, :-1], ids[:, 1:]).sum())
    tokens = val.n_tokens - 1 if batches is None else 4 * length
    last = metrics(config.run_dir)[-1]
    assert last["val_loss"] == pytest.approx(nats / tokens, rel=1e-12)

    runtime = {"device": "cpu", "dtype": "float64"}
    raw = {"checkpoint": str(config.run_dir), "batches": batches, "micro_batch": 2, "runtime": runtime, "contexts": []}
    run_evaluation(EvaluateConfig(**raw))
    result = json.loads((config.run_dir / "eval.json").read_text())
    assert (result["tokens"], result["loss"]) == (tokens, pytest.approx(last["val_loss"], rel=1e-12))
    assert result["by_position"][-1]["stop"] == length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.attention": {"name": "softmax"}},
            "attention: data.carry_state=true needs a state of one size.*linear, ",
        ),
        (
            {"model.attention_pattern": ["projection"]},
            "attention_pattern.0: data.carry_state=true needs .* of projection",
        ),
        ({"model.attention": {"name": "strided"}}, "that of strided grows"),
        ({"model.attention": {"name": "fixed"}}, "that of fixed grows"),
        ({"model.attention": {"name": "longformer", "window": 4, "n_global": 2}}, "does not work with longformer"),
        ({"model.position": {"name": "learned", "max_len": 16}}, "position: data.carry_state=true needs more than 16"),
        ({"data.mixture": {"few": 1}}, "data: carry_state=true reads the corpus in order"),
    ],
)
def test_what_cannot_be_carried_is_refused_in_one_line(tiny, changes, message):
    with pytest.raises(UserError, match=message) as error:
        tiny(CARRIED | changes)
    assert "\n" not in str(error.value)


def test_a_corpus_with_less_text_than_sequences_is_refused(tiny):
    config = tiny(CARRIED | {"seq_len": 8192, "batch_tokens": 64 * 8192})
    with pytest.raises(UserError, match=r"gives each of 64 sequences a text of its own.*lower batch_tokens or seq_len"):
        open_run(config)


def test_a_run_cannot_change_its_mind_and_a_state_of_other_shape_is_refused(tiny):
    fit(tiny({"data.carry_state": True, "stop_at": 2}))
    with pytest.raises(UserError, match=r"another run: data.carry_state=False \(checkpoint: True\)"):
        fit(tiny({"stop_at": 4}))
    path = newest(tiny().run_dir)
    file = path / "random.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if re.fullmatch(r"carried\.layers\.0\.log_s", key))
    save_file(tensors | {name: tensors[name][:3].clone()}, file)
    sign(path)
    with pytest.raises(
        UserError, match=r"carried.layers.0.log_s has the shape \[3, 2, 8, 8\], must have \[4, 2, 8, 8\]"
    ):
        fit(tiny({"data.carry_state": True, "stop_at": 4}))
    assert open_checkpoint(path, files=()).state.step == 2
