"""sample.py: prompts from everywhere, text that is never broken, samples.txt."""

import io
import shutil

import pytest
import torch

from common.settings import UserError, decode
from data.tokenizer import BytesConfig, build_tokenizer
from model.gpt import GPT
from trainer.checkpoint import newest
from trainer.loop import fit
from trainer.runtime import Runtime
from trainer.sampling import SampleConfig, check_length, run_sampling, stream

pytestmark = pytest.mark.usefixtures("restored_torch")

ODD_PROMPT = """def f("a", 'b'): ${x} ${oc.env:HOME} {[(=,\\ ~$\n\té日🙂 #"""
CPU = Runtime(torch.device("cpu"), torch.float32)


@pytest.fixture
def run_dir(tiny):
    fit(tiny({"max_steps": 2}))
    return tiny().run_dir


def make_config(**changes):
    return decode(SampleConfig, {"checkpoint": ".", "runtime": {}} | changes)


@pytest.fixture
def stream_of(tiny, monkeypatch):
    """Streams given token ids as if the model had sampled them."""

    def run(ids, **changes):
        monkeypatch.setattr("trainer.sampling.generate", lambda *_, **__: (torch.tensor([i]) for i in ids))
        gpt, tokenizer = GPT(tiny().model), build_tokenizer(BytesConfig(name="bytes"))
        return list(stream(gpt, tokenizer, "", make_config(**changes), 1, CPU))

    return run


def test_a_character_is_shown_when_it_is_whole(stream_of):
    pieces = stream_of("aé日🙂b".encode())
    assert pieces == ["a", "", "é", "", "", "日", "", "", "", "🙂", "b"]


def test_bytes_that_are_no_character_are_marked(stream_of):
    assert "".join(stream_of(b"a\xff\xe6\x97b\xf0\x9f")) == "a\ufffd\ufffdb\ufffd"


def test_the_end_of_a_text_ends_the_sample(stream_of):
    assert "".join(stream_of([*b"ab", 256, *b"cd"])) == "ab"


def test_max_new_tokens_ends_the_sample(stream_of):
    assert "".join(stream_of([*b"abcdef"], max_new_tokens=3)) == "abc"


def text_of(command, run_dir, *args):
    """What sample.py printed and stored, its status being 0."""
    options = ["runtime.device=cpu", "max_new_tokens=12", "temperature=5"]
    result = command("sample", f"checkpoint={run_dir}", *options, *args)
    assert result.status == 0, result.err
    stored = (run_dir / "samples.txt").read_text()
    for text in stored.removesuffix("\n").split("\n\n---\n\n"):
        assert text in result.out
    return stored


def test_prompt_from_argument_file_and_standard_input(command, run_dir, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text(ODD_PROMPT, encoding="utf-8")
    given = text_of(command, run_dir, f"prompt={ODD_PROMPT}")
    assert given.startswith(ODD_PROMPT)
    assert len(given) > len(ODD_PROMPT) + 1
    assert text_of(command, run_dir, f"prompt_file={tmp_path / 'prompt.txt'}") == given
    monkeypatch.setattr("sys.stdin", io.StringIO(ODD_PROMPT))
    assert text_of(command, run_dir, "prompt=-") == given


def test_the_seed_decides_and_sample_i_has_seed_plus_i(command, run_dir):
    one, again, two = (text_of(command, run_dir, f"seed={seed}") for seed in (1, 1, 2))
    assert one == again != two
    both = text_of(command, run_dir, "num_samples=2")
    assert both == one.removesuffix("\n") + "\n\n---\n\n" + two


def test_the_number_of_sampled_tokens_is_told(command, run_dir, monkeypatch):
    monkeypatch.setattr("trainer.sampling.generate", lambda *_, **__: (torch.tensor([i]) for i in b"xyz"))
    result = command("sample", f"checkpoint={run_dir}", "runtime.device=cpu", "prompt=abc", "num_samples=2")
    assert result.out.count("abcxyz\n") == 2
    assert "(6 tokens, " in result.out


def test_learned_positions_are_used_to_the_last_and_no_further(tiny):
    gpt = GPT(tiny({"model.position": {"name": "learned", "max_len": 16}}).model)
    tokenizer = build_tokenizer(BytesConfig(name="bytes"))
    fits = make_config(max_new_tokens=12, top_k=None)  # <|endoftext|>, 4 of the prompt, and 11 of 12 are read
    check_length(gpt, tokenizer, "abcd", fits)
    list(stream(gpt, tokenizer, "abcd", fits, 1, CPU))
    with pytest.raises(UserError, match=r"prompt of 6 tokens and max_new_tokens=12 are more than the .* 16 learned"):
        check_length(gpt, tokenizer, "abcde", fits)


def test_what_is_interrupted_is_kept(run_dir, monkeypatch):
    def interrupted(*_):
        yield "abc"
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.sampling.stream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sampling(make_config(checkpoint=run_dir, prompt="x"))
    assert (run_dir / "samples.txt").read_text() == "xabc\n"


def test_a_run_that_cannot_be_written_to_is_sampled_all_the_same(command, run_dir, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("trainer.checkpoint.write_atomic", refuse)
    result = command("sample", f"checkpoint={run_dir}", "runtime.device=cpu", "prompt=x", "max_new_tokens=3")
    assert result.status == 0
    assert "samples.txt was not written: Read-only file system" in result.err


def test_a_checkpoint_alone_gets_its_sample_beside_it(command, run_dir, tmp_path):
    alone = shutil.copytree(newest(run_dir), tmp_path / "copy" / "step-00000006")
    (alone / "optimizer.safetensors").unlink()  # not needed to sample
    result = command("sample", f"checkpoint={alone}", "runtime.device=cpu", "prompt=x", "max_new_tokens=3")
    assert result.status == 0, result.err
    assert (alone / "samples.txt").read_text().startswith("x")
