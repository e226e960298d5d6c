"""init_from: a run begins with the weights of a checkpoint, on any dataset of the same tokenizer."""

import shutil

import pytest
import torch
from test_fsdp import assert_same_checkpoint
from test_fsdp import train as train_in_processes  # noqa: F401 (a fixture)

from common.settings import UserError
from trainer.checkpoint import load_model, open_checkpoint
from trainer.distributed import World
from trainer.loop import fit
from trainer.run import Run
from trainer.runtime import open_runtime

pytestmark = pytest.mark.usefixtures("restored_torch")


def weights_at_the_start(config):
    runtime = open_runtime(config.runtime)
    return Run(config, runtime, World(runtime.device)).gpt.state_dict()


@pytest.mark.parametrize("average", [None, 0.5])
def test_a_run_begins_with_the_weights_of_another(tiny, make_dataset, tmp_path, average):
    fit(tiny({"average": average}))
    first, _ = load_model(tmp_path / "run")
    other = {
        "run_dir": str(tmp_path / "other"),
        "dataset_dir": str(make_dataset(seed=1)),
        "optim": {"name": "muon", "max_lr": 1e-2, "transfer": {"n_embd": 8, "n_layer": 1}},
        "seq_len": 8,
        "seed": 2,
        "init_from": str(tmp_path / "run"),
    }
    weights = weights_at_the_start(tiny(other))
    assert weights.keys() == first.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in first.state_dict().items())

    fit(tiny(other | {"stop_at": 2}))
    shutil.rmtree(tmp_path / "run")  # a resumed run does not need it any more
    fit(tiny(other))
    assert open_checkpoint(tmp_path / "other").state.step == 6
    changed = load_model(tmp_path / "other")[0].state_dict()
    assert all(not torch.equal(changed[name], value) for name, value in first.state_dict().items())


def test_what_does_not_fit_is_refused(tiny, make_dataset, rank_file, tmp_path):
    fit(tiny({"stop_at": 2}))
    begun = {"run_dir": str(tmp_path / "begun"), "init_from": str(tmp_path / "run")}
    other = make_dataset(tokenizer={"name": "gpt2", "path": str(rank_file)})
    for changes, message in [
        ({"model.n_layer": 2}, r"has another model: model.n_layer=1 \(here: 2\); give the same settings$"),
        (
            {"dataset_dir": str(other), "model.n_vocab": 260},
            "was trained with the tokenizer bytes, and the dataset gpt2: prepare the dataset with the model's",
        ),
        (
            {"init_from": str(tmp_path / "nowhere")},
            "nowhere does not exist: give a run directory, or a checkpoint in it",
        ),
    ]:
        with pytest.raises(UserError, match=message) as error:
            fit(tiny(begun | changes))
        assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_processes_begin_with_them(train_in_processes, strategy):  # noqa: F811
    """After a step, two processes have the model that one has."""
    first = train_in_processes("first", 1)
    options = f"init_from={first}", "seed=5", "stop_at=1"
    alone = train_in_processes("alone", 1, *options)
    shared = train_in_processes("shared", 2, f"runtime.strategy={strategy}", *options)
    at = "checkpoints/step-00000001"
    assert_same_checkpoint(alone / at, shared / at, tolerance=1e-9)
