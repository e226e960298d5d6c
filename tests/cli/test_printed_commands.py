"""Commands in --help, docstrings, `make train` and the pages of docs/ run until the actual work would begin."""

import ast
import functools
import json
import re
import shlex
import shutil
import subprocess
import textwrap
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hypothesis import given, settings
from hypothesis import strategies as st
from printed import commands_in

from cli import compose, to_dict
from cli.command import EXTRAS
from cli.compose import read_options
from common.command_line import overrides
from common.settings import decode
from trainer.config import TrainConfig

pytestmark = pytest.mark.usefixtures("restored_torch")

ROOT = Path(__file__).resolve().parents[2]
WORK = {  # what a script calls once it has read its command line and everything that this names, apart from files
    "train": "trainer.loop.fit",
    "eval": "inference.evaluate.run_evaluation",
    "sample": "inference.sample.run_sampling",
    "scripts/bench": "tools.bench.run.bench",
    "scripts/convert_gqa": "tools.convert.gqa.convert",
    "scripts/count": "tools.count.counted",
    "scripts/doctor": "tools.doctor.examine",
    "scripts/export_hf": "tools.convert.export_hf.export",
    "scripts/gpu_hour": "tools.bench.gpu_hour.run",
    "scripts/import_gpt2": "tools.convert.import_gpt2.import_gpt2",
    "scripts/inspect_dataset": "tools.inspect_dataset.inspect",
    "scripts/lm_eval": "inference.harness.run_harness",
    "scripts/plan": "tools.plan.run_plan",
    "scripts/prepare_data": "data.prepare.dataset.prepare",
    "scripts/report": "tools.report.write_report",
    "scripts/serve": "inference.server.serve.serve",
    "scripts/train_tokenizer": "data.prepare.vocabulary.learn",
    "scripts/verify_dataset": "data.prepare.verify.verify",
}
NEEDS = {
    "scripts/serve": "uvicorn",
    "scripts/train_tokenizer": "tokenizers",
}
SCRIPTS = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.glob("scripts/*.py"))


class AtWork(BaseException):
    """The command has reached its actual work."""


@pytest.fixture
def goes_to_work(command, monkeypatch, tmp_path):
    """Runs a printed command in this process, in an empty folder, up to the work; in a sweep, all jobs reach it."""
    monkeypatch.chdir(tmp_path)

    def work():
        arrived.append(True)
        if not in_sweep:
            raise AtWork
        return 0.0  # a validation loss

    arrived, in_sweep = [], False

    def go(script, arguments):
        nonlocal in_sweep
        arrived.clear()
        in_sweep = "-m" in arguments
        line = shlex.join(["python", f"{script}.py", *arguments])
        with monkeypatch.context() as patch:
            for name in WORK[script].split():
                original = resolve_name(name)
                patch.setattr(name, functools.wraps(original)(lambda *_, **__: work()))
            patch.setattr("trainer.loop.check", lambda config: None)  # of a sweep's data, which there is not
            try:
                result = command(script, *arguments)
            except AtWork:
                return 1
        assert (result.status, result.err) == (0, ""), line
        assert in_sweep, f"{line} has ended before its work"
        return len(arrived)

    return go


def docstring(script):
    return ast.get_docstring(ast.parse((ROOT / f"{script}.py").read_text()), clean=False)


@pytest.mark.parametrize("script", WORK)
def test_the_commands_of_a_help_and_of_a_docstring_reach_their_work(command, goes_to_work, tmp_path, script):
    pytest.importorskip(NEEDS.get(script, "torch"))
    text = f"{docstring(script)}\n{command(script, '--help').out}"
    typed = []
    for one in commands_in(text):
        if one not in typed:
            typed.append(one)
    assert script in [one.script for one in typed]
    for one in typed:
        n_jobs = goes_to_work(*one)
        assert n_jobs == (4 if "-m" in one.arguments else 1), one


def test_all_scripts_are_typed():
    assert sorted(WORK) == ["eval", "sample", *SCRIPTS, "train"]


def write_run(folder):
    """What `run_dir=` alone reads of a run."""
    folder.mkdir(parents=True)
    settings = decode(TrainConfig, to_dict(compose("train", ["experiment=quickstart"]))).model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps({"config": settings}))


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_what_make_train_says_is_next_reaches_its_work(goes_to_work, tmp_path):
    recipe = ["make", "-n", "--no-print-directory", "-o", ".venv/installed", "train"]
    lines = subprocess.run(recipe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    end = lines.index(r"printf '\nNext:\n'")
    said = subprocess.run(["sh", "-c", "\n".join(lines[end:])], capture_output=True, text=True, check=True).stdout
    typed = commands_in(said)
    assert [one.script for one in typed] == ["eval", "sample", "train", "train", "train"]
    write_run(tmp_path / "runs" / "demo")
    assert [goes_to_work(*one) for one in typed] == [1, 1, 1, 1, 4]


@pytest.mark.filterwarnings("ignore")  # optuna's
@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda path: path.stem)
@pytest.mark.slow
def test_the_commands_of_a_page_reach_their_work(goes_to_work, tmp_path, page):
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
            assert goes_to_work(*one) >= 1


def test_extras_that_are_to_be_installed_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = "".join(
        path.read_text() for name in ("cli", "model", "tools", "configs") for path in ROOT.glob(f"{name}/**/*.*")
    )
    asked = re.findall(r"pip install -e '\.\[([\w-]+)\]'", text)
    assert {*EXTRAS.values(), *asked} <= project["optional-dependencies"].keys()


WORDS = ["d4", "1 .", "it's", "c:\\", r"c:\x\'", "1", "1e3", "NULL", "x=1", "[x]", "{a: 1}", "a,b", "~", "日本"]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"])) | st.sampled_from(WORDS))
def test_settings_are_printed_as_a_command_line_takes_them(text):
    for value in (text, [text, {"name": text, "n": 1}, None, True, 6e-5]):
        (typed,) = shlex.split(overrides({"a.key": value}))
        (parsed,) = OverridesParser.create().parse_overrides(read_options([typed]))
        assert (parsed.key_or_group, plain(parsed.value())) == ("a.key", value)
    assert overrides({"key": "runs/data set", "b": "a b/x=1"}) == "'key=runs/data set' 'b=a b/x=1'"
    assert overrides({"key": "runs/s/optim.max_lr=0.001,seed=1"}) == "key=runs/s/optim.max_lr=0.001,seed=1"


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.text if isinstance(value, QuotedString) else value
