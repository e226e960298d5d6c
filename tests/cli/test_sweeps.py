"""Sweeps with every launcher: they resume after a kill, share GPUs, and no file chooses what Hydra calls."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from printed import assert_one_line

from cli import compose
from cli.workers import take_gpu, visible_gpus
from common.settings import decode
from runtime.checkpoint import Saver, find_newest
from trainer.config import TrainConfig

pytestmark = pytest.mark.usefixtures("restored_torch")
ROOT = Path(__file__).resolve().parents[2]


def jobs_of(sweep):
    return {path.parent.name: path.parent for path in sweep.glob("*/config.json")}


def weights(sweep):
    return {name: (find_newest(run) / "model.safetensors").read_bytes() for name, run in jobs_of(sweep).items()}


def written(job):
    return {path: path.stat().st_mtime_ns for path in job.rglob("step-*/*")}


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(command, tiny_args, tmp_path, monkeypatch):
    """The first job's files do not change, the second job resumes, and the results equal those without a kill."""
    run = tmp_path / "run"
    sweep = ["train", "-m", *tiny_args, "seed=1,2,3"]
    check = Saver.check

    def kill_at_step_4(saver):
        saver.wait()
        if saver.saved_step == 4 and (run / "seed=2").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        check(saver)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(Saver, "check", kill_at_step_4)
        command(*sweep)
        os._exit(1)  # it was not killed
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert {name: find_newest(job).name for name, job in jobs_of(run).items()} == {
        "seed=1": "step-00000006",
        "seed=2": "step-00000004",
    }
    (run / "seed=2" / "error.txt").write_text("is being trained in")  # as another sweep notes that meets this job
    before = written(run / "seed=1")
    result = command(*sweep)
    assert result.status == 0, result.err
    assert [*run.glob("*/error.txt")] == []
    assert result.out.count("nothing to train") == 1
    assert len(re.findall(r"resuming .*seed=2\S* after step 4", result.out)) == 1
    assert written(run / "seed=1") == before
    assert command(*sweep, f"run_dir={tmp_path / 'unbroken'}").status == 0
    assert weights(run) == weights(tmp_path / "unbroken")


@pytest.mark.slow
def test_a_finished_sweep_is_found_again_without_its_source(command, tiny_args, tmp_path):
    """And with one more option that all jobs share."""
    source = tmp_path / "source"
    assert command("train", *tiny_args, f"run_dir={source}", "max_steps=1").status == 0
    sweep = ["train", "-m", *tiny_args, "seed=1,2", "max_steps=1", f"init_from={source}"]
    assert command(*sweep).status == 0
    source.rename(tmp_path / "elsewhere")
    again = command(*sweep, "checkpoint.keep_last=3").out
    assert again.count("nothing to train") == 2
    *table, _, last = again.splitlines()
    assert table[-1].split()[:2] == ["1,", "2"]
    assert last == f"to compare them: python scripts/report.py folders={tmp_path / 'run'}"
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["seed=1", "seed=2"]


def test_a_sweep_counts_its_jobs_and_says_once_what_they_share(command, tiny_args, tmp_path):
    result = command("train", "-m", *tiny_args, "max_steps=1", "seed=1,2")
    assert result.status == 0, result.err
    folders = [tmp_path / "run" / f"seed={seed}" for seed in (1, 2)]
    jobs = [line for line in result.out.splitlines() if line.startswith("---")]
    assert jobs == [f"--- job {number} of 2: {folder}" for number, folder in enumerate(folders, start=1)]
    assert result.out.count("\nschedule  1 step of AdamW") == 1
    for folder in folders:
        assert (folder / "console.log").read_text().count("\nschedule  1 step of AdamW") == 1
    assert "\nschedule  " in command("train", *tiny_args, "max_steps=1", f"run_dir={tmp_path / 'next'}").out


SEARCH = "hydra/sweeper=optuna"
OPTUNA = [SEARCH, "hydra/sweeper/sampler=grid", "seed=choice(1, 2)"]


@pytest.mark.slow
def test_the_jobs_of_a_sweep_of_joblibs_are_saved(command, tiny_args, tmp_path, monkeypatch):
    """After Ctrl-C. Another launcher finds the jobs, too."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    options = [*tiny_args, "max_steps=100000", "checkpoint.every=100000", "eval.every=100000", *OPTUNA]
    line = [sys.executable, "train.py", "-m", *options, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    process = subprocess.Popen(line, cwd=ROOT, env=env, stdout=-1, stderr=-1, start_new_session=True)
    process.stdout.close()  # nobody reads what the jobs print
    stop = time.monotonic() + 120
    while len([path for path in tmp_path.glob("run/**/metrics.jsonl") if path.stat().st_size]) < 2:
        assert time.monotonic() < stop
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate()  # until the workers have closed their ends, too
    resumed = []
    monkeypatch.setattr("trainer.launch.fit", lambda config: resumed.append(find_newest(config.run_dir)) or 1.0)
    assert command("train", "-m", *options).status == 0
    assert len(resumed) == 2
    assert None not in resumed


@pytest.fixture
def optuna_args(tiny_args):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ["optim.max_lr=tag(log, interval(1e-3, 1e-1))", "model/position=choice(none, log_recurrence)"]
    sweeper = [SEARCH, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    return ["-m", *(arg for arg in tiny_args if "max_lr" not in arg), *sweeper, *search]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_search_goes_on_after_failed_runs_and_names_them(command, optuna_args, tmp_path):
    """Half of the rates diverge. The same command again asks for the same runs, and tries those that failed again."""
    args = [arg for arg in optuna_args if not arg.startswith(("optim.", "model/position"))]
    search = [*args, "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=2", "optim.max_lr=choice(1e30, 1e-2)"]
    for again in (False, True):
        result = command("train", *search)
        assert result.status == 0, result.err
        assert "warning: some runs failed and count as the worst: optim.max_lr=1e+30\n" in result.err
        table = [line for line in result.out.splitlines() if line.startswith(" ") and "optim.max_lr=" in line]
        first, last = table
        assert re.fullmatch(r" +0\.01 +\d\.\d{4} .* optim.max_lr=0.01 +", first)
        assert "1e+30" in last
        assert ("nothing to train" in result.out) == again
        assert result.out.count("--- job") == 6
        assert result.out.count("the earlier result of optim.max_lr=") == 4, "two different choices"
    assert "lower optim.max_lr=1e+30" in (tmp_path / "run" / "optim.max_lr=1e+30" / "error.txt").read_text()
    result = command("train", *search[:-1], "optim.max_lr=choice(1e30, 1e29)")
    assert_one_line(result._replace(err=result.err.splitlines(keepends=True)[-1]), "every run of the search failed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["seed=range(0,0)"], "seed=range(0,0) names no value: write seed=a,b for a run with each"),
        (["run_dir=", "seed=1,2"], "run_dir is empty, or this folder: give one for the sweep"),
        ([SEARCH, "optim.max_lr=1e-3"], "hydra/sweeper=optuna has nothing to search: give a range"),
        ([SEARCH, "hydra.sweeper.n_trials=0", "seed=choice(1,2)"], "n_trials=0 is too few: use 1 or"),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=0"], "n_jobs=0 starts no worker: use 1"),
        (["hydra/launcher=submitit_slurm"], "submitit_slurm needs srun"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_line(command, tiny_args, tmp_path, options, message):
    if SEARCH in options:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    result = command("train", "-m", *(arg for arg in tiny_args if "max_lr" not in arg), *options)
    assert_refused(result, tmp_path, message)
    assert "---" not in result.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["optim.max_lr=3e-4,abc"], "job optim.max_lr=abc: config optim.max_lr='abc': Input should be a"),
        (["seed=1,2", "model.n_head=2,3"], "job model.n_head=3 seed=1: config model: n_embd=16 is not divis"),
        (["init_from=null,/no/such"], "init_from=/no/such does not exist: give a run directory"),
        (["seq_len=16,64000", "batch_tokens=64000"], "job seq_len=64000: seq_len=64000 needs 64001 tokens"),
        ([SEARCH, "seed=choice(1,2)", "optim.max_lr=choice(1e-3,1e-2,-1)"], "optim.max_lr=-1:"),
    ],
)
def test_a_mistake_in_one_job_is_said_before_the_first_is_trained(command, tiny_args, tmp_path, options, message):
    if SEARCH in options:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    result = command("train", "-m", *(arg for arg in tiny_args if "max_lr" not in arg), *options)
    assert_refused(result, tmp_path, message)
    assert "; no job was started" in result.err
    assert result.out == ""


def hold_gpu(taken, is_over):
    take_gpu()
    taken.put(os.environ["CUDA_VISIBLE_DEVICES"])
    is_over.wait()


@pytest.mark.slow
def test_workers_share_gpus_evenly(tmp_path, monkeypatch):
    """Three workers on two GPUs: two share one; when the worker alone on a GPU ends, the next worker gets that GPU."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-a/b")
    assert visible_gpus() == ["3", "GPU-a/b"]
    fork = multiprocessing.get_context("fork")
    taken = fork.SimpleQueue()
    ends = [fork.Event() for _ in range(4)]
    workers = [fork.Process(target=hold_gpu, args=(taken, is_over)) for is_over in ends]
    gpus = []
    for worker in workers[:3]:
        worker.start()
        gpus.append(taken.get())
    assert gpus == ["3", "GPU-a/b", "3"]
    ends[1].set()
    workers[1].join()
    workers[3].start()
    assert taken.get() == "GPU-a/b"
    for worker, is_over in zip(workers, ends, strict=True):
        is_over.set()
        worker.join()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_gpu_is_visible(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == []


# ----- what a file may not

COPY = "{_target_: shutil.copyfile, src: SOURCE, dst: MARKER}"
LOGGING = '{version: 1, formatters: {x: {"()": shutil.copyfile, src: SOURCE, dst: MARKER}}}'


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (f"hydra: {{callbacks: {{x: {COPY}}}, job_logging: {LOGGING}, hydra_logging: {LOGGING}}}", []),
        (f"hydra: {{sweeper: {{params: {COPY}}}, callbacks: {{x: {COPY}}}}}", ["-m", "seed=1,2"]),
        ("hydra: {mode: MULTIRUN, sweep: {dir: MARKER}, overrides: {task: ['seed=3,4']}}", []),
        ("defaults: [override /hydra/launcher: submitit_slurm]", ["-m", "seed=1,2"]),
    ],
)
def test_what_a_strangers_file_sets_for_hydra_has_no_effect(
    command, tiny_args, tmp_path, monkeypatch, settings, options
):
    monkeypatch.setattr("tools.report.show_runs", lambda folder: None)
    monkeypatch.setattr("trainer.launch.fit", lambda config: trained.append(config.run_dir) or 1.0)
    trained = []
    if "override" in settings:
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    strange_file(tmp_path, "experiment/strange.yaml", f"# @package _global_\n{settings}\n")
    options = ["--config-dir", str(tmp_path / "conf"), *options, *tiny_args, "experiment=strange"]
    result = command("train", *options)
    assert result.status == 0, result.err
    assert not (tmp_path / "marker").exists()
    assert len(trained) == (2 if "-m" in options else 1)


def strange_file(tmp_path, name, content):
    (tmp_path / "source").write_text("x")
    path = tmp_path / "conf" / name
    path.parent.mkdir(parents=True)
    path.write_text(content.replace("SOURCE", str(tmp_path / "source")).replace("MARKER", str(tmp_path / "marker")))


def assert_refused(result, tmp_path, message):
    assert_one_line(result, message)
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a schema with the same name
def test_a_strangers_folder_cannot_pose_as_a_launcher(command, tiny_args, tmp_path):
    """Hydra looks for launchers among those that are installed."""
    strange_file(tmp_path, "hydra/launcher/basic.yaml", "_target_: shutil.copyfile\nsrc: SOURCE\ndst: MARKER\n")
    arguments = ["--config-dir", str(tmp_path / "conf"), *tiny_args, "hydra/launcher=basic", "seed=1,2"]
    assert_refused(command("train", "-m", *arguments), tmp_path, "")


def test_a_process_that_composes_reads_no_environment_and_keeps_its_answer_to_ctrl_c():
    """Launchers run jobs in other processes, which only import what they need. Our commands alone answer Ctrl-C."""
    code = "import signal, cli.sweep; from omegaconf import OmegaConf; "
    code += "print(OmegaConf.has_resolver('oc.env'), signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "False True\n", found.stderr


def test_wandbs_sweep_gives_options_that_train_takes(dataset_dir):
    sweep = yaml.safe_load((ROOT / "sweeps" / "wandb.yaml").read_text())
    values = {name: p.get("value", p.get("values", [p.get("min")])) for name, p in sweep["parameters"].items()}
    options = [f"{name}={value[0] if isinstance(value, list) else value}" for name, value in values.items()]
    config = decode(TrainConfig, compose("train", [*options, f"dataset_dir={dataset_dir}", "tracker=wandb"]))
    assert sweep["metric"] == {"name": "val_loss", "goal": "minimize"}
    assert config.optim.max_lr == 1e-3
    command = " ".join(sweep["command"])
    assert "exec python train.py tracker=wandb" in command
    assert "$WANDB_RUN_ID" in command
    assert command.endswith("${args_no_hyphens}")
