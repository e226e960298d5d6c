"""Options as users type them: what is understood, answered and offered; and a run that continues by its folder."""

import json
import re
from pathlib import Path

import pytest
import yaml
from printed import assert_one_line

from cli import compose
from common.command_line import Items
from common.files import name_of
from common.settings import Settings, decode
from runtime.checkpoint import find_newest
from trainer.config import TrainConfig

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("sample", "checkpoint=x prompt=a prompts_file=b", "give one"),
        ("train", "lr=1e-3", "Could not override 'lr': did you mean 'optim.max_lr'?"),
        ("train", "attention=softmax", "Could not override 'attention': did you mean 'model/attention'?"),
        ("train", "schedule.decay=0.1", "Could not override 'schedule.decay': it is a key of schedule=wsd"),
        ("train", "seed=1,2", "Ambiguous value for argument 'seed=1,2'"),
        ("train", "tracker=[wandb,tensorbord]", "'tracker/tensorbord': did you mean 'tracker=tensorboard'?"),
        ("train", "--config-dir no/such seed=1", "--config-dir no/such is not a folder"),
        (
            "train",
            "run_dir=runs/none",
            "run_dir=runs/none holds no run to continue, or a damaged config.json: give exp",
        ),
        ("train", "dataset_dir=x optim.betas=[0.9]", "config optim.betas.1"),
        ("train", "dataset_dir=x run_dir=.", "run_dir is empty, or this folder: give one for the run"),
    ],
)
def test_a_mistyped_option_is_answered_in_one_line(command, script, arguments, message):
    assert_one_line(command(script, *arguments.split()), message)


@pytest.mark.parametrize(
    ("script", "option", "listed"),
    [
        ("train", "optim=sgd", "'optim/sgd': allowed: adamw, muon"),
        ("train", "model/attention=rope", "'model/attention/rope': allowed: fixed, linear, log_space, "),
        ("train", "model.dropout=0.1", "'model.dropout': allowed: attention"),
        ("train", "foo=1", "'foo': allowed: batch_tokens"),
        ("eval", "foo=1", "'foo': allowed: batches, checkpoint"),
    ],
)
def test_what_is_like_nothing_is_answered_with_all_choices_or_keys(command, script, option, listed):
    answer = command(script, option).err
    assert listed in answer
    assert "did you mean" not in answer


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("train --max_steps=10", "options have no dashes: type max_steps=10\n"),
        ("sample --prompt hello", "options have no dashes: type prompt=hello\n"),
        ("train learning_rate=1e-3", "type optim.max_lr\n"),
        ("train batch_size=8", "batch_tokens is a step's size in tokens, runtime.micro_batch sequences at once\n"),
        ("train block_size=8", "type seq_len\n"),
        ("train config/x.py", "config/x.py is not KEY=VALUE: type experiment=NAME, with one of chat, "),
        ("train quickstart", "quickstart is not KEY=VALUE: type experiment=quickstart\n"),
        ("sample runs/notes", "runs/notes is not KEY=VALUE: type checkpoint=runs/notes\n"),
        ("train dataset_dir=x model.attention=softmax", "model.attention is a group: type model/attention=softmax\n"),
        ("train", "for example, python train.py experiment=quickstart run_dir=runs/demo\n"),
        ("train experiment=quickstart dataset_dir=no", "prepare_data.py data=stdlib tokenizer=bytes out_dir=no\n"),
        ("train dataset_dir=x optim.grad_clip=0", "grad_clip=0: Input should be greater than 0; null: no clipping\n"),
        ("train dataset_dir=x eval.every=0", "greater than or equal to 1; null: only the schedule's last step, "),
        ("train dataset_dir=x checkpoint.every=0", "greater than or equal to 1; null: only the last step, "),
        ("sample checkpoint=x top_k=0", "greater than or equal to 1; null: all\n"),
        ("scripts/plan device=a100", "did you mean 'a100-40gb' or 'a100-80gb'?\n"),
    ],
)
def test_a_habit_is_answered_with_what_to_type_here(command, typed, advice):
    script, *options = typed.split()
    assert advice in command(script, *options).err


def test_null_is_not_offered_where_a_value_must_be_given(command):
    assert command("train", "dataset_dir=x", "seq_len=0").err.endswith("greater than or equal to 1\n")


def test_the_folder_of_a_job_is_one_item_of_a_list(tmp_path):
    class Options(Settings):
        folders: Items[Path]

    job = tmp_path / "optim.max_lr=0.001,seed=1"
    assert decode(Options, {"folders": str(job)}).folders != [job]
    job.mkdir()
    assert decode(Options, {"folders": str(job)}).folders == [job]
    assert decode(Options, {"folders": f"[[{job}],{tmp_path}]"}).folders == [job, tmp_path]
    assert decode(Options, {"folders": f"[{job}],[{job}2]"}).folders == [job, Path(f"{job}2")]
    assert decode(Options, {"folders": "[[~/a],~/b]"}).folders == [Path.home() / "a", Path.home() / "b"]


def test_a_sweep_of_one_job_says_so_and_has_no_folder_for_it(command, dataset_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.launch.fit", lambda config: found.append(config.run_dir))
    found = []
    result = command("train", "-m", f"dataset_dir={dataset_dir}", f"run_dir={tmp_path / 'run'}", "seed=3")
    assert "-m with one value for every key runs one job: write seed=1,2 for several" in result.out
    assert found == [tmp_path / "run"]


def test_names_are_safe_and_differ():
    assert name_of(["a=1", "b=x"]) == "a=1,b=x"
    assert name_of(["model/attention=softmax"]) == "model.attention=softmax"
    names = [name_of([text]) for text in ("a=[b]", "a=(b)", "a=b" * 100, "a=b" * 101)]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[\w.,=+-]{1,190}", name) for name in names)


# ----- train.py run_dir=X


def test_a_run_goes_on_by_its_folder_alone(command, tiny_args, tmp_path):
    run = tmp_path / "run"
    assert command("train", *tiny_args, "schedule=wsd", "schedule.warmup_steps=2", "stop_at=2").status == 0
    before = json.loads((run / "config.json").read_text())["config"]
    result = command("train", f"run_dir={run}")
    assert (result.status, result.err) == (0, "")
    assert find_newest(run).name == "step-00000006"
    assert json.loads((run / "config.json").read_text())["config"] == before | {"stop_at": None}
    result = command("train", f"run_dir={run}", "max_steps=8", "schedule.decay=0.5", "eval.every=2")
    said = re.findall(r"changed: (\S+)", result.out)
    assert said == ["eval.every=2", "max_steps=8", "schedule.decay=0.5"]
    assert find_newest(run).name == "step-00000008"


@pytest.fixture
def resume(command, tmp_path, monkeypatch):
    """Continues the run of these settings by its folder, without training; returns the answer and the configuration."""

    def run(settings, *options):
        found = []
        monkeypatch.setattr("trainer.launch.fit", found.append)
        (tmp_path / "old").mkdir(exist_ok=True)
        (tmp_path / "old" / "config.json").write_text(json.dumps({"config": settings}))
        result = command("train", f"run_dir={tmp_path / 'old'}", *options)
        return result.err or found[0]

    return run


def test_stored_names_of_groups_are_files_of_ours_and_stored_values_are_data(resume):
    settings = compose("train", ["dataset_dir=x", "schedule=cosine", "checkpoint.every=3"]) | {"forgotten": {"key": 1}}
    config = resume(settings, "seed=5")
    assert (config.seed, config.checkpoint.every, config.schedule.name) == (5, 3, "cosine")
    settings["checkpoint"]["every"] = "${seed}"
    assert "config checkpoint.every='${seed}'" in resume(settings)
    settings["schedule"]["name"] = "../../strange"
    assert "Input tag '../../strange' found using 'name'" in resume(settings)


def test_a_run_keeps_its_trackers(resume):
    settings = compose("train", ["dataset_dir=x"])
    own = settings | {"tracker": {"wandb": {"every": 7, "mode": "offline", "project": "mine"}, "tensorboard": None}}
    wandb = resume(own).tracker.wandb
    assert (wandb.every, wandb.mode, wandb.project) == (7, "offline", "mine")
    given = resume(own, "tracker.wandb.every=5").tracker
    assert (given.wandb.every, given.wandb.mode, given.tensorboard) == (5, "offline", None)
    assert resume(own, "tracker=local").tracker.wandb is None
    both = settings | {"tracker": {"wandb": {"mode": "offline"}, "tensorboard": {"every": 4}}}
    tracker = resume(both, "tracker.tensorboard.every=5").tracker
    assert (tracker.wandb.mode, tracker.tensorboard.every) == ("offline", 5)


def test_a_group_that_is_given_replaces_the_runs_subgroups(resume):
    own = ["model/attention=sliding_window", "model/position=learned", "optim=muon"]
    config = resume(compose("train", ["dataset_dir=x", *own]), "model=softmax_1m")
    fresh = ["dataset_dir=x", "model=softmax_1m", "model.n_vocab=50257"]  # its vocabulary is that of its data
    assert config.model == decode(TrainConfig, compose("train", fresh)).model
    assert config.optim.name == "muon"


def test_what_is_shown_is_what_would_be_trained(command, tmp_path):
    settings = compose("train", ["dataset_dir=x", "schedule=wsd", "seed=9"])
    (tmp_path / "config.json").write_text(json.dumps({"config": settings | {"stop_at": 3}}))
    shown = yaml.safe_load(command("train", "--cfg", "job", f"run_dir={tmp_path}", "max_steps=7").out)
    assert shown == settings | {"run_dir": str(tmp_path), "max_steps": 7}
    for options in ([], [f"run_dir={tmp_path / 'new'}"]):
        assert yaml.safe_load(command("train", "--cfg", "job", *options).out)["dataset_dir"] == "???"


# ----- a schedule that does not fit


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "wsd", "constant"])
@pytest.mark.slow
def test_a_warm_up_that_does_not_fit_is_a_tenth_of_the_run(schedule):
    def factors(warmup_steps):
        options = ["dataset_dir=x", f"schedule={schedule}", f"schedule.warmup_steps={warmup_steps}"]
        config = decode(TrainConfig, compose("train", [*options, "max_steps=100"]))
        return [config.schedule.factor(step, 100) for step in range(100)]

    assert factors(200) == factors(10)


# ----- what is shown


@pytest.mark.parametrize(
    "name", ["train", "eval", "sample", *(f"scripts/{x}" for x in ("prepare_data", "plan", "serve", "lm_eval"))]
)
def test_every_key_has_its_comment(command, name):
    shown = command(name, "--cfg", "job").out
    raw = yaml.safe_load(shown)
    assert raw
    bare = [line for line in shown.splitlines() if "# " not in line and not re.match(r"( *)- |( *)\w+:$", line)]
    assert bare == []
