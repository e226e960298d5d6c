"""tokenizer=hf: any byte-level BPE of Hugging Face's, and the one that scripts/train_tokenizer.py learns."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data.tokenizers.interface
from common.settings import UserError
from data.prepare.dataset import prepare_dataset
from data.prepare.verify import verify_dataset
from data.shards import read_manifest
from data.tokenizers.build import HFConfig, build_tokenizer, load_tokenizer, save_tokenizer
from data.tokenizers.interface import END_OF_TEXT, map_bytes

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install -e '.[tokenizers]'")

# As in Llama 3's and cl100k's files: words are not those of GPT-2.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = st.lists(st.sampled_from([*"ab1 \n\r\t.'é日🙂\0\u0301", "the ", "re", END_OF_TEXT, "  ", "\n\n"])).map("".join)


@pytest.fixture(scope="module")
def raw(dataset_dir, tmp_path_factory):
    """The content of a tokenizer.json of 280 ids, learned from the dataset of most tests."""
    from data.prepare.vocabulary import learn_vocabulary

    path = tmp_path_factory.mktemp("learned") / "tokenizer.json"
    learn_vocabulary(dataset_dir, 280, path)
    return json.loads(path.read_text())


@pytest.fixture
def build(raw, tmp_path):
    """Builds the tokenizer of a file with these changes."""

    def build(**changes):
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw | changes))
        return build_tokenizer(HFConfig(name="hf", path=tmp_path / "tokenizer.json"))

    return build


def ids_of(raw, text):
    """What the library itself gives."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
    backend.encode_special_tokens = True
    return backend.encode(text, add_special_tokens=False).ids


GPT2_WORDS = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA}, "behavior": "Isolated", "invert": False}
LLAMA_WORDS = {
    "type": "Sequence",
    "pretokenizers": [SPLIT, GPT2_WORDS | {"use_regex": False}],
}


def test_a_learned_vocabulary(raw, build, dataset_dir, tmp_path):
    from data.prepare.vocabulary import learn_vocabulary

    tokenizer = build()
    assert (tokenizer.name, tokenizer.n_vocab, tokenizer.eot_id) == ("hf", 280, 279)
    assert tokenizer.byte_lengths[tokenizer.eot_id] == 0
    words = "def self return the of "
    assert len(tokenizer.encode(words)) < 0.8 * len(words)
    learn_vocabulary(dataset_dir, 280, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == raw
    with pytest.raises(UserError, match=r"again\.json exists: choose another file, or delete it"):
        learn_vocabulary(dataset_dir, 270, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == raw


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS | st.text())
def test_any_text_has_the_ids_of_the_library(raw, build, text):
    tokenizer = build()
    ids = tokenizer.encode(text)
    assert ids == ids_of(raw, text)
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


@pytest.mark.parametrize("words", [GPT2_WORDS, LLAMA_WORDS], ids=["gpt2", "llama"])
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_long_texts_have_the_ids_of_the_library(raw, build, monkeypatch, words, text):
    monkeypatch.setattr(data.tokenizers.interface, "_CHUNK", 2)
    tokenizer = build(pre_tokenizer=words)
    assert tokenizer.encode(text) == ids_of(raw | {"pre_tokenizer": words}, text)


def test_an_end_of_text_is_added_and_said(build, raw, capsys):
    tokenizer = build(added_tokens=[])
    assert (tokenizer.n_vocab, tokenizer.eot_id) == (280, 279)
    assert f"has no {END_OF_TEXT}: it is added as id 279" in capsys.readouterr().out


@pytest.mark.parametrize("name", [END_OF_TEXT, "</s>"])
def test_the_end_of_text_may_be_any_id_and_no_special_token(build, raw, name, config, tmp_path, capsys):
    """As the library's own trainer places it."""
    vocab = {name: 0} | {token: id_ + 1 for token, id_ in raw["model"]["vocab"].items()}
    end = raw["added_tokens"][0] | {"id": 0, "content": name, "special": False}
    tokenizer = build(model=raw["model"] | {"vocab": vocab}, added_tokens=[end])
    assert (tokenizer.n_vocab, tokenizer.eot_id, tokenizer.byte_lengths[0]) == (280, 0, 0)
    assert 0 not in tokenizer.encode(f"a{name}b")
    manifest = prepare_dataset(config(tokenizer={"name": "hf", "path": str(tmp_path / "tokenizer.json")}))
    assert manifest.tokenizer.eot_id == read_manifest(tmp_path / "out").tokenizer.eot_id == 0
    assert verify_dataset(tmp_path / "out") == []
    assert "is added" not in capsys.readouterr().out


def test_what_would_change_texts_is_left_out(build, raw, tmp_path):
    """Also of a file inside a dataset."""
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    changes = {"truncation": truncation, "model": raw["model"] | {"dropout": 0.9}}
    (tmp_path / "saved.json").write_text(json.dumps(raw | changes))
    text = "the return of the self " * 5
    for tokenizer in (build(**changes), load_tokenizer(tmp_path / "saved.json")):
        assert tokenizer.encode(text) == ids_of(raw, text)
        assert tokenizer.sha256 == build().sha256


def test_save_and_load(build, raw, tmp_path):
    tokenizer = build()
    save_tokenizer(tokenizer, tmp_path / "saved.json")
    loaded = load_tokenizer(tmp_path / "saved.json")
    assert (loaded.name, loaded.sha256, loaded.eot_id) == ("hf", tokenizer.sha256, tokenizer.eot_id)
    assert build(normalizer={"type": "NFC"}).sha256 != tokenizer.sha256
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "saved.json"))
    assert library.encode(f"the{END_OF_TEXT}").ids == [*tokenizer.encode("the"), tokenizer.eot_id]


NOT_A_BYTE = {character: i for i, character in enumerate([*map_bytes().values(), "日"])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "it is not a tokenizer.json of Hugging Face's tokenizers"),
        ({"pre_tokenizer": GPT2_WORDS | {"add_prefix_space": True}}, "its ids do not spell every text"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, "its ids do not spell every text"),
        ({"normalizer": {"type": "Strip", "strip_left": False, "strip_right": True}}, "its normalizer changes where"),
        ({"model": {"type": "BPE", "vocab": NOT_A_BYTE, "merges": []}}, "'日' in its token '日' stands for no byte"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_what_cannot_be_used_is_one_line(build, changes, message):
    with pytest.raises(UserError, match=r"^tokenizer.path=.*tokenizer.json cannot be used: ") as error:
        build(**changes)
    assert message in str(error.value)


@pytest.mark.usefixtures("restored_torch")
def test_a_checkpoint_is_enough_when_the_file_has_moved(build, make_dataset, tiny, tmp_path, command, dataset_dir):
    from trainer.loop import fit

    tokenizer = build()
    dataset = make_dataset(tokenizer={"name": "hf", "path": str(tmp_path / "tokenizer.json")})
    (tmp_path / "tokenizer.json").unlink()
    config = tiny({"dataset_dir": str(dataset), "model.n_vocab": 280, "max_steps": 2})
    fit(config)
    sampled = command("sample", f"checkpoint={config.run_dir}", "prompt=the return", "max_new_tokens=5")
    assert sampled.status == 0, sampled.err
    assert "the return" in sampled.out
    mixed = command("eval", f"checkpoint={config.run_dir}", f"dataset_dir={dataset_dir}")
    message = "was made with tokenizer bytes (n_vocab 257), the model with hf (n_vocab 280): prepare"
    assert message in mixed.err
    exported = command("scripts/export_hf", f"checkpoint={config.run_dir}", f"out_dir={tmp_path / 'export'}")
    assert exported.status == 0, exported.err
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "export" / "tokenizer.json"))
    assert library.encode("the return\n").ids == tokenizer.encode("the return\n")
