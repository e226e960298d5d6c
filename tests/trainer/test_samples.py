"""Samples at evaluations, which change nothing else."""

import json

import pytest
from test_resume import assert_same_run

from common.settings import UserError, decode
from data.chat import ChatTokenizer
from data.tokenizer import BytesConfig, NoneConfig, build_tokenizer
from runtime.checkpoint import newest
from trainer.loop import fit
from trainer.samples import read_prompt

pytestmark = pytest.mark.usefixtures("restored_torch")

PROMPT = 'def f("é", [\n'


def samples(run_dir):
    """What samples.txt has, by the headings."""
    texts = (run_dir / "samples.txt").read_text(encoding="utf-8").split("--- step ")
    return dict(text.split("\n", 1) for text in texts[1:])


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
    plain, run = (newest(tmp_path / name) for name in ("plain", "run"))
    for name in ("model", "optimizer", "random"):
        assert (plain / f"{name}.safetensors").read_bytes() == (run / f"{name}.safetensors").read_bytes()


def test_samples_that_cannot_be_written_do_not_stop_training(tiny, capsys):
    (tiny().run_dir / "samples.txt.tmp").mkdir(parents=True)
    fit(tiny({"eval.prompt": "a", "max_steps": 3}))
    assert f"warning: {tiny().run_dir / 'samples.txt'} was not written: Is a directory\n" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_processes_write_the_sample_of_one(train_in_processes, command, tiny_args, tmp_path, strategy):
    more = ["eval.prompt=def ", "max_steps=3"]
    alone = command("train", *tiny_args, *more, "runtime.dtype=float64", f"run_dir={tmp_path / 'one'}")
    assert alone.status == 0, alone.err
    two = train_in_processes("two", 2, *more, f"runtime.strategy={strategy}")
    assert samples(two) == samples(tmp_path / "one")


def test_learned_positions_limit_a_sample(tiny):
    learned = {"model.position": {"name": "learned", "max_len": 16}, "max_steps": 3}
    with pytest.raises(UserError, match=r"eval.prompt has 17 tokens, more than the model's 16 positions: shorten it"):
        fit(tiny(learned | {"eval.prompt": "a" * 16}))
    fit(tiny(learned | {"eval.prompt": "a" * 15}))
    (text,) = samples(tiny().run_dir).values()
    assert text.startswith("a" * 15)
    assert len(text.encode(errors="replace")) <= 15 + len("\n") + len("\ufffd".encode())


@pytest.mark.parametrize(
    ("prompt", "read"), [("1, 2", ("1, 2", [10, 1, 2])), ("def (", ("", [10])), ("10 11", ("", [10]))]
)
def test_data_without_text_gets_the_ids_of_a_prompt_or_none(prompt, read):
    ids = build_tokenizer(decode(NoneConfig, {"name": "none", "n_vocab": 10, "eot_id": None}))
    assert read_prompt(prompt, ids, None) == read


def test_a_prompt_of_a_chat_model_is_a_message():
    chat = ChatTokenizer(build_tokenizer(decode(BytesConfig, {"name": "bytes"})))
    assert read_prompt("hi", chat, None) == ("hi\n", [256, 258, *b"hi", chat.assistant_id])


def test_a_prompt_on_the_command_line_is_taken_as_it_is(command, tiny_args, tmp_path):
    for i, (typed, prompt) in enumerate([(PROMPT, PROMPT), ("${x}", "${x}"), ("1", "1"), ("null", None)]):
        run_dir = tmp_path / str(i)
        assert command("train", *tiny_args, "max_steps=1", f"run_dir={run_dir}", f"eval.prompt={typed}").status == 0
        assert json.loads((run_dir / "config.json").read_text())["config"]["eval"]["prompt"] == prompt
