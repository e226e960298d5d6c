"""Samples at evaluations, which change nothing else."""

import pytest
from test_resume import assert_same_run

from common.settings import decode
from data.tokenizers.build import BytesConfig, build_tokenizer
from data.tokenizers.chat import ChatTokenizer
from runtime.checkpoint import find_newest
from trainer.loop import fit
from trainer.records.samples import read_prompt

pytestmark = pytest.mark.usefixtures("restored_torch")

PROMPT = 'def f("é", [\n'


def samples(run_dir):
    """What samples.txt has, by the headings."""
    texts = (run_dir / "samples.txt").read_text(encoding="utf-8").split("--- step ")
    return dict(text.split("\n", 1) for text in texts[1:])


@pytest.mark.slow
def test_samples_are_printed_and_written_and_training_stays_as_it_is(tiny, tmp_path, capsys):
    sampled = {"eval.prompt": PROMPT}
    fit(tiny({"run_dir": tmp_path / "plain"}))
    assert not (tmp_path / "plain" / "samples.txt").exists()
    fit(tiny(sampled | {"run_dir": tmp_path / "whole"}))
    out = capsys.readouterr().out
    for stop_at in (4, None):
        fit(tiny(sampled | {"stop_at": stop_at}))
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    found = samples(tmp_path / "run")
    assert found == samples(tmp_path / "whole")
    assert list(found) == ["3", "6"]
    assert all(text.startswith(PROMPT) and len(text) > len(PROMPT) + 50 for text in found.values())
    assert 'step 3 writes:\n  | def f("é", [\n  | ' in out
    plain, run = (find_newest(tmp_path / name) for name in ("plain", "run"))
    for name in ("model", "optimizer", "random"):
        assert (plain / f"{name}.safetensors").read_bytes() == (run / f"{name}.safetensors").read_bytes()


def test_processes_write_the_sample_of_one(train_in_processes, command, tiny_args, tmp_path):
    more = ["eval.prompt=def ", "max_steps=3"]
    alone = command("train", *tiny_args, *more, "runtime.dtype=float64", f"run_dir={tmp_path / 'one'}")
    assert alone.status == 0, alone.err
    two = train_in_processes("two", 2, *more, "runtime.strategy=fsdp")
    assert samples(two) == samples(tmp_path / "one")


def test_a_prompt_of_a_chat_model_is_a_message():
    chat = ChatTokenizer(build_tokenizer(decode(BytesConfig, {"name": "bytes"})))
    assert read_prompt("hi", chat, None) == ("hi\n", [256, 258, *b"hi", chat.assistant_id])
