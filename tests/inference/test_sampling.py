"""sample.py: prompts from everywhere, text that is never broken, conversations, sample.txt."""

import io
import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from printed import assert_one_line
from texts import BYTES, CHAT

from common.settings import UserError, decode
from data.tokenizers.build import RankTokenizer
from inference.engine import PROMPT_CHUNK, Engine, stream_text
from inference.generation import Generation, Request, TextStream
from inference.load import load
from inference.sample import Conversation, SampleConfig, run_sampling, take_turns
from model.gpt import GPT
from tools.convert.new_run import begin_run

pytestmark = pytest.mark.usefixtures("restored_torch")

ROOT = Path(__file__).resolve().parents[2]
ODD_PROMPT = """def f("a", 'b'): ${x} ${oc.env:HOME} {[(=,\\ ~$\n\té日🙂 #"""
EOT = BYTES.eot_id


@pytest.fixture
def run_dir(run_of):
    return run_of({"max_steps": 2})


@pytest.fixture
def gpt(tiny):
    torch.manual_seed(0)
    return GPT(tiny({"model.n_vocab": CHAT.n_vocab}).model).double().eval()


def make_config(**changes):
    return decode(SampleConfig, {"checkpoint": ".", "runtime": {}} | changes)


# The text of tokens


def stream_of(ids, stop=(), tokenizer=BYTES):
    """The pieces of text that come with each token, and the last."""
    stream = TextStream(tokenizer, stop)
    return [*map(stream.push, ids), stream.end()]


@pytest.mark.parametrize(("largest", "given", "n_threads"), [(10**9, None, 1), (1, None, 3), (10**9, "3", 3)])
def test_a_small_model_generates_in_one_thread(run_dir, monkeypatch, largest, given, n_threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(SampleConfig, "parameters_for_threads", largest)
    torch.set_num_threads(3)
    load(make_config(checkpoint=run_dir, runtime={"device": "cpu"}))
    assert torch.get_num_threads() == n_threads


def test_a_character_comes_when_it_is_whole():
    assert "|".join(stream_of("aé日🙂b".encode())) == "a||é|||日||||🙂|b|"


def test_what_could_begin_a_stop_string_waits():
    assert "|".join(stream_of(b"a<ENx<END>b", ["<END>"])) == "a||||<ENx|||||||"
    assert "|".join(stream_of(b"a<EN", ["<END>"])) == "a||||<EN"


def first_stop(text, stops):
    """The text before the stop string that is complete first; if several end there, before the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@pytest.mark.parametrize("n_characters", [1, 3])
def test_stop_strings_do_not_depend_on_where_tokens_end(n_characters):
    tokens = [bytes([i]) for i in range(256)]
    for n in range(2, n_characters + 1):
        tokens += ["".join(characters).encode() for characters in itertools.product("abé", repeat=n)]
    tokenizer = RankTokenizer("gpt2", tokens)
    for seed, stops in enumerate(itertools.product(["ab", "abab", "bé", "éé"], ["b", "aab", "abéa", "zz"])):
        ids = random.Random(seed).choices(range(256, tokenizer.eot_id) or b"ab", k=30)
        text = tokenizer.decode_bytes(ids).decode()
        assert "".join(stream_of(ids, stops, tokenizer)) == first_stop(text, stops)


# Continuations


def draw_these(monkeypatch, ids):
    """Let the model draw these tokens, and return the logits that it would have drawn each from."""
    drawn = iter(ids)
    seen = []

    def draw(logits, *_):
        seen.append(logits)
        token_id = next(drawn)
        if isinstance(token_id, KeyboardInterrupt):
            raise token_id
        return [token_id, *(next(drawn) for _ in logits[1:])]

    monkeypatch.setattr("inference.engine.sample_next_tokens", draw)
    return seen


@pytest.mark.parametrize(
    ("ids", "limits", "text", "n_tokens", "reason"),
    [
        ([*b"ab", EOT, *b"cd"], {}, "ab", 2, "end_of_text"),
        ([EOT], {}, "", 0, "end_of_text"),
        *(([*b"ab", marker, *b"cd"], {}, "ab", 2, "stop") for marker in (*CHAT.role_ids.values(), CHAT.end_id)),
        (b"abcdef", {"max_tokens": 3}, "abc", 3, "length"),
        (b"abcdef", {"stop": ["xx", "de"]}, "abc", 5, "stop"),
        (b"ab", {"stop": ["bc"], "max_tokens": 2}, "ab", 2, "length"),
        ("ab日".encode()[:-1], {"max_tokens": 4}, "ab\ufffd", 4, "length"),
    ],
)
def test_a_continuation_says_why_it_ends(gpt, monkeypatch, ids, limits, text, n_tokens, reason):
    draw_these(monkeypatch, ids)
    engine = Engine(gpt, CHAT.n_vocab, 1)
    one = Generation(Request(**{"ids": (EOT, *b"x"), "max_tokens": 200} | limits), CHAT)
    engine.submit([one])
    assert "".join(stream_text(engine, one)) == one.text
    assert (one.text, one.n_tokens, one.finish_reason) == (text, n_tokens, reason)


# Conversations


@pytest.mark.parametrize("attention", ["log_space", "softmax", "sliding_window"])
def test_the_model_reads_what_was_shown_and_every_answer_is_closed(tiny, monkeypatch, attention):
    """However it ended: by its end, a user's marker, the end of a text, a stop string, its limit, or at once."""
    gpt = GPT(tiny({"model.attention": {"name": attention}, "model.n_vocab": CHAT.n_vocab}).model).double().eval()
    ids = [*b"cd", CHAT.role_ids["user"], *b"e", EOT, *b"fEND", *b"gh\xe6\x97!", CHAT.end_id]
    logits = draw_these(monkeypatch, ids)
    talk = Conversation(gpt, CHAT, make_config(stop="END", max_new_tokens=5))
    read = [EOT]
    answers = ["cd", "e", "f", "gh\ufffd!", ""]
    for answer in answers:
        logits.clear()
        assert "".join(talk.answer("é?")) == answer
        read += CHAT.encode_chat([("user", "é?")], answer=True)
        with torch.no_grad():
            expected = gpt(torch.tensor([read]))[:, -1, : CHAT.n_vocab]
        torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-11)
        read += [*CHAT.encode(answer), CHAT.end_id]
    assert talk.text == "\n".join(f"> é?\n{answer}" for answer in answers)


def test_a_turn_of_a_conversation_reads_what_it_adds_and_less_than_a_chunk(gpt, monkeypatch):
    draw_these(monkeypatch, itertools.cycle([*b"cd", CHAT.end_id]))
    lengths = []
    gpt.register_forward_pre_hook(lambda gpt, inputs: lengths.append(inputs[0].shape[1]))
    talk = Conversation(gpt, CHAT, make_config())
    for turn in range(4):
        lengths.clear()
        assert "".join(talk.answer("x" * 700)) == "cd"
        prompt = 1 + 705 * turn + 702  # <|endoftext|>, messages between two markers, answers with their ends
        read_before = max(0, prompt - 705) // PROMPT_CHUNK * PROMPT_CHUNK
        assert sum(lengths) == prompt - read_before + 2  # "c" and "d"


def test_a_conversation_fills_learned_positions_and_no_more(tiny, monkeypatch):
    learned = {"model.position": {"name": "learned", "max_len": 16}, "model.n_vocab": CHAT.n_vocab}
    gpt = GPT(tiny(learned).model).double().eval()
    draw_these(monkeypatch, b"fghijklmnopqrstuvwxyz")
    talk = Conversation(gpt, CHAT, make_config())
    assert "".join(talk.answer("abcde")) == "fghijklm"
    with pytest.raises(UserError, match=r"a prompt of 20 tokens .* do not fit into the model's 16 learned positions"):
        list(talk.answer("1"))
    assert talk.text == "> abcde\nfghijklm"


# The command


def text_of(command, run_dir, *args):
    """Check that sample.py ended with status 0; return what it printed and stored."""
    options = ["runtime.device=cpu", "max_new_tokens=12", "temperature=5"]
    result = command("sample", f"checkpoint={run_dir}", *options, *args)
    assert result.status == 0, result.err
    stored = (run_dir / "sample.txt").read_text()
    for text in stored.removesuffix("\n").split("\n\n---\n\n"):
        assert text in result.out
    return stored


def test_a_prompt_comes_from_an_argument_or_standard_input(command, run_dir, monkeypatch):
    given = text_of(command, run_dir, f"prompt={ODD_PROMPT}")
    assert given.startswith(ODD_PROMPT)
    assert len(given) > len(ODD_PROMPT) + 1
    monkeypatch.setattr("sys.stdin", io.StringIO(ODD_PROMPT + "\n"))
    assert text_of(command, run_dir, "prompt=-") == given


def test_the_seed_decides_and_sample_i_has_seed_plus_i(command, run_dir):
    one = text_of(command, run_dir, "seed=1")
    two = text_of(command, run_dir, "seed=2")
    assert one != two
    both = text_of(command, run_dir, "seed=1", "num_samples=2")
    assert both == one.removesuffix("\n") + "\n\n---\n\n" + two


def test_prompts_of_a_file_are_continued_as_each_alone(command, run_dir, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\nzwei 日本\r\n  drei", encoding="utf-8")
    together = text_of(command, run_dir, f"prompts_file={prompts}", "num_samples=2", "micro_batch=3")
    alone = [text_of(command, run_dir, f"prompt={p}", "num_samples=2") for p in ("one", "zwei 日本", "  drei")]
    assert together == "\n---\n\n".join(alone)


def test_json_is_all_there_is_on_standard_output(command, run_dir, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\nzwei 日本\n", encoding="utf-8")
    options = ["runtime.device=cpu", "num_samples=2", "max_new_tokens=5", "seed=7", 'stop=["\\n", "END"]']
    result = command("sample", f"checkpoint={run_dir}", f"prompts_file={prompts}", "output=json", *options)
    records = [json.loads(line) for line in result.out.splitlines()]
    given = [(r["prompt"], r["seed"], r["prompt_tokens"]) for r in records]
    assert given == [("one", 7, 3), ("one", 8, 3), ("zwei 日本", 7, 11), ("zwei 日本", 8, 11)]
    for record in records:
        assert record["finish_reason"] in ("length", "stop", "end_of_text")
        assert "\n" not in record["text"]
    stored = "\n\n---\n\n".join(r["prompt"] + r["text"] for r in records) + "\n"
    assert (run_dir / "sample.txt").read_text(encoding="utf-8") == stored
    assert f"({sum(r['tokens'] for r in records)} tokens, " in result.err


@pytest.mark.parametrize(
    ("given", "stop"),
    [
        ("END", ("END",)),
        ("\\n\\tif", ("\n\tif",)),
        ('["\\n", "[b]"]', ("\n", "[b]")),
        ("[]", ()),
    ],
)
def test_stop_strings_are_read_as_people_give_them(given, stop):
    assert make_config(stop=given).stop == stop


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "[a, b]"}, "give a text, or a JSON list"),
        ({"prompt": "a", "prompts_file": "b"}, "prompt and prompts_file are both given"),
        ({"interactive": True, "prompt": "-"}, "begins with one prompt"),
        ({"system": "a"}, "system is for conversations: give interactive=true or message"),
    ],
)
def test_what_does_not_go_is_refused(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_config(**changes)


def test_what_is_interrupted_is_kept(run_dir, monkeypatch, capsys):
    draw_these(monkeypatch, [*b"abc", KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        run_sampling(make_config(checkpoint=run_dir, prompt="x"))
    assert (run_dir / "sample.txt").read_text() == "xabc\n"
    out, err = capsys.readouterr()
    assert out == "xabc\n"
    assert "written to " in err


def test_a_chat_model_answers_messages_and_another_says_what_it_does(command, run_dir, gpt, tmp_path, monkeypatch):
    begin_run(gpt, CHAT, tmp_path / "chat", seq_len=16, batch_tokens=64)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n4+\\\n2?\n"))
    typed = [f"checkpoint={tmp_path / 'chat'}", "runtime.device=cpu"]
    draw_these(monkeypatch, [*b"5", CHAT.end_id] * 5)
    chat = command("sample", *typed, "interactive=true", "prompt=2+3?")
    assert chat.status == 0, chat.err
    assert chat.out == "> 2+3?\n5\n> 4+\n2?\n5\n"
    assert (tmp_path / "chat" / "sample.txt").read_text() == chat.out
    assert "Type a message, and the model answers. End a line" in chat.err
    asked = json.loads(command("sample", *typed, "message=2+3?", "system=Sum.", "output=json").out)
    assert (asked["text"], asked["prompt_tokens"]) == ("5", len("2+3?Sum.") + 3)
    assert command("sample", *typed, "message=2+3?").out == "> 2+3?\n5\n"
    continued = command("sample", *typed, "prompt=2+3?")
    assert continued.out == "2+3?5\n"
    assert "this chat model continues prompt as a text: to ask it a question, give message\n" in continued.err
    for option in ("message=a", "interactive=true"):
        asked = command("sample", f"checkpoint={run_dir}", "runtime.device=cpu", option)
        assert_one_line(asked, "is for chat models, which this is not")


def test_the_system_s_message_begins_a_conversation(command, gpt, monkeypatch):
    talk = Conversation(gpt, CHAT, make_config(interactive=True, system="Be <|end|>"))
    logits = draw_these(monkeypatch, [CHAT.end_id])
    list(talk.answer("a"))
    ids = [EOT, *CHAT.encode_chat([("system", "Be <|end|>"), ("user", "a")], answer=True)]
    with torch.no_grad():
        expected = gpt(torch.tensor([ids]))[:, -1, : CHAT.n_vocab]
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-11)
    assert_one_line(command("sample", "checkpoint=.", "message=a", "system=\udcff"), "is not in UTF-8")


def test_an_answer_of_a_conversation_can_be_interrupted(gpt, monkeypatch, capsys):
    """Ctrl-C ends the answer, and not the conversation."""
    draw_these(monkeypatch, [*b"ab", KeyboardInterrupt(), *b"cd", EOT])
    monkeypatch.setattr("sys.stdin", io.StringIO("x\ny\n"))
    talk = Conversation(gpt, CHAT, make_config())
    take_turns(talk)
    assert talk.text == "> x\nab\n> y\ncd"
    assert "> x\nab\n> y\ncd\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_compiler_which_takes_seconds_to_import_is_not_needed(run_dir):
    arguments = ["sample.py", f"checkpoint={run_dir}", "runtime.device=cpu", "prompt=a", "max_new_tokens=3"]
    code = f"import runpy, sys; sys.argv = {arguments}; runpy.run_path('sample.py', run_name='__main__'); "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
