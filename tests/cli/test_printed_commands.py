"""Every command that a program prints for its user to type does what it should, as it is printed.

Commands in --help, docstrings, `make train` and the pages of docs/ run here until the actual work would begin.
Commands that depend on a program's results are listed in `PLACES`, with the tests that run them to their end.
"""

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
PLACES = {  # where a text says what to type, and the test that types it
    "configs/lm_eval.yaml": "test_extras_that_are_to_be_installed_exist",
    "configs/serve.yaml": "test_the_request_that_help_shows_is_answered",
    "cli/compose.py": "test_extras_that_are_to_be_installed_exist",
    "tools/editable_only.py": "test_a_wheel_is_refused_with_the_right_command_and_an_editable_install_is_not",
    "cli/command.py": "test_extras_that_are_to_be_installed_exist",
    "data/prepare/finish.py": "test_training_begins_by_the_command_that_is_printed",
    "data/prepare/spans.py": "test_a_damaged_span_is_named",
    "inference/sample.py": "test_a_small_model_learns_to_answer_questions_that_it_has_not_seen",
    "inference/server/completions.py": "test_a_small_model_learns_to_answer_questions_that_it_has_not_seen",
    "model/ops/kernels.py": "test_extras_that_are_to_be_installed_exist",
    "tools/convert/gqa.py": "test_the_settings_to_go_on_with_are_printed",
    "tools/convert/import_gpt2.py": "test_training_goes_on_by_the_command_that_is_printed",
    "trainer/distributed.py": "test_without_a_launcher_it_is_told_how",
    "trainer/loop.py": "test_halt_names_gradients_and_leaves_the_run_as_it_was",
}


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


def constants(path):
    """A module's strings, without its docstrings."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


ELSE_TO_TYPE = re.compile(r"\b(?:curl|sbatch) \S|\bpip install ")  # besides the commands that all --help are run for
TO_TYPE = re.compile(
    rf"{ELSE_TO_TYPE.pattern}|\b(?:python|torchrun) (?:[\w./-]|$)|run the command |go on with \w+\.py|\w\.py [\w.-]+="
)


def test_every_place_that_says_what_to_type_has_its_test():
    helps = {path for path in ROOT.glob("configs/*.yaml") if ELSE_TO_TYPE.search(path.read_text())}
    packages = ["cli", "common", "data", "inference", "model", "scripts", "tools", "trainer"]
    paths = [*ROOT.glob("*.py"), *(path for name in packages for path in (ROOT / name).rglob("*.py"))]
    found = helps | {path for path in paths if any(map(TO_TYPE.search, constants(path)))}
    assert {str(path.relative_to(ROOT)) for path in found} == set(PLACES)
    tests = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert set(PLACES.values()) <= tests


def test_extras_that_are_to_be_installed_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.split(r"\W", needed)[0] for needs in project["optional-dependencies"].values() for needed in needs}
    paths = [ROOT / place for place in PLACES]
    asked = re.findall(r"pip install (?:-e '\.\[([\w-]+)\]')?(\w*)", "".join(path.read_text() for path in paths))
    assert len(asked) >= 4
    known = [(extra, "") for extra in EXTRAS.values()]
    for extra, package in [*known, *filter(any, asked)]:
        assert extra in project["optional-dependencies"] if extra else package in packages


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
