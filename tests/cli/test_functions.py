"""The commands as functions of Python: they take the same options, and return what a notebook needs."""

import json
import re
from pathlib import Path

import pytest

from common.settings import UserError
from eval import evaluate
from inference.engine import generate
from runtime.checkpoint import load_model
from sample import sample
from scripts.prepare_data import prepare
from train import train
from trainer.config import TrainConfig

pytestmark = pytest.mark.usefixtures("restored_torch")

ROOT = Path(__file__).resolve().parents[2]


def test_train_returns_the_model_its_tokenizer_and_its_metrics(tiny_args, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.launch.launch_processes", None)  # it would start processes
    options = [option for option in tiny_args if "max_steps" not in option]
    trained = train(*options, "runtime.processes=2", max_steps=3, optim={"max_lr": 2e-2}, run_dir=tmp_path / "mine")
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    assert trained.metrics == [json.loads(line) for line in lines]
    assert [line["step"] for line in trained.metrics if "loss" in line] == [1, 2, 3]
    assert max(line["lr"] for line in trained.metrics if "loss" in line) == 2e-2
    saved, tokenizer = load_model(tmp_path / "mine")
    assert all(weight.equal(saved.state_dict()[name]) for name, weight in trained.gpt.state_dict().items())
    assert trained.tokenizer.sha256 == tokenizer.sha256


def test_evaluate_returns_eval_json(run_of):
    run_dir = run_of()
    result = evaluate("runtime.device=cpu", checkpoint=run_dir, batches=2)
    assert result == json.loads((run_dir / "eval.json").read_text())
    assert result["batches"] == 2


def test_sample_returns_texts_and_reads_them_literally(run_of, capsys):
    run_dir = run_of()
    settings = {"checkpoint": run_dir, "max_new_tokens": 5, "num_samples": 2, "runtime": {"device": "cpu"}}
    texts = sample(prompt="${x} [1, 'é", **settings)
    lines = sample("prompt=${x} [1, 'é", "output=json", **settings)
    assert texts == lines
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [line["text"] for line in printed] == texts
    assert printed[0]["prompt"] == "${x} [1, 'é"
    (cut,) = sample(**settings | {"num_samples": 1, "stop": [texts[0][1]]})
    assert texts[0][1] not in cut


def test_generate_continues_a_text_as_sample_does(run_of):
    run_dir = run_of()
    texts = sample("runtime.device=cpu", "runtime.dtype=float32", checkpoint=run_dir, prompt="def")
    assert ["".join(generate(*load_model(run_dir), "def"))] == texts


def test_prepare_returns_the_folder_of_the_dataset(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    (tmp_path / "b.txt").write_text("more text " * 100)
    folder = prepare("data=text", f"data.path={tmp_path}", tokenizer="bytes", out_dir=tmp_path / "out", workers=1)
    assert folder == tmp_path / "out"
    assert json.loads((folder / "manifest.json").read_text())["tokenizer"]["name"] == "bytes"


@pytest.mark.parametrize(
    ("function", "options", "settings", "message"),
    [
        (train, [], {"run_dir": "x"}, "holds no run to continue"),
        (train, ["quickstart"], {}, "type experiment=quickstart"),
        (train, [], {"learning_rate": 1}, "type optim.max_lr"),
        (evaluate, [], {}, "Missing mandatory value: checkpoint"),
        (sample, [], {"checkpoint": "no/such"}, "no/such"),
    ],
)
def test_a_mistake_raises_a_user_error(function, options, settings, message):
    with pytest.raises(UserError, match=message):
        function(*options, **settings)


def test_a_stopped_run_raises_keyboard_interrupt(tiny_args, monkeypatch):
    monkeypatch.setattr("trainer.launch.fit", lambda config: exit(75))
    with pytest.raises(KeyboardInterrupt):
        train(*tiny_args)


def test_a_few_keywords_make_a_training_configuration():
    config = TrainConfig(dataset_dir="x", max_steps=5)
    assert (config.max_steps, config.batch_tokens, config.model.n_layer) == (5, 491_520, 12)
    assert (config.optim.name, config.schedule.name, config.tracker.wandb) == ("adamw", "one_cycle", None)


@pytest.mark.slow
def test_the_page_for_notebooks_does_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(ROOT / "model")  # the text that it trains on
    page = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8").replace("max_steps=100", "max_steps=3")
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    (line,) = names["plt"].gca().get_lines()
    assert len(line.get_xdata()) == 3
    assert 0 < names["loss"] < 6
    assert len(names["texts"]) == 2
    assert names["text"]
