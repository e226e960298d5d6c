"""sample.py: prompts from everywhere, text that is never broken, conversations, sample.txt."""

import io
import itertools
import json
import os
import pty
import random
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from printed import assert_one_line
from texts import BYTES, CHAT

from common.console import say_once, show
from common.settings import UserError, decode
from data.tokenizer import RankTokenizer
from inference.engine import Engine, stream
from inference.generation import Generation, TextStream
from inference.prefill import Request
from inference.sample import Conversation, SampleConfig, converse, read_prompts, run_sampling, say_rate
from inference.sampling import SamplingConfig
from model.gpt import GPT
from model.state import state_bytes
from runtime.checkpoint import newest
from tools.convert.new_run import begin_with
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")

ROOT = Path(__file__).resolve().parents[2]
ODD_PROMPT = """def f("a", 'b'): ${x} ${oc.env:HOME} {[(=,\\ ~$\n\té日🙂 #"""
EOT = BYTES.eot_id
LEARNED = {"model.position": {"name": "learned", "max_len": 16}}


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


def test_a_character_comes_when_it_is_whole():
    assert stream_of("aé日🙂b".encode()) == ["a", "", "é", "", "", "日", "", "", "", "🙂", "b", ""]


def test_bytes_that_are_no_character_are_marked():
    assert "".join(stream_of(b"a\xff\xe6\x97b\xf0\x9f")) == "a\ufffd\ufffdb\ufffd"


def test_what_could_begin_a_stop_string_waits():
    assert stream_of(b"a<ENx<END>b", ["<END>"]) == ["a", "", "", "", "<ENx", "", "", "", "", "", "", ""]
    assert stream_of(b"a<EN", ["<END>"]) == ["a", "", "", "", "<EN"]


def first_stop(text, stops):
    """The text before the stop string that is complete first; if several end there, before the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@pytest.mark.parametrize("n_characters", [1, 2, 3, 7])
def test_stop_strings_do_not_depend_on_where_tokens_end(n_characters):
    alphabet = [bytes([i]) for i in range(256)]
    longer = ["".join(c).encode() for n in range(2, n_characters + 1) for c in itertools.product("abé", repeat=n)][:400]
    tokenizer = RankTokenizer("gpt2", [*alphabet, *(token for token in longer if token not in alphabet)])
    for seed, stops in enumerate(itertools.product(["ab", "abab", "bé", "éé"], ["b", "aab", "abéa", "zz"])):
        ids = random.Random(seed).choices(range(256, tokenizer.eot_id) if longer else b"ab", k=30)
        text = tokenizer.decode_bytes(ids).decode()
        assert "".join(stream_of(ids, stops, tokenizer)) == first_stop(text, stops)


# Continuations


def completion(prompt, seed=1, max_tokens=10, stop=(), sampling=SamplingConfig()):  # noqa: B008
    return Generation(Request((EOT, *BYTES.encode(prompt)), max_tokens, sampling, seed, tuple(stop)), CHAT)


def draw_these(monkeypatch, ids):
    """Let the model draw these tokens."""
    drawn = iter(ids)
    monkeypatch.setattr("inference.engine.draw", lambda logits, *_: [next(drawn) for _ in logits])


@pytest.fixture
def continued(gpt, monkeypatch):
    """The only continuation, as if the model had drawn these tokens."""

    def run(ids, max_new_tokens=200, stop=()):
        draw_these(monkeypatch, ids)
        text, engine = completion("x", 1, max_new_tokens, stop), Engine(gpt, CHAT.n_vocab, 1)
        engine.submit([text])
        assert "".join(stream(engine, text)) == text.text
        return text

    return run


@pytest.mark.parametrize(
    ("ids", "limits", "text", "n_tokens", "reason"),
    [
        ([*b"ab", EOT, *b"cd"], {}, "ab", 2, "end_of_text"),
        ([EOT], {}, "", 0, "end_of_text"),
        *(([*b"ab", marker, *b"cd"], {}, "ab", 2, "stop") for marker in (*CHAT.role_ids.values(), CHAT.end_id)),
        (b"abcdef", {"max_new_tokens": 3}, "abc", 3, "length"),
        (b"abcdef", {"stop": ["xx", "de"]}, "abc", 5, "stop"),
        (b"ab", {"stop": ["bc"], "max_new_tokens": 2}, "ab", 2, "length"),
        ("ab日".encode()[:-1], {"max_new_tokens": 4}, "ab\ufffd", 4, "length"),
    ],
)
def test_a_continuation_says_why_it_ends(continued, ids, limits, text, n_tokens, reason):
    one = continued(ids, **limits)
    assert (one.text, one.n_tokens, one.finish_reason) == (text, n_tokens, reason)


# Conversations


def conversation_of(gpt, monkeypatch, ids, stop=()):
    draw_these(monkeypatch, ids)
    return Conversation(gpt, BYTES, Request((EOT,), stop=tuple(stop)))


def assert_has_read(conversation, gpt, ids):
    """The model's next token is that after these tokens."""
    conversation.add("")
    with torch.no_grad():
        expected = gpt(torch.tensor([[EOT, *ids]]))[:, -1]
    logits = conversation.request.before.logits
    torch.testing.assert_close(logits, expected[:, : logits.shape[1]], rtol=0, atol=1e-11)


@pytest.mark.parametrize("attention", ["log_space", "softmax", "sliding_window"])
def test_the_model_has_read_what_was_shown(tiny, monkeypatch, attention):
    gpt = GPT(tiny({"model.attention": {"name": attention}}).model).double().eval()
    talk = conversation_of(gpt, monkeypatch, [*b"cdENx", *"日".encode()[:2], *b"yEND", *b"pq", EOT], ["END"])
    talk.add("ab")
    assert "".join(talk.answer(7)) == "cdENx"  # and two bytes of a character, which are taken back
    assert_has_read(talk, gpt, b"abcdENx")
    assert "".join(talk.answer(100)) == "y"
    talk.add("z")
    assert_has_read(talk, gpt, b"abcdENxyz")
    assert "".join(talk.answer(100)) == "pq"
    assert talk.ended
    assert_has_read(talk, gpt, [*b"abcdENxyzpq", EOT])
    assert talk.text == "abcdENxyzpq"


def test_every_answer_is_closed_before_the_next_message(gpt, monkeypatch):
    """However it ended: by its end, a user's marker, the end of a text, cut within a character, or at once."""
    draw_these(monkeypatch, [*b"cd", CHAT.role_ids["user"], *b"e", EOT, *b"fgh\xe6", CHAT.end_id])
    answers = [(9, "cd"), (9, "e"), (2, "fg"), (2, "h"), (9, "")]
    talk, read = Conversation(gpt, CHAT, Request((EOT,))), []
    for n, answer in answers:
        talk.add("é?")
        assert "".join(talk.answer(n)) == answer
        assert not talk.ended
        read += CHAT.encode_chat([("user", "é?"), ("assistant", answer)])
        assert_has_read(talk, gpt, read)
    assert talk.text == "\n".join(f"> é?\n{answer}" for _, answer in answers)


def test_a_turn_of_a_conversation_reads_what_it_adds_and_its_state_does_not_grow(gpt, monkeypatch):
    draw_these(monkeypatch, itertools.cycle([*b"cd", CHAT.end_id]))
    lengths, sizes, forward = [], [], gpt.forward
    monkeypatch.setattr(gpt, "forward", lambda ids, *a, **k: (lengths.append(ids.shape[1]), forward(ids, *a, **k))[1])
    talk = Conversation(gpt, CHAT, Request((EOT,)))
    for _ in range(3):
        lengths.clear()
        talk.add("x" * 700)
        assert "".join(talk.answer(9)) == "cd"
        sizes.append(state_bytes(talk.request.before))
    assert sum(lengths) == 3 + 702 + 2  # the last answer with its end, a message between two markers, "c" and "d"
    assert len(set(sizes)) == 1


def test_who_stops_listening_ends_the_answer_there(gpt, monkeypatch):
    talk = conversation_of(gpt, monkeypatch, b"cdefgh")
    talk.add("ab")
    assert list(itertools.islice(talk.answer(100), 3)) == ["c", "d", "e"]
    assert_has_read(talk, gpt, b"abcde")


def test_answers_of_a_conversation_share_one_decoding_step(gpt, monkeypatch):
    """On a GPU its graphs are then recorded once."""
    talk = conversation_of(gpt, monkeypatch, b"abcdefghijkl")
    monkeypatch.setattr("inference.engine.DecodingStep", None)
    for _ in range(2):
        talk.add("x")
        assert "".join(talk.answer(5))


def test_a_conversation_fills_learned_positions_and_no_more(tiny, monkeypatch):
    gpt = GPT(tiny(LEARNED).model).double().eval()
    talk = conversation_of(gpt, monkeypatch, b"fghijklmnopqrstuvwxyz")
    talk.add("abcde")
    assert "".join(talk.answer(4)) == "fghi"
    with pytest.raises(UserError, match=r"a prompt of 17 tokens .* do not fit into the model's 16 learned positions"):
        talk.add("1234567")
    talk.add("12")
    assert "".join(talk.answer(100)) == "jklm"
    assert talk.left == 0
    assert list(talk.answer(100)) == []


def test_only_an_answer_that_the_model_ended_is_said_to_have_ended(tiny, monkeypatch, capsys):
    gpt = GPT(tiny(LEARNED).model).double().eval()
    talk = conversation_of(gpt, monkeypatch, [*b"cd", EOT, *b"ef"])
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n12345678901234567890\n"))
    converse(talk, 5)
    out = capsys.readouterr().out
    assert "cd\n(the model ends the text here)\n(a prompt of 26 tokens" in out
    assert out.count("the model ends the text") == 1


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


def test_a_prompt_comes_from_an_argument_a_file_or_standard_input(command, run_dir, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text(ODD_PROMPT, encoding="utf-8")
    given = text_of(command, run_dir, f"prompt={ODD_PROMPT}")
    assert given.startswith(ODD_PROMPT)
    assert len(given) > len(ODD_PROMPT) + 1
    assert text_of(command, run_dir, f"prompt_file={tmp_path / 'prompt.txt'}") == given
    monkeypatch.setattr("sys.stdin", io.StringIO(ODD_PROMPT))
    assert text_of(command, run_dir, "prompt=-") == given


@pytest.mark.parametrize(
    ("prompt", "read"), [("a\n", "a"), ("a\r\n\r\n", "a\r\n"), ("\n a \n\n", "\n a \n"), ("\ufeffa", "a"), ("", "")]
)
def test_a_file_and_standard_input_end_with_a_line_that_is_not_of_the_prompt(tmp_path, monkeypatch, prompt, read):
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    monkeypatch.setattr("sys.stdin", io.StringIO(prompt, newline=""))
    for source in ({"prompt_file": tmp_path / "prompt.txt"}, {"prompt": "-"}):
        assert read_prompts(make_config(**source)) == [read]
    assert read_prompts(make_config(prompt="a\n")) == ["a\n"]


def test_nothing_is_said_amid_a_text(tiny, monkeypatch):
    """Softmax attention prints once, in its first forward pass, which kernel it uses."""
    say_once.cache_clear()
    fit(tiny({"max_steps": 2, "model.attention": {"name": "softmax"}}))
    say_once.cache_clear()
    terminal = io.StringIO()  # where both outputs are seen
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    run_sampling(make_config(checkpoint=tiny().run_dir, prompt="def", max_new_tokens=5))
    before, text = terminal.getvalue().split("def", 1)
    assert before.endswith("softmax attention by torch's flash kernel\n")
    assert "softmax" not in text


def test_the_seed_decides_and_sample_i_has_seed_plus_i(command, run_dir):
    one, again, two = (text_of(command, run_dir, f"seed={seed}") for seed in (1, 1, 2))
    assert one == again != two
    both = text_of(command, run_dir, "num_samples=2")
    assert both == one.removesuffix("\n") + "\n\n---\n\n" + two


def test_prompts_of_a_file_are_continued_as_each_alone(command, run_dir, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\nzwei 日本\r\n  drei", encoding="utf-8")
    together = text_of(command, run_dir, f"prompts_file={tmp_path / 'prompts.txt'}", "num_samples=2", "micro_batch=3")
    alone = [text_of(command, run_dir, f"prompt={p}", "num_samples=2") for p in ("one", "zwei 日本", "  drei")]
    assert together.removesuffix("\n") == "\n\n---\n\n".join(text.removesuffix("\n") for text in alone)


def test_text_is_all_there_is_on_standard_output(command, run_dir, monkeypatch):
    draw_these(monkeypatch, b"xyz")
    result = command("sample", f"checkpoint={run_dir}", "runtime.device=cpu", "prompt=def", "max_new_tokens=3")
    assert result.out == (run_dir / "sample.txt").read_text() == "defxyz\n"
    assert "written to " in result.err
    assert re.search(r"^\(3 tokens, \d+ a second\)$", result.err, re.MULTILINE)


def test_json_is_all_there_is_on_standard_output(command, run_dir, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\nzwei 日本\n", encoding="utf-8")
    options = [f"prompts_file={tmp_path / 'prompts.txt'}", "output=json", "num_samples=2", "max_new_tokens=5", "seed=7"]
    result = command("sample", f"checkpoint={run_dir}", "runtime.device=cpu", 'stop=["\\n", "END"]', *options)
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [(r["prompt"], r["seed"]) for r in records] == [(p, s) for p in ("one", "zwei 日本") for s in (7, 8)]
    assert all(r["finish_reason"] in ("length", "stop", "end_of_text") and "\n" not in r["text"] for r in records)
    assert [r["prompt_tokens"] for r in records] == [3, 3, 11, 11]
    stored = "\n\n---\n\n".join(r["prompt"] + r["text"] for r in records) + "\n"
    assert (run_dir / "sample.txt").read_text(encoding="utf-8") == stored
    assert f"({sum(r['tokens'] for r in records)} tokens, " in result.err


@pytest.mark.parametrize(
    ("given", "stop"),
    [
        ("END", ("END",)),
        ("\\n\\tif", ("\n\tif",)),
        ('["\\n", "[b]"]', ("\n", "[b]")),
        (["a", "b"], ("a", "b")),
        ("[]", ()),
    ],
)
def test_stop_strings_are_read_as_people_give_them(given, stop):
    assert make_config(stop=given).stop == stop


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "[a, b]"}, "give a text, or a JSON list"),
        ({"stop": ""}, "at least 1 character"),
        ({"prompt": "a", "prompts_file": "b"}, "prompt and prompts_file are both given"),
        ({"interactive": True, "prompts_file": "a"}, "begins with one prompt"),
        ({"interactive": True, "prompt": "-"}, "begins with one prompt"),
    ],
)
def test_what_does_not_go_is_refused(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_config(**changes)


def test_a_file_without_prompts_is_refused(run_dir, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="has no prompts: write one per line"):
        run_sampling(make_config(checkpoint=run_dir, prompts_file=tmp_path / "empty.txt"))


def test_a_prompt_without_an_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("inference.sample._LONGEST", 1000)
    (tmp_path / "long.txt").write_text("a" * 1001)
    with pytest.raises(UserError, match="the prompt has 1,000 characters or more, or no end"):
        read_prompts(make_config(prompt_file=tmp_path / "long.txt"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])  # with a byte order mark, and without
def test_a_prompt_in_another_encoding_is_one_line(tmp_path, encoding):
    (tmp_path / "prompt.txt").write_text("Once", encoding=encoding)
    with pytest.raises(
        UserError,
        match=r"prompt_file=.*prompt.txt is not in UTF-8: convert it, as in iconv -f UTF-16",
    ):
        read_prompts(make_config(prompt_file=tmp_path / "prompt.txt"))


def test_learned_positions_are_used_to_the_last_and_no_further(tiny):
    gpt = GPT(tiny(LEARNED).model)
    fits, engine = completion("abcd", max_tokens=12), Engine(gpt, 257, 1)  # 5 tokens, and 11 of 12 are read
    engine.check(fits.request)
    engine.submit([fits])
    assert "".join(stream(engine, fits)) == fits.text
    assert fits.n_tokens == 12
    with pytest.raises(UserError, match=r"prompt of 6 tokens .* and 12 new tokens do not fit into .* 16 learned"):
        engine.check(completion("abcde", max_tokens=12).request)


def test_what_is_interrupted_is_kept(run_dir, monkeypatch, capsys):
    drawn = iter(b"abc")

    def draw(*_):
        for token_id in drawn:
            return [token_id]
        raise KeyboardInterrupt

    monkeypatch.setattr("inference.engine.draw", draw)
    with pytest.raises(KeyboardInterrupt):
        run_sampling(make_config(checkpoint=run_dir, prompt="x"))
    assert (run_dir / "sample.txt").read_text() == "xabc\n"
    out, err = capsys.readouterr()
    assert out == "xabc\n"
    assert "written to " in err


def test_a_chat_model_answers_messages_and_another_says_what_it_does(command, run_dir, gpt, tmp_path, monkeypatch):
    begin_with(gpt, CHAT, tmp_path / "chat", seq_len=16, batch_tokens=64)
    shown = []
    for run, lines, end in [(tmp_path / "chat", "\n4+2?\n", CHAT.end_id), (run_dir, "4+2?\n", EOT)]:
        draw_these(monkeypatch, [*b"5", end, *b"6", end])
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        shown.append(command("sample", f"checkpoint={run}", "runtime.device=cpu", "interactive=true", "prompt=2+3?"))
        assert shown[-1].status == 0, shown[-1].err
    chat, plain = shown
    assert chat.out == "> 2+3?\n5\n> 4+2?\n6\n"
    assert (tmp_path / "chat" / "sample.txt").read_text() == "> 2+3?\n5\n> 4+2?\n6\n"
    assert "Type a message, and the model answers. End a line" in chat.err
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    empty = command("sample", f"checkpoint={tmp_path / 'chat'}", "runtime.device=cpu", "interactive=true")
    assert "(0 tokens)\n" in empty.err, "that none was drawn is no reason to try another prompt"
    assert plain.out.startswith("2+3?\n5")
    draw_these(monkeypatch, [*b"5", CHAT.end_id] * 4)
    typed = [f"checkpoint={tmp_path / 'chat'}", "runtime.device=cpu"]
    asked = command("sample", *typed, "message=2+3?", "system=Sum.", "output=json")
    assert json.loads(asked.out)["text"] == "5"
    assert json.loads(asked.out)["prompt_tokens"] == len("2+3?Sum.") + 3
    assert command("sample", *typed, "message=2+3?").out == "> 2+3?\n5\n"
    continued = command("sample", *typed, "prompt=2+3?")
    assert continued.out == "2+3?5\n"
    assert "this chat model continues prompt as a text: to ask it a question, give message\n" in continued.err
    assert_one_line(
        command("sample", f"checkpoint={run_dir}", "runtime.device=cpu", "message=a"), "message is for chat"
    )
    assert "this model continues texts and does not answer: train.py experiment=chat makes one" in plain.err


def test_the_system_s_message_begins_a_conversation(command, run_dir, gpt, tmp_path, monkeypatch):
    begin_with(gpt, CHAT, tmp_path / "chat", seq_len=16, batch_tokens=64)
    begun = []
    monkeypatch.setattr("inference.sample.converse", lambda talk, *_: begun.append(talk.request.ids))
    typed = ["runtime.device=cpu", "interactive=true", "system=Be <|end|>", f"checkpoint={tmp_path / 'chat'}"]
    assert command("sample", *typed).status == 0
    assert begun == [(EOT, *CHAT.encode_chat([("system", "Be <|end|>")]))]
    for more, why in [
        (f"checkpoint={run_dir}", "system is for chat models"),
        ("interactive=false", "system is for conversations: give interactive=true or message"),
        ("system=\udcff", "is not in UTF-8"),
    ]:
        assert_one_line(command("sample", *typed, more), why)


def test_a_conversation_can_come_through_a_pipe(command, run_dir, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\\\ntwo\n\n"))
    options = ["interactive=true", "prompt=zero ", "max_new_tokens=5", "temperature=0"]
    result = command("sample", f"checkpoint={run_dir}", "runtime.device=cpu", *options)
    assert result.status == 0, result.err
    text = (run_dir / "sample.txt").read_text().removesuffix("\n")
    assert text.startswith("zero one\ntwo")
    assert "(10 tokens, " in result.err
    assert text == text_of(command, run_dir, "prompt=zero one\ntwo", "temperature=0", "max_new_tokens=10")[:-1]


def test_control_characters_do_not_command_a_terminal(monkeypatch, capsys):
    text = "a\x1b[2J\x9b\r\x07\t日🙂\n"
    show(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(text)
    assert capsys.readouterr().out == "a\\x1b[2J\\x9b\\x0d\\x07\t日🙂\n"


_AT_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class Terminal:
    """A Python program on a terminal of its own."""

    def __init__(self, *args):
        self.handle, theirs = pty.openpty()
        # Not pty.fork: torch does not survive a fork while other tests' threads use it.
        self.process = subprocess.Popen([sys.executable, "-c", _AT_TERMINAL, *args], cwd=ROOT, stdin=theirs)
        os.close(theirs)
        self.seen = ""

    def until(self, pattern):
        """Read until the output matches."""
        while not (found := re.search(pattern, self.seen)):
            assert select.select([self.handle], [], [], 60)[0], f"no {pattern!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.handle, 1000).decode()
            except OSError:
                raise AssertionError(f"no {pattern!r} in {self.seen!r}") from None
        self.seen = self.seen[found.end() :]

    def type(self, text):
        os.write(self.handle, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.handle)


def test_a_conversation_at_a_terminal_can_be_interrupted(run_dir):
    """Ctrl-C ends an answer, Ctrl-D the conversation."""
    options = ["interactive=true", "temperature=0", f"max_new_tokens={10**9}", "runtime.device=cpu"]
    terminal = Terminal("sample.py", f"checkpoint={run_dir}", *options)
    try:
        terminal.until("ends the conversation[.]\r\n")
        terminal.until("> ")
        terminal.type("def \n")
        terminal.until("(?s)def .*\r\n.{20}")
        terminal.type("\x03")
        terminal.until("(?s)\r\n.*> ")
        terminal.type("\x04")
        terminal.until(r"\(\d+ tokens, \d+ a second\)")
        terminal.until("sample.txt\r\n")
    finally:
        terminal.close()
    assert (run_dir / "sample.txt").read_text().startswith("def ")


def test_a_run_that_cannot_be_written_to_is_sampled_all_the_same(command, run_dir, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("common.files.write_atomic", refuse)
    result = command("sample", f"checkpoint={run_dir}", "runtime.device=cpu", "prompt=x", "max_new_tokens=3")
    assert result.status == 0
    assert "sample.txt was not written: Read-only file system" in result.err


def test_a_checkpoint_alone_gets_its_sample_beside_it(command, run_dir, tmp_path):
    alone = shutil.copytree(newest(run_dir), tmp_path / "copy" / "step-00000006")
    (alone / "optimizer.safetensors").unlink()  # not needed to sample
    result = command("sample", f"checkpoint={alone}", "runtime.device=cpu", "prompt=x", "max_new_tokens=3")
    assert result.status == 0, result.err
    assert (alone / "sample.txt").read_text().startswith("x")


def test_a_text_without_tokens_says_why(capsys):
    say_rate(0, 0.1)
    said = "(0 tokens: the text ended at once; try another seed or prompt, or, to chat, interactive=true)\n"
    assert capsys.readouterr().out == said
