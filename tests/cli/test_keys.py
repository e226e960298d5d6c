"""Values of keys: what is wrong gets one plain sentence, names are texts, and ~ is home."""

import runpy
import shutil
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal, get_args, get_origin

import pytest
import yaml
from printed import assert_one_line
from pydantic import create_model

import cli
from common.settings import Settings, UserError, decode
from runtime.checkpoint import find_newest

pytestmark = pytest.mark.usefixtures("restored_torch")

ROOT = Path(__file__).resolve().parents[2]
WRONG = ["abc", -1, 2.5, 1e99, 2**70, float("nan"), True, [[]], {"a": "b"}]


def types_in(annotation):
    """The classes and literals in an annotation, without those that hold them."""
    inner = () if get_origin(annotation) is Literal else get_args(annotation)
    return {annotation} if not inner else set().union(*map(types_in, inner))


def sections_in(cls):
    """A class of settings, and those of its fields."""
    inner = [kind for field in cls.model_fields.values() for kind in types_in(field.annotation)]
    return {cls}.union(*(sections_in(kind) for kind in inner if isinstance(kind, type) and issubclass(kind, Settings)))


@pytest.fixture(scope="module")
def settings_classes():
    """The classes of all commands' settings, and of their sections."""
    found = set()

    def note(name, run, settings=None, **_):
        if settings:
            found.update(sections_in(resolve_name(settings)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "command", note)
        for path in [ROOT / "train.py", ROOT / "eval.py", ROOT / "sample.py", *ROOT.glob("scripts/*.py")]:
            runpy.run_path(str(path), run_name="__main__")
    return found


def answer(cls, settings):
    """The error of wrong settings, or nothing."""
    try:
        decode(cls, settings)
    except UserError as error:
        return [str(error)]
    return []


@pytest.mark.slow
def test_a_wrong_value_of_any_key_is_one_line(settings_classes):
    n_refused = 0
    fields = {f"{name} {field}": (name, field) for cls in settings_classes for name, field in cls.model_fields.items()}
    for name, field in fields.values():
        alone = create_model("Alone", __base__=Settings, **{name: (field.annotation, field)})
        answers = [line for value in WRONG for line in answer(alone, {name: value})]
        assert [line for line in answers if not line.startswith(f"config {name}") or "\n" in line] == []
        n_refused += len(answers)
    assert n_refused > 1500


@pytest.mark.parametrize("name", ["1e3", "20261127_0303", "true", "007"])
@pytest.mark.slow
def test_a_number_is_a_name_where_the_settings_have_a_text(command, name):
    options = [f"run_dir={name}", f"dataset_dir={name}", "tracker=wandb", f"tracker.wandb.project={name}"]
    shown = yaml.safe_load(command("train", "--cfg", "job", *options, "max_steps=1e3").out)
    assert [shown["run_dir"], shown["dataset_dir"], shown["tracker"]["wandb"]["project"]] == [name] * 3
    assert shown["max_steps"] == 1000
    assert command("train", "--cfg", "run_dir", *options).out == f"{name}\n"
    assert "invalid choice: 'run_dir'" in command("eval", "--cfg", "run_dir", "checkpoint=x").err


@pytest.mark.slow
def test_home_is_a_tilde(command, tmp_path, dataset_dir, tiny_args, monkeypatch):
    """In a run's and a dataset's folder, in a sweep's, and where a run goes on by its folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(dataset_dir, tmp_path / "data set")
    options = [*tiny_args, "run_dir=~/run", "dataset_dir=~/data set", "stop_at=1"]
    assert command("train", *options).status == 0
    assert command("train", "run_dir=~/run", "stop_at=2").status == 0
    assert find_newest(tmp_path / "run").name == "step-00000002"
    assert command("train", "-m", *options, "run_dir=~/sweep", "seed=1,2").status == 0
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("script", "option", "fragment"),
    [
        ("train", "run_dir=s3://a/b", "names a server: give a plain path"),
        ("scripts/report", "folders=a,b\x1b[1m", r"folders='a,b\x1b[1m': it has a control character"),
        ("scripts/prepare_data", "data.path=a\tb", r"config data.path='a\tb': it has a control character"),
    ],
)
def test_control_characters_are_refused_in_one_line(command, script, option, fragment):
    more = {"train": ["dataset_dir=x"], "scripts/report": [], "scripts/prepare_data": ["data=text", "out_dir=x"]}
    assert_one_line(command(script, *more[script], option), fragment)
