"""scripts/export_hf.py and scripts/import_gpt2.py: from a run to a folder and back; what does not fit is one line."""

import json
import shutil

import pytest
import torch
from printed import assert_one_line, commands_in
from safetensors.torch import load_file, save_file

from common.files import hold_lock
from common.settings import decode
from data.tokenizers.build import BytesConfig, build_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from runtime.checkpoint import load_model, open_checkpoint
from tools.convert.export_hf import export_checkpoint
from tools.convert.import_gpt2 import import_gpt2
from tools.convert.new_run import begin_run

pytestmark = pytest.mark.usefixtures("restored_torch")

MODEL = {"n_vocab": 257, "pad_vocab": 64, "n_layer": 1, "n_head": 2, "n_embd": 16, "attention": {"name": "softmax"}}
MODEL |= {"block": {"name": "mlp", "expansion": 3}, "position": {"name": "learned", "max_len": 16}}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of a GPT-2 with random weights, and its export."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    gpt = GPT(decode(GPTConfig, MODEL))
    begin_run(gpt, build_tokenizer(BytesConfig(name="bytes")), path / "run", seq_len=16, batch_tokens=64)
    export_checkpoint(path / "run", path / "folder")
    return path


@pytest.fixture
def folder(original, tmp_path):
    """A copy of the export that a test may modify."""
    return shutil.copytree(original / "folder", tmp_path / "folder")


def config(**changes):
    def change(folder):
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | changes))

    return change


def weights(change):
    def changed(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return changed


def file(name, content):
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_bytes(content)


def test_a_run_that_was_exported_and_imported_is_the_same_model(original, folder, tmp_path):
    path = import_gpt2(folder, tmp_path / "again")
    assert path == tmp_path / "again" / "checkpoints" / "step-00000000"
    before, tokenizer = load_model(original / "run")
    after, tokenizer_after = load_model(path)
    assert tokenizer_after.sha256 == tokenizer.sha256
    assert (before.config.n_vocab_padded, after.config.n_vocab_padded) == (320, 257)
    wanted = before.state_dict() | {"embed.weight": before.embed.weight[:257]}
    assert all(torch.equal(value, wanted[name]) for name, value in after.state_dict().items())
    state = open_checkpoint(path).state
    assert (state.step, state.seq_len) == (0, 16)


def of_its_own(folder):
    """Give the model a vocabulary whose first id is <|endoftext|>."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["added_tokens"][0]["id"] = 0
    raw["model"]["vocab"] = {"<|endoftext|>": 0} | {token: i + 1 for token, i in raw["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("change", [lambda folder: None, of_its_own], ids=["bytes", "its own vocabulary"])
@pytest.mark.slow
def test_training_goes_on_by_the_commands_that_are_printed(folder, tmp_path, command, change):
    change(folder)
    run_dir = tmp_path / "it's again (1)"
    result = command("scripts/import_gpt2", f"folder={folder}", f"run_dir={run_dir}")
    assert result.status == 0, result.err
    prepare, typed = commands_in(result.out)
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text {i} " * 40)
    data = f"data.path={tmp_path}/*.txt", f"out_dir={tmp_path / 'data'}"
    assert command(prepare.script, *prepare.arguments, *data).status == 0
    more = f"dataset_dir={tmp_path / 'data'}", "batch_tokens=32", "stop_at=3", "runtime.device=cpu"
    result = command(typed.script, *typed.arguments, *more)
    assert result.status == 0, result.err
    trained = tmp_path / "it's again (1)-trained"
    assert open_checkpoint(trained).state.step == 3
    assert not torch.equal(load_model(run_dir)[0].embed.weight, load_model(trained)[0].embed.weight)


def test_it_can_be_tuned_on_conversations(folder, tmp_path, make_dataset, command):
    chat_dir = make_dataset(documents=[{"prompt": f"{i}", "completion": "y"} for i in range(99)], data="chat")
    import_gpt2(folder, tmp_path / "again")
    typed = f"experiment=chat init_from={tmp_path / 'again'} dataset_dir={chat_dir} run_dir={tmp_path / 'chat'}".split()
    small = ["model.pad_vocab=64", "seq_len=16", "batch_tokens=32", "max_steps=2", "runtime.device=cpu"]
    result = command("train", *typed, *small)
    assert result.status == 0, result.err
    assert load_model(tmp_path / "chat")[0].config.n_vocab == 262


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(model_type="llama"), "model_type='llama': Input should be 'gpt2'"),
        (config(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06: Input should be greater than or equal to 0.00001"),
        (config(tie_word_embeddings=False), "tie_word_embeddings=False"),
        (config(n_inner=17), "transformer.h.0.mlp.c_fc.weight has the shape"),
        (config(vocab_size=200), "has a tokenizer with 257 ids, but the model has only 200"),
        (file("config.json", b"[]"), "does not describe a GPT2LMHeadModel like GPT-2: Input should be a valid"),
        (weights(lambda t: t.pop("transformer.wpe.weight")), "'transformer.wpe.weight' is missing"),
        (weights(lambda t: t["transformer.h.0.ln_1.bias"].fill_(torch.nan)), "h.0.ln_1.bias has values that are"),
        (weights(lambda t: t.update({"lm_head.weight": torch.zeros(257, 16)})), "lm_head.weight differs from wte"),
        (file("model.safetensors", None), "has no model.safetensors: load model and tokenizer"),
    ],
)
@pytest.mark.slow
def test_what_is_no_gpt2_is_refused_in_one_line(folder, tmp_path, change, message, command):
    change(folder)
    assert_one_line(command("scripts/import_gpt2", f"folder={folder}", f"run_dir={tmp_path / 'again'}"), message)
    assert not (tmp_path / "again").exists()


def test_an_export_is_whole_or_absent(original, folder, tmp_path, command, monkeypatch):
    def exported(out_dir):
        return command("scripts/export_hf", f"checkpoint={original / 'run'}", f"out_dir={out_dir}")

    assert_one_line(exported(folder), "is not empty: choose another folder")
    beside = tmp_path / ".new.export"
    beside.mkdir()
    (beside / "model.safetensors").write_text("of an export that was killed")
    with hold_lock(beside, lambda: "taken"):
        assert_one_line(exported(tmp_path / "new"), "new is being written by another process")
    assert beside.exists()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tools.convert.export_hf.write_json", full)
        assert_one_line(exported(tmp_path / "new"), "No space left")
    assert not (tmp_path / "new").exists()
    assert not beside.exists()
    (tmp_path / "new").mkdir()  # an empty one is as good as none
    assert exported(tmp_path / "new").status == 0
    assert (tmp_path / "new" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
