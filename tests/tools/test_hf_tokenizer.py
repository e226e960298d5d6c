"""tokenizer.json: Hugging Face's tokenizers give tiktoken's ids, and theirs are read back."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings import UserError
from data.chat import ChatTokenizer
from data.tokenizer import BytesConfig, GPT2Config, RankTokenizer, build_tokenizer
from tools.convert.hf_tokenizer import read_tokenizer_json, tokenizer_files

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install -e '.[hf]'")
import tokenizers

from data.tokenizer_json import HFTokenizer

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
    assert other.decode(template, skip_special_tokens=True) == "".join(text for _, text in talk)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert other.apply_chat_template(parts, return_dict=False)[2:] == tokenizer.encode("ab")
    roles = [other.apply_chat_template([{"role": role, "content": "a"}]) for role in ("developer", "system")]
    assert roles[0]["input_ids"] == roles[1]["input_ids"]
    image = [*parts[0]["content"], {"type": "image", "text": "c"}]
    no_text = [{"content": content} for content in (None, 3, {"text": "a"}, ["a"], image)]
    for change in ({"role": "tool"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}, *no_text):
        with pytest.raises(Exception, match=r"the roles are .*, not tool|the content of a message is text here"):
            other.apply_chat_template([{"role": "user", "content": "a", **change}])


@pytest.mark.parametrize("tokenizer", [SMALL, BYTES, ChatTokenizer(SMALL)], ids=["gpt2", "bytes", "chat"])
def test_what_is_written_is_read_back(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_files(tokenizer, None)["tokenizer.json"]))
    read = read_tokenizer_json(path)
    assert (read.name, read.sha256) == (tokenizer.name, tokenizer.sha256)
    theirs(tokenizer).save(str(path))  # as their library writes it, merges as pairs
    assert read_tokenizer_json(path).sha256 == tokenizer.sha256


def set_(*path, to):
    def change(raw):
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_("added_tokens", to=[]), r"it has no token <\|endoftext\|>"),
        (set_("added_tokens", 0, "id", to=10**18), r"endoftext\|> is token 10{18}, but must be the last token"),
        (
            lambda raw: raw["model"]["vocab"].update(日=raw["model"]["vocab"].pop("a")),
            "'日' is not a byte-level character",
        ),
        (lambda raw: raw["model"]["merges"].reverse(), "is not in the order of the ids"),
        (set_("model", "type", to="Unigram"), r"model.type='Unigram': Input should be 'BPE'"),
        (set_("pre_tokenizer", "use_regex", to=False), r"tokenizer 'bytes' must be the 256 bytes in order"),
    ],
)
def test_what_is_not_of_gpt2s_kind_is_refused(change, message, tmp_path):
    raw = json.loads(json.dumps(tokenizer_files(SMALL, None)["tokenizer.json"]))
    change(raw)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=message) as error:
        read_tokenizer_json(path)
    assert str(error.value).startswith(f"{path} is not a tokenizer of GPT-2's kind: ")
