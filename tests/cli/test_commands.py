"""What every command has in common: --help, options, answers of one line, output that fails; and printed commands.

Commands in --help, docstrings, `make train` and the pages of docs/ run here until the actual work would begin.
"""

import ast
import functools
import json
import re
import shlex
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path
from pkgutil import resolve_name

import pytest
import ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from printed import assert_one_line, commands_in

from cli import compose
from cli.compose import parse_options
from common.command_line import format_options
from common.settings import UserError, decode
from tools.bench.run import BenchConfig
from trainer.config import TrainConfig

pytestmark = pytest.mark.usefixtures("restored_torch")

ROOT = Path(__file__).resolve().parents[2]
WORK = {  # the function that does the work of a script
    "train": "trainer.launch.launch_training",
    "eval": "inference.evaluate.launch_evaluation",
    "sample": "inference.sample.run_sampling",
    "scripts/bench": "tools.bench.run.run_benchmarks",
    "scripts/count": "tools.count.print_counts",
    "scripts/doctor": "tools.doctor.examine_machine",
    "scripts/export_hf": "tools.convert.export_hf.export_checkpoint",
    "scripts/import_gpt2": "tools.convert.import_gpt2.import_gpt2",
    "scripts/inspect_dataset": "tools.inspect_dataset.inspect_dataset",
    "scripts/lm_eval": "inference.harness.run_harness",
    "scripts/plan": "tools.plan.print_plan",
    "scripts/prepare_data": "data.prepare.dataset.prepare_dataset",
    "scripts/report": "tools.report.write_report",
    "scripts/serve": "inference.server.serve.serve_model",
    "scripts/train_tokenizer": "data.prepare.vocabulary.learn_vocabulary",
    "scripts/verify_dataset": "data.prepare.verify.verify_or_exit",
}
NEEDS = {"scripts/serve": "uvicorn", "scripts/train_tokenizer": "tokenizers"}


def test_all_scripts_are_in_the_table():
    scripts = [str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("scripts/*.py")]
    assert sorted(WORK) == sorted(["train", "eval", "sample", *scripts])


# ----- printed commands


@pytest.fixture
def count_jobs(command, monkeypatch, tmp_path):
    """Runs a printed command in an empty folder, without its work; returns how often it would do that."""
    monkeypatch.chdir(tmp_path)
    jobs = []

    def run(script, arguments):
        def work(*_, **__):
            jobs.append(script)
            return 0.0  # a validation loss

        jobs.clear()
        with monkeypatch.context() as patch:
            patch.setattr(WORK[script], functools.wraps(resolve_name(WORK[script]))(work))
            # There are no data of a sweep, and no runs.
            patch.setattr("trainer.loop.check_run", lambda config: None)
            patch.setattr("tools.report.show_runs", lambda folder: None)
            result = command(script, *arguments)
        assert (result.status, result.err) == (0, ""), shlex.join([script, *arguments])
        return len(jobs)

    return run


@pytest.mark.parametrize("script", WORK)
@pytest.mark.slow
def test_the_commands_of_a_help_and_of_a_docstring_reach_their_work(command, count_jobs, script):
    pytest.importorskip(NEEDS.get(script, "torch"))
    docstring = ast.get_docstring(ast.parse((ROOT / f"{script}.py").read_text()), clean=False)
    typed = commands_in(f"{docstring}\n{command(script, '--help').out}")
    assert script in [one.script for one in typed]
    for one in typed:
        n_jobs = count_jobs(*one)
        assert n_jobs > 1 if "-m" in one.arguments else n_jobs == 1, one


def write_run(folder):
    """What `run_dir=` alone reads of a run."""
    folder.mkdir(parents=True)
    settings = decode(TrainConfig, compose("train", ["experiment=quickstart"])).model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps({"config": settings}))


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.slow
def test_what_make_train_says_is_next_reaches_its_work(count_jobs, tmp_path):
    recipe = ["make", "-n", "--no-print-directory", "-o", ".venv/installed", "train"]
    lines = subprocess.run(recipe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    end = lines.index(r"printf '\nNext:\n'")
    said = subprocess.run(["sh", "-c", "\n".join(lines[end:])], capture_output=True, text=True, check=True).stdout
    write_run(tmp_path / "runs" / "demo")
    assert [count_jobs(*one) for one in commands_in(said)] == [1, 1, 1, 1, 4]


@pytest.mark.filterwarnings("ignore")  # optuna's
@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda path: path.stem)
@pytest.mark.slow
def test_the_commands_of_a_page_reach_their_work(count_jobs, tmp_path, page):
    for plugin in ("triton", "uvicorn", "optuna"):
        pytest.importorskip(plugin)
    for name in ("demo", "mine"):
        write_run(tmp_path / "runs" / name)
    text = page.read_text().replace(" ... ", " experiment=quickstart ")  # dots are the reader's own options
    for experiment in re.findall(r"^    # @package _global_\n(?:    .*\n)+", text, re.MULTILINE):
        (tmp_path / "mine" / "experiment").mkdir(parents=True)
        (tmp_path / "mine" / "experiment" / "notes.yaml").write_text(textwrap.dedent(experiment))
    for one in commands_in(text):
        if not {"--cfg", "--help"} & set(one.arguments):
            assert count_jobs(*one) >= 1


WORDS = ["d4", "1 .", "it's", "c:\\", r"c:\x\'", "1", "1e3", "NULL", "x=1", "[x]", "{a: 1}", "a,b", "~", "日本"]
WORDS += ["${x}", r"\${x}", r"\\${x"]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"])) | st.sampled_from(WORDS))
def test_settings_are_printed_as_a_command_line_takes_them(text):
    for value in (text, [text, {"name": text, "n": 1}, None, True, 6e-5]):
        (typed,) = shlex.split(format_options({"a.key": value}))
        (parsed,) = parse_options([typed])
        assert parsed.key_or_group == "a.key"
        assert OmegaConf.to_container(OmegaConf.create([parsed.value()]), resolve=True) == [value]
    assert format_options({"key": "runs/s/optim.max_lr=0.001,seed=1"}) == "key=runs/s/optim.max_lr=0.001,seed=1"


# ----- help

HELP = """
import contextlib, io, json, runpy, sys
SLOW = ("torch", "matplotlib", "transformers", "triton", "datasets", "wandb", "fastapi", "pyarrow")
found = {}
for script in sys.argv[1:]:
    before = set(sys.modules)
    sys.argv = [script, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    found[script] = [out.getvalue(), [name for name in SLOW if name in sys.modules and name not in before]]
print(json.dumps(found))
"""


def test_help_fits_a_screen_shows_an_example_and_waits_for_no_slow_library(run_process):
    """All commands run in one process in turn, so an import is listed at the first command that needs it."""
    (result,) = run_process(["-c", HELP, *(f"{script}.py" for script in WORK)])
    for script, (text, loaded) in json.loads(result.out).items():
        lines = text.splitlines()
        assert loaded == [], script
        assert 5 < len(lines) <= 52, script
        assert max(map(len, lines)) <= 120, script
        assert f"python {script}" in text
        assert "--debug" in text


# ----- options, and answers of one line


@pytest.fixture
def bench(command, monkeypatch):
    """Runs scripts/bench.py with these words, its work replaced by a function; returns what the command does."""

    def run(work, *words):
        monkeypatch.setattr("tools.bench.run.run_benchmarks", work)
        return command("scripts/bench", *words)

    return run


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["steps=4", "out=a=b c"], {"steps": 4, "out": Path("a=b c")}),
        (["models=[x, y]"], {"models": ["x", "y"]}),
        (["models=a=[x,y],b=1"], {"models": ["a=[x,y]", "b=1"]}),
        (["set=[]", "out=null"], {"set": []}),
    ],
)
def test_options_are_keys_and_values(bench, words, given):
    found = []
    assert bench(found.append, *words).status == 0
    assert found == [BenchConfig(**given)]


def test_a_functions_arguments_are_the_keys_of_its_command(command, monkeypatch):
    found = []

    def convert(folder: Path, run_dir: Path) -> None:
        found.append((folder, run_dir))

    monkeypatch.setattr("tools.convert.import_gpt2.import_gpt2", convert)
    words = ["folder=models/a", "run_dir=runs/42"]
    assert command("scripts/import_gpt2", *words).status == 0
    assert found == [(Path("models/a"), Path("runs/42"))]
    assert command("scripts/import_gpt2", *words[:1]).err.startswith("error: Missing mandatory value: run_dir")


def raising(error):
    def work(options):
        raise error

    return work


ANSWERS = [  # what is typed, what the work does, and how the answer begins
    (["--steps", "20"], print, "unrecognized arguments: --steps"),
    (["out=caf\udce9"], print, "an option is not in UTF-8, which JSON files need: rename what it names"),
    ([], raising(UserError("out=/x:art: cannot be written: [choose] another")), "out=/x:art: cannot be written: [choo"),
    ([], raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: .")), "out of memory: use smaller batches"),
    ([], raising(RuntimeError("CUDA error: no kernel image is available for\non")), "this torch has no kernels for"),
    ([], raising(ModuleNotFoundError(name="uvicorn")), "uvicorn is not installed: pip install -e '.[serve]'"),
    ([], lambda options: Path("no/such").read_text(), "no/such: No such file or directory\n"),
]


@pytest.mark.parametrize(("words", "work", "message"), ANSWERS)
def test_what_a_user_can_mend_is_one_line(bench, monkeypatch, tmp_path, words, work, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = bench(work, *words)
    assert (status, out, err.count("\n")) == (2 if words else 1, "", 1), "2: options are wrong"
    assert err.startswith(f"error: {message}")


def test_debug_shows_where_an_error_is_from(bench):
    with pytest.raises(UserError):
        bench(raising(UserError("x")), "--debug")


def test_a_command_that_is_interrupted_says_so(command, monkeypatch):
    def interrupt(checkpoint: Path, out_dir: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.convert.export_hf.export_checkpoint", interrupt)
    said = "error: interrupted; nothing was written\n"
    assert command("scripts/export_hf", "checkpoint=x", "out_dir=y") == (130, "", said)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("train.py -m dataset_dir=DATASET run_dir=FOLDER seed=1,2", "multirun.yaml"),
        ("scripts/report.py folders=FOLDER", "report.html"),
        ("scripts/bench.py out=FOLDER/a.json", "a.json"),
    ],
)
def test_a_file_of_the_users_is_not_replaced(command, dataset_dir, tmp_path, line, file):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 2, "loss": 3.0}\n')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text("mine")
    script, *options = line.replace("DATASET", str(dataset_dir)).replace("FOLDER", str(tmp_path)).split()
    result = command(script.removesuffix(".py"), *options)
    assert_one_line(result, f"{tmp_path / file} exists and is not from this command, which would replace it: rename it")
    assert (tmp_path / file).read_text() == "mine"


# ----- output that fails

FAILING = {  # ways to make file number n fail
    "no reader": "r, w = os.pipe(); os.close(r); os.dup2(w, n)",
    "full disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), n)",
}


def run_with_failing(way, files, script, *arguments, status=0):
    """Runs a script in a process in which writing to these files fails; returns what it printed."""
    source = f"import os, runpy\nfor n in {files}: {FAILING[way]}\nrunpy.run_path({script!r}, run_name='__main__')"
    (result,) = ranks.run(1, "-c", source, *arguments, status=status)
    return result


@pytest.mark.parametrize("way", FAILING)
def test_output_that_fails_does_not_stop_training(tiny_args, tmp_path, way):
    run_with_failing(way, [1, 2], "train.py", *tiny_args)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]


@pytest.mark.parametrize(
    ("way", "status", "err"),
    [
        ("no reader", 128 + signal.SIGPIPE, ""),
        ("full disk", 1, "error: standard output: No space left on device\n"),
    ],
)
def test_output_that_fails_ends_other_commands_as_it_ends_unix_tools(way, status, err):
    result = run_with_failing(way, [1], "scripts/inspect_dataset.py", "--help", status=status)
    assert result.err == err
