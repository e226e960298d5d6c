"""Options as users type them: what is understood, answered and offered; and a run that continues by its folder."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from printed import assert_one_line

from cli import compose, to_dict
from cli.command import EXTRAS
from cli.options import explained
from common.command_line import Items
from common.files import name_of
from common.settings import CONFIGS, Settings, decode, nearest
from trainer.checkpoint import newest
from trainer.config import TrainConfig

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("sample", "", "config key 'checkpoint' is missing: give it a value, as in checkpoint=..."),
        ("sample", "checkpoint=x prompt=a prompt_file=b", "give one"),
        ("sample", "checkpoint=x top_p=2", "top_p=2: give 1.0 or less"),
        ("sample", "checkpoint=x runtime.compile=true", "unknown config key 'runtime.compile'"),
        ("eval", "checkpoint=/no/such", "checkpoint=/no/such does not exist"),
        ("train", "lr=1e-3", "unknown config key 'lr': did you mean 'optim.max_lr'?"),
        ("train", "wandb=true", "wandb=true: write tracker=wandb"),
        ("train", "tracker=true", "tracker=true does not exist: allowed: local, tensorboard, wandb"),
        ("train", "attention=softmax", "attention=softmax: write model/attention=softmax"),
        ("train", "model.attention=softmx", "write model/attention=softmx"),
        ("train", "model.attention.name=softmax", "write model/attention=softmax"),
        ("sample", "prompt", "prompt: options are KEY=VALUE here"),
        ("train", "device=cuda", "did you mean 'runtime.device'?"),
        ("train", "model.dropout=0.1", "unknown config key 'model.dropout': dropout is not supported"),
        ("train", "data=text", "'data' is for scripts/prepare_data.py: give train its dataset, or a run of it"),
        ("train", "epochs=3", "a run's length is max_steps"),
        ("train", "schedule.decay=0.1", "unknown config key 'schedule.decay': it is a key of schedule=wsd"),
        ("train", "quickstart", "quickstart: write experiment=quickstart"),
        ("train", "experiment = quickstart", "experiment: options are KEY=VALUE here, without spaces around ="),
        ("train", "seed=1,2", "seed=1,2 has several values: add -m for a run with each; if seed is a list, write"),
        ("train", "model=softmax_1m,heinsen_1m", "heinsen_1m has several values: add -m for a run with each\n"),
        ("train", "model=[softmax_1m,heinsen_1m]", "takes one name; -m model=softmax_1m,heinsen_1m makes"),
        ("train", "model/atention=softmax", "unknown config key 'model/atention': did you mean 'model/attention'?"),
        ("train", "--", "--: leave it out"),
        ("train", "data.mixture={a:1", "cannot read the option data.mixture={a:1: write KEY=VALUE, close brackets"),
        ("train", "run_dir='x", "cannot read the option run_dir='x: write KEY=VALUE, close brackets and quotes, and"),
        ("train", "data.mixture=[(a]", "cannot read the option data.mixture=[(a]"),
        ("train", "run_dir=runs/none", "run_dir=runs/none holds no run to continue: give experiment=... or dataset"),
        ("scripts/prepare_data", "dataset_dir=x", "did you mean 'out_dir'?"),
        ("scripts/plan", "run_dir=runs/none", "run_dir=runs/none holds no run to continue: give experiment=..."),
        ("sample", "run_dir=runs/x", "did you mean 'checkpoint'?"),
        ("sample", ".", ".: options are KEY=VALUE here, without spaces around =: write checkpoint=."),
        ("scripts/prepare_data", "data.path=x", "a key of data=chat or data=fineweb or data=fineweb_edu or data=hf"),
        ("scripts/prepare_data", "data=notes/a.txt", "names a file: write data=text data.path=notes/a.txt"),
        ("scripts/prepare_data", "data=a/*.jsonl.zst", "names a file: write data=jsonl data.path=a/*.jsonl.zst"),
        ("scripts/prepare_data", "data=a/*_train_*.bin", "names a file: write data=tokens data.path=a/*_train_*.bin"),
        ("scripts/prepare_data", "tokenizer=t.json", "names a file: write tokenizer=hf tokenizer.path=t.json"),
        ("train", "batch_size=8", "unknown config key 'batch_size': the size of a batch is batch_tokens, in tokens"),
        ("train", "block_size=8", "did you mean 'seq_len'?"),
        ("train", "max_tokens=8", "did you mean 'max_steps'?"),
        ("train", "total_batch_size=8", "did you mean 'batch_tokens'?"),
        ("train", "eval_iters=8", "did you mean 'eval.batches'?"),
        ("train", "min_lr=6e-5", "the last learning rate is schedule.end, as a fraction of optim.max_lr"),
        ("train", "fsdp=true", "unknown config key 'fsdp': write runtime.strategy=fsdp"),
        ("train", "dataset_dir=x resume=true", "(auto: the same command again continues the run in run_dir; never"),
        ("sample", "start=hi", "unknown config key 'start': did you mean 'prompt'?"),
        ("sample", "max_tokens=8", "did you mean 'max_new_tokens'?"),
        ("sample", "batch_size=8", "unknown config key 'batch_size': did you mean 'micro_batch'?"),
        ("sample", "do_sample=false", "temperature=0 takes the most likely token"),
        ("train", "tracker.wandb.mode=offline", "it is a key of tracker=wandb, which must be given, too"),
        ("train", "tracker=[wandb,tensorbord]", "tracker=tensorbord does not exist: did you mean 'tensorboard'?"),
        ("train", "resume=runs/base", "resume=runs/base: a run continues where its files are: write run_dir=runs/base"),
        ("train", "checkpoint=runs/base", "write run_dir=runs/base"),
        ("train", "~data", "~data takes nothing away here: set keys instead"),
        ("train", "MAX_STEPS=3", "unknown config key 'MAX_STEPS': did you mean 'max_steps'?"),
        ("train", "--config-dir no/such seed=1", "--config-dir no/such is not a folder"),
        ("train", "-max_steps=3", "-max_steps=3: options are KEY=VALUE here: write max_steps=3"),
        ("train", "--config-name=quickstart", "--config-name=quickstart: write experiment=quickstart"),
        ("train", "-cn quickstart", "-cn: write experiment=..."),
        (
            "sample",
            "checkpoint=x prompt=Hello, big world",
            'quote the prompt if it has spaces: prompt="Hello, big w',
        ),
        ("scripts/prepare_data", "data=text data.path=my notes", 'data.path if it has spaces: data.path="my notes"'),
        ("sample", "checkpoint=x top_k=0", "config top_k=0: give 1 or more (sample only among this many most likely"),
        ("sample", "checkpoint=x top_k=-1", "null: all)"),
        ("sample", "checkpoint=x top_p=0", "config top_p=0: give more than 0.0 (sample among the fewest tokens with"),
        ("sample", "checkpoint=x top_p=0", "null: all; greedily: temperature=0)"),
        ("sample", "checkpoint=x seed=-1", "config seed=-1: give 0 or more (seed of the sampling; for other texts"),
        ("scripts/serve", "checkpoint=x port=80000", "config port=80000: give 65535 or less (0: any free port)"),
        ("train", "dataset_dir=x runtime.hang_seconds=0", "give more than 0.0 (seconds without progress"),
        (
            "train",
            "dataset_dir=x runtime.micro_batch=x",
            "micro_batch='x': give a whole number or 'auto'",
        ),
        ("train", "-max_steps 3", "-max_steps: options are KEY=VALUE here: write max_steps=..."),
        ("train", "optim.max_lr=0,003", "for one number, write optim.max_lr=0.003"),
        ("train", "max_steps=10,000", "for one number, write max_steps=10000"),
        ("train", "run_dir=a,b", """if it is one text, write 'run_dir="a,b"'"""),
        ("train", "+foo=1", "unknown config key 'foo': allowed: average, batch_tokens"),
        ("train", "optim..eps=1", "optim..eps=1: options are KEY=VALUE here, without spaces around =: see --help"),
        ("train", "/optim=muon", "/optim=muon: options are KEY=VALUE here"),
        ("train", "run_dir=a @b=3", "@b=3: options are KEY=VALUE here, without spaces around =: see --help"),
        ("train", "data.mixture.a=1", "unknown config key 'data.mixture.a': data.mixture has no keys: write data."),
        ("train", "save_every=8", "did you mean 'checkpoint.every'?"),
        ("train", "project=a", "write tracker=wandb tracker.wandb.project=..."),
        ("train", "n_layers=3", "unknown config key 'n_layers': did you mean 'model.n_layer'?"),
        ("train", "dataset_dir=x max_steps=true", "config max_steps='true': give a whole number (length of the run"),
        ("train", "dataset_dir=x optim.max_lr=true", "config optim.max_lr='true': give a number"),
        ("train", "dataset_dir=x run_dir=.", "run_dir is empty, or this folder: give one for the run"),
        ("scripts/plan", "checkpoint=runs/base", "write run_dir=runs/base"),
        ("train", "-m optim.max_lr=0,003", "optim.max_lr=0,003 is two numbers: write optim.max_lr=0.003"),
        (
            "train",
            "dataset_dir=x eval=false",
            "config eval=false: it has keys of its own: give values to them",
        ),
        ("train", "dataset_dir=x optim.betas=0.9", "give several values in brackets, such as [0.9,...]"),
        ("train", "dataset_dir=x model.ngrams=[2,99]", "model.ngrams.1=99: give 64 or less (n-gram memory: lengths"),
        ("train", "dataset_dir=x optim.betas=[0.9]", "config optim.betas has too few values: it needs 2 or more"),
    ],
)
def test_what_is_meant_is_answered(command, script, arguments, message):
    assert_one_line(command(script, *arguments.split()), message)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("a.twoo", "did you mean 'a.two'?"),
        ("a.six", "allowed: a.one, a.two"),
        ("b.two", "did you mean 'a.two'?"),
        ("xyz", "allowed: a, last"),
        ("k.q", "25 are allowed, such as k.0, k.1, k.10, k.11, k.12"),
    ],
)
def test_names_of_the_same_section_come_first(given, answer):
    assert nearest(given, ["a", "a.one", "a.two", "last", *(f"k.{i}" for i in range(25))]) == answer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: flagship_10m", "a file sets model to flagship_10m: to choose a file of configs/model, write"),
        ("model:\n  attention: softmax", "softmax], without /model/ in a file of model/"),
        ("tracker: wandb", "write defaults: [override /tracker: wandb]"),
        ("optim: null", "write defaults: [override /optim: NAME]"),
    ],
)
def test_a_file_that_names_another_is_told_how(command, tiny_args, tmp_path, text, said):
    file, options = tmp_path / "experiment" / "mine.yaml", ["--config-dir", str(tmp_path), "experiment=mine"]
    file.parent.mkdir()
    file.write_text(f"# @package _global_\n{text}\n")
    result = command("train", *tiny_args, *options)
    assert_one_line(result, said)
    right = re.search(r"write (.*?\])", result.err)[1].replace("NAME", "muon")
    file.write_text(f"# @package _global_\n{right}\n")
    assert command("train", *options, *tiny_args, "--cfg", "job").status == 0


SWEPT = ["runs/s/optim.max_lr=0.003,seed=1", "runs/experiment=quickstart,optim.max_lr=0.003,seed=1", "a(b), c", "a=b'c"]


@pytest.mark.parametrize("path", SWEPT)
def test_a_path_needs_no_quotes(command, path):
    for script in ("sample", "eval", "scripts/serve"):
        assert f"checkpoint={path} does not exist" in command(script, f"checkpoint={path}").err


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
    monkeypatch.setattr("trainer.loop.fit", lambda config: found.append(config.run_dir))
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
    assert newest(run).name == "step-00000006"
    assert json.loads((run / "config.json").read_text())["config"] == before | {"stop_at": None}
    result = command("train", f"run_dir={run}", "max_steps=8", "schedule.decay=0.5", "eval.every=2")
    said = re.findall(r"changed: (\S+)", result.out)
    assert said == ["eval.every=2", "max_steps=8", "schedule.decay=0.5"]
    assert newest(run).name == "step-00000008"


def test_what_is_given_counts_and_names_of_groups_are_files_of_ours(command, tiny_args, tmp_path, monkeypatch):
    run, found = tmp_path / "run", []
    monkeypatch.setattr("trainer.loop.fit", found.append)
    options = [arg for arg in tiny_args if "run_dir" not in arg]
    settings = to_dict(compose("train", [*options, "schedule=cosine", f"run_dir={run}"]))
    settings["tracker"] = {"wandb": {"every": 3}}
    settings["schedule"]["name"] = "../../strange"
    settings["forgotten"] = {"key": 1}
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"config": settings}))
    result = command("train", f"run_dir={run}")
    assert "config schedule.name='../../strange' does not exist" in result.err
    settings["schedule"]["name"] = "cosine"
    settings["checkpoint"]["every"] = "${seed}"  # data, not a reference
    (run / "config.json").write_text(json.dumps({"config": settings}))
    assert "config checkpoint.every='${seed}'" in command("train", f"run_dir={run}").err
    assert command("train", f"run_dir={run}", "checkpoint.every=7", "seed=5", "tracker=wandb").status == 0
    (config,) = found
    assert (config.seed, config.checkpoint.every, config.schedule.name, config.model.n_embd) == (5, 7, "cosine", 16)
    assert config.tracker.wandb.every == 10


def test_a_record_of_another_shape_is_one_line(command, tmp_path):
    (tmp_path / "config.json").write_text('{"config": {"model": "x"}}')
    assert_one_line(command("train", f"run_dir={tmp_path}"), "config model='x': it has keys of its own")


@pytest.fixture
def resumed(command, tmp_path, monkeypatch):
    """Gives the configuration that would be trained with these options in the folder of a run with `settings`."""

    def configuration(settings, *options):
        found = []
        monkeypatch.setattr("trainer.loop.fit", found.append)
        (tmp_path / "old").mkdir(exist_ok=True)
        (tmp_path / "old" / "config.json").write_text(json.dumps({"config": settings}))
        assert command("train", f"run_dir={tmp_path / 'old'}", *options).err == ""
        return found[0]

    return configuration


def test_a_run_keeps_its_trackers(resumed):
    settings = to_dict(compose("train", ["dataset_dir=x"]))
    own = settings | {"tracker": {"wandb": {"every": 7, "mode": "offline", "project": "mine"}, "tensorboard": None}}
    wandb = resumed(own).tracker.wandb
    assert (wandb.every, wandb.mode, wandb.project) == (7, "offline", "mine")
    given = resumed(own, "tracker.wandb.every=5").tracker
    assert (given.wandb.every, given.wandb.mode, given.tensorboard) == (5, "offline", None)
    assert resumed(own, "tracker=local").tracker.wandb is None
    both = settings | {"tracker": {"wandb": {"mode": "offline"}, "tensorboard": {"every": 4}}}
    tracker = resumed(both, "tracker.tensorboard.every=5").tracker
    assert (tracker.wandb.mode, tracker.tensorboard.every) == ("offline", 5)


def test_a_group_that_is_given_replaces_the_runs_subgroups(resumed):
    own = ["model/attention=sliding_window", "model/position=learned", "optim=muon"]
    config = resumed(to_dict(compose("train", ["dataset_dir=x", *own])), "model=softmax_1m")
    fresh = ["dataset_dir=x", "model=softmax_1m", "model.n_vocab=50257"]  # its vocabulary is that of its data
    assert config.model == decode(TrainConfig, to_dict(compose("train", fresh))).model
    assert config.optim.name == "muon"


def test_only_the_run_in_run_dir_is_read(command, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr("trainer.loop.fit", found.append)
    monkeypatch.chdir(tmp_path)
    settings = to_dict(compose("train", ["dataset_dir=x", "seed=9"]))
    Path("config.json").write_text(json.dumps({"config": settings}))
    assert command("train", "dataset_dir=x").status == 0
    assert found[0].seed == 1
    assert "config key 'dataset_dir' is missing" in command("train", f"run_dir={tmp_path}", "~seed").err
    assert command("train", f"run_dir={tmp_path}", "~seed", "dataset_dir=x").status == 0
    assert found[1].seed == 1


def test_what_is_shown_is_what_would_be_trained(command, tmp_path):
    settings = to_dict(compose("train", ["dataset_dir=x", "schedule=wsd", "seed=9"]))
    (tmp_path / "config.json").write_text(json.dumps({"config": settings | {"stop_at": 3}}))
    shown = yaml.safe_load(command("train", "--cfg", "job", f"run_dir={tmp_path}", "max_steps=7").out)
    assert shown == settings | {"run_dir": str(tmp_path), "max_steps": 7}
    for options in ([], [f"run_dir={tmp_path / 'new'}"]):
        assert yaml.safe_load(command("train", "--cfg", "job", *options).out)["dataset_dir"] == "???"


def test_showing_a_sweep_does_not_train_it(command, monkeypatch):
    monkeypatch.setattr(sys.modules["cli.command"], "run_sweep", None)
    assert command("train", "-m", "--cfg", "job", "experiment=quickstart", "seed=1,2").err.count("\n") == 1


def test_texts_are_shown_as_they_were_given(command):
    shown = yaml.safe_load(command("sample", "--cfg", "job", "checkpoint=x", "prompt=hello ${there}").out)
    assert shown["prompt"] == "hello ${there}"


def test_an_experiment_is_complete(command, tiny_args, tmp_path, monkeypatch):
    found = []
    assert command("train", *tiny_args, "stop_at=2").status == 0
    monkeypatch.setattr("trainer.loop.fit", found.append)
    assert command("train", "experiment=quickstart", f"run_dir={tmp_path / 'run'}").status == 0
    assert found[0].seq_len == 128


# ----- a schedule that does not fit


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "wsd", "constant"])
def test_a_warm_up_that_does_not_fit_is_a_tenth_of_the_run_and_said(schedule):
    settings = ["dataset_dir=x", f"schedule={schedule}", "schedule.warmup_steps=200"]
    short, fitting = (
        decode(TrainConfig, to_dict(compose("train", [*settings, *more])))
        for more in (["max_steps=100"], ["max_steps=100", "schedule.warmup_steps=10"])
    )
    rates = [[config.schedule.factor(step, 100) for step in range(100)] for config in (short, fitting)]
    assert rates[0] == rates[1]
    assert short.schedule.warmup(200) == 200


# ----- what is shown and offered


def test_keys_that_a_file_includes_are_known(command):
    """configs/optim/muon.yaml has adamw's keys by its defaults."""
    assert "weight_decay" in explained(CONFIGS / "optim" / "muon.yaml")
    having = command("train", "optim.momentum=0.9").err
    assert "it is a key of optim=muon" in having
    assert (
        "model/attention=log_space or model/attention=log_space_forgets"
        in command("train", "model/attention=softmax", "model.attention.product=true").err
    )


def test_help_names_the_keys_of_every_group(command):
    out = command("train", "--help").out
    for key in ("n_layer", "n_head", "max_lr", "weight_decay", "warmup_steps", "micro_batch", "project", "max_len"):
        assert re.search(rf"keys\s[^;]*\b{key}\b", out, re.DOTALL), key
    assert "checkpoint: ???" in command("sample", "--help").out


@pytest.mark.parametrize(
    "name", ["train", "eval", "sample", *(f"scripts/{x}" for x in ("prepare_data", "plan", "serve", "lm_eval"))]
)
def test_every_key_has_its_comment(command, name):
    shown = command(name, "--cfg", "job").out
    raw = yaml.safe_load(shown)
    assert raw
    bare = [line for line in shown.splitlines() if "# " not in line and not re.match(r"( *)- |( *)\w+:$", line)]
    assert bare == []


def test_extras_have_names_that_every_pip_finds():
    """pip 23, which Python 3.11 brings, finds an extra only by its name in the metadata: setuptools normalises that."""
    assert [name for name in EXTRAS.values() if re.sub(r"[-_.]+", "-", name).lower() != name] == []
