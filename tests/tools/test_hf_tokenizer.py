"""tokenizer.json: Hugging Face's tokenizers give tiktoken's ids, and theirs are read back."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings import UserError
from data.tokenizers.build import BytesConfig, GPT2Config, RankTokenizer, build_tokenizer
from data.tokenizers.chat import ChatTokenizer
from tools.convert.hf_tokenizer import read_tokenizer_json, tokenizer_files

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install -e '.[hf]'")
import tokenizers

from data.tokenizers.hugging_face import HFTokenizer

ROOT = Path(__file__).resolve().parents[2]
BYTES = build_tokenizer(BytesConfig(name="bytes"))
# Pairs that overlap, are joined from either side, or are tokens that no two tokens make.
PAIRS = [pair.encode() for pair in ("  ", "aa", " a", "ab", "bc", "abc", "aaa", "'s", "\n\n", "11", "xyz", "é", "aaaa")]
SMALL = RankTokenizer("gpt2", [*(bytes([i]) for i in range(256)), *PAIRS])
WORLD = "\xa0\u3000 1½ ''s 'LL  Où? Straße, 日本語のテキスト, नमस्ते, 🙂🏳️‍🌈\r\n\t  ..."
NASTY = st.text(st.sampled_from("aabbccxyz1 \n\r\t's!é日🙂\x1c\x85\u2028\u3000")) | st.text()


def theirs(tokenizer):
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_files(tokenizer, None)["tokenizer.json"]))


SMALL_JSON = tokenizer_files(SMALL, None)["tokenizer.json"]
SMALL_THEIRS, BYTES_THEIRS = theirs(SMALL), theirs(BYTES)


@settings(deadline=None, max_examples=150)
@given(text=NASTY)
def test_any_text_has_the_same_ids(text):
    text = text.replace("<|endoftext|>", "") + WORLD
    for ours, other in ((SMALL, SMALL_THEIRS), (BYTES, BYTES_THEIRS)):
        ids = ours.encode(text)
        assert other.encode(text).ids == ids
        assert other.decode(ids) == text


@pytest.mark.slow
def test_real_text_has_tiktokens_ids(gpt2_ranks):
    tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=gpt2_ranks))
    text = "".join(path.read_text() for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("data/*.py")))
    text = text.replace("<|endoftext|>", "") + WORLD
    assert len(text) > 50_000
    assert theirs(tokenizer).encode(text).ids == tokenizer.encoding.encode_ordinary(text)


TALKS = [
    [("user", " 2 + 3?\n"), ("assistant", "\n5 "), ("user", ""), ("assistant", "é日🙂\n\n")],
    [("system", " Be brief.\t"), ("user", "aaaa's\n\n")],
]


@pytest.mark.parametrize("inner", [SMALL, BYTES, HFTokenizer(SMALL_JSON)], ids=["gpt2", "bytes", "hf"])
@pytest.mark.slow
def test_the_chat_template_gives_our_ids(inner, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[hf]'")
    tokenizer = ChatTokenizer(inner)
    for name, content in tokenizer_files(tokenizer, None).items():
        (tmp_path / name).write_text(json.dumps(content))
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for talk in TALKS:
        messages = [{"role": role, "content": text} for role, text in talk]
        for answer in (False, True):
            template = other.apply_chat_template(messages, add_generation_prompt=answer, return_dict=False)
            assert template == [tokenizer.eot_id, *tokenizer.encode_chat(talk, answer)]
        masked = other.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        targets = [0]
        for role, text in talk:
            in_answer = int(role == "assistant")
            targets += [0] + [in_answer] * (len(tokenizer.encode(text)) + in_answer)
        assert masked["assistant_masks"] == targets
    assert other.decode(template, skip_special_tokens=True) == "".join(text for _, text in talk)
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    as_one = other.apply_chat_template([{"role": "system", "content": "ab"}])
    assert other.apply_chat_template([parts])["input_ids"] == as_one["input_ids"]
    image = [{"type": "image", "text": "c"}]
    calls = [{"name": "f"}]
    for change in ({"role": "tool"}, {"role": "assistant", "tool_calls": calls}, {"content": None}, {"content": image}):
        with pytest.raises(Exception, match=r"the roles are .*, not tool|the content of a message is text here"):
            other.apply_chat_template([{"role": "user", "content": "a", **change}])


@pytest.mark.parametrize("name", ["gpt2", "bytes", "chat", "hf", "hf+chat"])
@pytest.mark.slow
def test_what_is_written_is_read_back(name, tmp_path, gpt2_ranks):
    tokenizer = HFTokenizer(SMALL_JSON) if name.startswith("hf") else BYTES
    if name == "gpt2":
        tokenizer = build_tokenizer(GPT2Config(name="gpt2", path=gpt2_ranks))
    if name.endswith("chat"):
        tokenizer = ChatTokenizer(tokenizer)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_files(tokenizer, None)["tokenizer.json"]))
    read = read_tokenizer_json(path)
    assert (read.name, read.sha256) == (tokenizer.name, tokenizer.sha256)


@pytest.mark.parametrize("content", [b"[]", b"{"])
def test_what_is_no_tokenizer_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        read_tokenizer_json(tmp_path / "tokenizer.json")
