"""init_from: a run begins with the weights of a checkpoint, on any dataset of the same tokenizer."""

import shutil

import pytest
import torch
from alone import open_run
from test_torchrun import assert_same_checkpoint

from common.settings import UserError
from runtime.checkpoint import load_model, open_checkpoint
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")


def test_a_run_begins_with_the_weights_of_another(tiny, make_dataset, tmp_path, monkeypatch, capsys):
    fit(tiny())
    monkeypatch.setenv("HOME", str(tmp_path))
    first, _ = load_model("~/run")
    other = {
        "run_dir": str(tmp_path / "other"),
        "dataset_dir": str(make_dataset(seed=1)),
        "optim": {"name": "muon", "max_lr": 1e-2, "transfer": {"n_embd": 8, "n_layer": 1}},
        "seq_len": 8,
        "seed": 2,
        "init_from": str(tmp_path / "run"),
    }
    capsys.readouterr()
    weights = open_run(tiny(other)).gpt.state_dict()
    assert f"starting from the weights of {tmp_path}/run/checkpoints/step-00000006" in capsys.readouterr().out
    assert weights.keys() == first.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in first.state_dict().items())

    fit(tiny(other | {"stop_at": 2}))
    shutil.rmtree(tmp_path / "run")  # a resumed run does not need it any more
    with pytest.raises(UserError, match=r"another run: init_from=null \(checkpoint: .*run\); use the checkpoint"):
        fit(tiny(other | {"init_from": None}))
    fit(tiny(other))
    assert open_checkpoint(tmp_path / "other").state.step == 6
    changed = load_model(tmp_path / "other")[0].state_dict()
    assert all(not torch.equal(changed[name], value) for name, value in first.state_dict().items())


def test_what_does_not_fit_is_refused(tiny, make_dataset, rank_file, tmp_path):
    fit(tiny({"stop_at": 2}))
    begun = {"run_dir": str(tmp_path / "begun"), "init_from": str(tmp_path / "run")}
    other = make_dataset(tokenizer={"name": "gpt2", "path": str(rank_file)})
    for changes, message in [
        (
            {"model.n_head": 1, "model.n_layer": 3},
            r"model.n_head=2 \(here: 1\), model.n_layer=1 \(here: 3\); leave out the model",
        ),
        (
            {"dataset_dir": str(other), "model.n_vocab": 260},
            r"with the tokenizer bytes \(n_vocab 257\), and the dataset has gpt2 \(n_vocab 260\): prepare the dataset",
        ),
        ({"init_from": str(tmp_path / "nowhere")}, "nowhere does not exist: give a run directory, or a checkpoint"),
        ({"init_from": "gpt2"}, "init_from=gpt2 does not exist: .*import_gpt2.py .* the same command again resumes"),
    ]:
        with pytest.raises(UserError, match=message):
            fit(tiny(begun | changes))


@pytest.mark.slow
def test_the_model_need_not_be_given(tiny_args, command, tmp_path):
    """It is that of init_from, except for what is given, whatever the experiment or the default is."""
    assert command("train", *tiny_args, "stop_at=2").status == 0
    small = [arg for arg in tiny_args if not arg.startswith(("model", "run_dir"))]
    begun = ["train", *small, "experiment=quickstart", f"run_dir={tmp_path / 'begun'}", f"init_from={tmp_path / 'run'}"]
    for name in ("run", "run/checkpoints/step-00000002", "run/checkpoints/latest"):
        given = f"init_from={tmp_path / name}"
        assert "leave out the model" in command(*begun[:-1], given, "model=flagship_1m").err
    assert "has another model: model.n_embd=16 (here: 8); leave" in command(*begun, "model.n_embd=8").err
    assert command(*begun, "model.n_layer=1", "stop_at=2").status == 0
    models = [load_model(tmp_path / run)[0].config for run in ("run", "begun")]
    assert models[0] == models[1]
    shutil.rmtree(tmp_path / "run")  # the run has its own model now
    assert command(*begun).status == 0
    assert open_checkpoint(tmp_path / "begun").state.step == 6


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_all_processes_begin_with_them(train_in_processes, chat_dir, chat):
    """After a step, two processes have the model that one has, also where it gets rows for markers."""
    first = train_in_processes("first", 1)
    options = [f"init_from={first}", "seed=5", "stop_at=1"]
    options += (
        [f"dataset_dir={chat_dir}", "data.loss=answers", "model.pad_vocab=30", "seq_len=64", "batch_tokens=128"]
        if chat
        else []
    )
    alone = train_in_processes("alone", 1, *options)
    shared = train_in_processes("shared", 2, "runtime.strategy=fsdp", *options)
    at = "checkpoints/step-00000001"
    assert_same_checkpoint(alone / at, shared / at, tolerance=1e-9)
