"""Commands as users type them: a mistake gives one clear line, and a sweep trains every job."""

import json

import pytest
from printed import assert_one_line, snapshot

from runtime.checkpoint import find_newest

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ("optim.max_lrr=3", ["Could not override 'optim.max_lrr': did you mean 'optim.max_lr'?"]),
        ("model=heinsen_125", ["Could not find 'model/heinsen_125': did you mean 'model=heinsen_125m'?"]),
        ("optim.max_lr=inf", ["config optim.max_lr=inf: Input should be less than or equal to 1"]),
        ("runtime.device=gpu", ["runtime.device='gpu'", "'auto', 'cpu' or 'cuda'"]),
        ("run_dir=${oc.env:HOME}", ["Unsupported interpolation type oc.env"]),
        ("dataset_dir=/no/such", ["dataset_dir=/no/such", "prepare_data.py"]),
        ("runtime.device=cuda", ["runtime.device=cuda", "no GPU"]),
        ("batch_tokens=100", ["batch_tokens=100 is not divisible", "use 96"]),
        ("model/position=learned model.position.max_len=8", ["seq_len=16 is longer than the 8 learned positions"]),
        ("model/attention=longformer model.attention.n_global=17", ["n_global=17 is more than the seq_len=16"]),
        ("model/attention=softmax model/position=rotary model.n_head=16", ["turn pairs of features: use an even"]),
        ("model/position=rotary", ["rotary positions do not help log_space", "use position log_recurrence, learned"]),
        ("model.n_vocab=200", ["tokenizer bytes of 257 ids", "set model.n_vocab=257"]),
        ("optim.max_lr=1e30", ["step 2: loss is", "lower optim.max_lr=1e+30"]),
    ],
)
def test_a_mistake_is_one_clear_line(command, tiny_args, monkeypatch, arguments, fragments):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert_one_line(command("train", *tiny_args, *arguments.split()), *fragments)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (
            "prepare_data data=text data.path=lines.jsonl data.text_field=body",
            ["JSON without the text_field", "lines.jsonl:1 with 'text'"],
        ),
        ("prepare_data data=tokens data.path=ids.bin", ["ids without a header", "data.dtype=uint16 for nanoGPT's"]),
        ("prepare_data data=tokens data.path=ids.bin data.dtype=uint16", ["id out of range in 1 of the first 1"]),
        ("prepare_data data=tokens data.path=lines.jsonl", ["neither .bin nor .npy"]),
        ("prepare_data data=hf data.path=notes/a.txt", ["a.txt: data=hf reads .parquet, .arrow, ", "give data=text"]),
        ("prepare_data data=text data.path=a.csv.gz", ["left out: a.csv.gz (CSV: use data=hf)"]),
        ("prepare_data data=stdlib tokenizer=hf", ["Missing mandatory value: tokenizer.path"]),
        ("prepare_data data=stdlib tokenizer=hf tokenizer.path=lines.jsonl", ["path=lines.jsonl cannot be used"]),
        ("train_tokenizer n_vocab=4096", ["Missing mandatory value: dataset_dir"]),
        ("train_tokenizer n_vocab=256 dataset_dir=dataset", ["n_vocab=256 is too small", "are 257"]),
        ("train_tokenizer n_vocab=90000 dataset_dir=dataset", ["more than the text of dataset gives", "at most n_vo"]),
        ("inspect_dataset", ["give dataset_dir, or run_dir and step"]),
        (f"inspect_dataset run_dir=nowhere step={10**30}", ["give less than 9223372036854775808"]),
    ],
)
def test_a_mistake_with_data_is_one_clear_line(command, dataset_dir, tmp_path, monkeypatch, arguments, fragments):
    script, *options = arguments.split()
    if "tokenizer" in arguments and fragments[0] != "Missing mandatory value: dataset_dir":
        pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install -e '.[tokenizers]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("text")
    (tmp_path / "a.csv.gz").touch()
    (tmp_path / "lines.jsonl").write_text('{"text": "text"}\n')
    (tmp_path / "ids.bin").write_bytes(bytes([1, 0, 2, 1]))
    (tmp_path / "dataset").symlink_to(dataset_dir)
    if script == "prepare_data":
        options = ["tokenizer=bytes", "out_dir=out", "workers=1", *options]
    assert_one_line(command(f"scripts/{script}", *options), *fragments)


def test_nothing_of_a_run_is_lost_by_mistakes(command, tiny_args, tmp_path, make_dataset):
    assert command("train", *tiny_args, "stop_at=4").status == 0
    before = snapshot(tmp_path / "run")
    other = make_dataset(seed=2)
    mistakes = {
        "resume=never": "holds a run, and resume=never",
        "model.n_embd=32": "another run: model.n_embd=32 (checkpoint: 16)",
        "seq_len=32": "seq_len=32 (checkpoint: 16)",
        f"dataset_dir={other}": f"whose content is not that of dataset_dir={other}",
        "optim.max_lr=-1": "optim.max_lr=-1",
    }
    for mistake, fragment in mistakes.items():
        assert_one_line(command("train", *tiny_args, mistake), fragment)
        assert snapshot(tmp_path / "run") == before, mistake
    assert command("train", *tiny_args).status == 0
    assert find_newest(tmp_path / "run").name == "step-00000006"


def test_under_torchrun_other_processes_than_the_first_give_their_number(command, tiny_args, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # torchrun ends them meanwhile
    for rank, beginning in (("0", "error: config max_steps=0"), ("1", "error: process 1: config max_steps=0")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        result = command("train", *tiny_args, "max_steps=0")
        assert result.status == 2
        assert result.err.startswith(beginning)


def test_a_sweep_trains_every_job_in_a_directory_of_its_own(command, tiny_args, tmp_path):
    result = command("train", "-m", *tiny_args, "max_steps=2", "optim.max_lr=1e-3,1e-2", "seed=1,2")
    assert result.status == 0, result.err
    runs = sorted(p.parent for p in (tmp_path / "run").glob("*/config.json"))
    configs = [json.loads((run / "config.json").read_text())["config"] for run in runs]
    assert sorted((c["optim"]["max_lr"], c["seed"]) for c in configs) == [(1e-3, 1), (1e-3, 2), (1e-2, 1), (1e-2, 2)]
    for run, config in zip(runs, configs, strict=True):
        assert config["run_dir"] == str(run)
        assert find_newest(run).name == "step-00000002"
    weights = {(find_newest(run) / "model.safetensors").read_bytes() for run in runs}
    assert len(weights) == 4


@pytest.mark.slow
def test_a_failing_job_does_not_stop_the_others_but_the_sweep_fails(command, tiny_args, tmp_path):
    result = command("train", "-m", *tiny_args, "optim.max_lr=1e30,1e-2,1e-3")
    assert result.status == 1
    assert result.err.count("lower optim.max_lr=1e+30") == 1
    assert "some jobs of the sweep failed (see above: optim.max_lr=1e+30). Fix the cause and run" in result.err
    assert "Traceback" not in result.err
    finished = [p for p in (tmp_path / "run").iterdir() if p.is_dir() and find_newest(p)]
    assert len(finished) == 2
