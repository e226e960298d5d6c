"""The loss on answers, and runs on conversations that begin with the weights of a run on text."""

import json
import math

import pytest
import torch
from alone import open_run
from test_torchrun import assert_same_steps
from torch.nn.functional import cross_entropy

from common.settings import UserError
from data.shards import TokenStream, read_manifest
from runtime.checkpoint import load_model, save_checkpoint
from runtime.losses import evaluate_windows
from trainer.loop import fit
from trainer.records.announce import announce_run
from trainer.records.metrics import read_metrics

EOT = 256
ASSISTANT = 259  # of bytes
pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture
def chat(tiny, chat_dir):
    """Builds a TrainConfig of a tiny model on conversations, with the loss on answers."""

    def build(changes=None):
        own = {"dataset_dir": str(chat_dir), "model.n_vocab": 262, "data.loss": "answers", "runtime.dtype": "float64"}
        own |= {"seq_len": 64, "batch_tokens": 256}
        return tiny(own | (changes or {}))

    return build


def conversations_of(config, split):
    """For each conversation of a split: its ids after <|endoftext|>, and where targets are, one after the other."""
    stream = TokenStream(config.dataset_dir, read_manifest(config.dataset_dir), split)
    ids = stream.read(0, stream.n_tokens).tolist()
    found = []
    conversation = [EOT]
    counted = []
    in_answer = False
    for token in ids:
        if token == EOT:
            found.append((conversation, counted))
            conversation = [EOT]
            counted = []
            in_answer = False
            continue
        conversation.append(token)
        counted.append(in_answer)
        if token > EOT:
            in_answer = token == ASSISTANT
    return found


def loss_by_definition(gpt, conversations, seq_len):
    """The mean loss of all tokens of answers, one conversation alone after the other, and their number."""
    losses = []
    for ids, counted in conversations:
        ids = torch.tensor(ids[: seq_len + 1])
        counted = torch.tensor(counted[:seq_len])
        with torch.no_grad():
            logits = gpt(ids[None, :-1])[0].double()
        losses += cross_entropy(logits, ids[1:], reduction="none")[counted].tolist()
    return math.fsum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("changes", [{}, {"model.position.name": "rotary", "model.attention": {"name": "softmax"}}])
def test_training_validation_and_evaluation_agree_with_each_conversation_alone(chat, command, changes):
    """To rounding in float64. Rows of 32 tokens hold several short conversations, and cut others."""
    config = chat({"seq_len": 32, "batch_tokens": 32, "eval.batches": None, "max_steps": 1, **changes})
    rows = len(open_run(config).batches.rows)
    config = chat({"seq_len": 32, "batch_tokens": 32 * rows, "eval.batches": None, "max_steps": 1, **changes})
    run = open_run(config)
    expected, _ = loss_by_definition(run.gpt, conversations_of(config, "train"), 32)
    assert run.train_step()["loss"] == pytest.approx(expected, rel=1e-12)
    of_val, n_tokens = loss_by_definition(run.gpt, conversations_of(config, "val"), 32)
    byte_lengths = torch.from_numpy(run.tokenizer.byte_lengths)
    *_, measured = evaluate_windows(run.gpt, run.windows, byte_lengths, 3, run.compute, run.world)
    assert measured.per_token == pytest.approx(of_val, rel=1e-12)
    assert measured.tokens == n_tokens
    fit(config)
    (val_loss,) = [line["val_loss"] for line in read_metrics(config.run_dir / "metrics.jsonl") if "val_loss" in line]
    assert val_loss == pytest.approx(of_val, rel=1e-12)
    result = command("eval", f"checkpoint={config.run_dir}", "runtime.device=cpu", "runtime.dtype=float64")
    assert result.status == 0, result.err
    assert f"(val, {n_tokens:,} tokens): loss on answers {of_val:.4f} nats per token" in result.out
    written = json.loads((config.run_dir / "eval.json").read_text())
    assert (written["loss"], written["contexts"]) == (pytest.approx(of_val, rel=1e-12), [])


def test_how_a_batch_is_shared_does_not_matter(train_in_processes, chat_dir):
    own = [f"dataset_dir={chat_dir}", "data.loss=answers", "seq_len=64", "batch_tokens=256", "max_steps=3"]
    whole = train_in_processes("whole", 1, *own)
    pieces = "runtime.micro_batch=1", "runtime.sequence_chunk=5"
    for processes, options in (1, pieces), (2, ()), (2, ["runtime.context_parallel=2"]):
        shared = train_in_processes(f"shared{len(options)}", processes, *own, *options)
        assert_same_steps(whole, shared, tolerance=1e-9)


@pytest.mark.slow
def test_a_run_of_epochs_has_thirty_steps_an_epoch_and_resumes(chat, capsys):
    config = chat({"epochs": 2, "batch_tokens": 16 * 64, "eval.every": 1000, "eval.batches": 1})
    rows = len(open_run(config).batches.rows)
    assert 60 <= rows < 90, "a step has two rows"
    fit(config.model_copy(update={"stop_at": 7}))
    fit(config)
    lines = [*read_metrics(config.run_dir / "metrics.jsonl")]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, rows + 1)]
    assert [line["step"] for line in lines if "val_loss" in line] == [(rows + 1) // 2, rows]
    printed = capsys.readouterr()
    assert f"conversations in {rows} rows; " in printed.out
    assert "of 90 conversations are longer than seq_len=64: " in printed.out
    assert "2 epochs" in printed.out
    assert "by heart" not in printed.err
    longer = open_run(chat({"max_steps": 21 * rows, "batch_tokens": 64, "run_dir": str(config.run_dir / "longer")}))
    announce_run(longer, None)
    assert "the run reads its data for 21 epochs, and learns it by heart: give epochs=3" in capsys.readouterr().err


def test_the_loss_is_a_setting_of_the_run_and_needs_conversations(chat, dataset_dir):
    with pytest.raises(UserError, match=r"data\.loss=answers needs conversations, .* has none: prepare it"):
        fit(chat({"dataset_dir": str(dataset_dir)}))
    fit(chat({"stop_at": 2}))
    with pytest.raises(UserError, match=r"belongs to another run: data\.loss=all \(checkpoint: answers\)"):
        fit(chat({"data.loss": "all"}))


def test_eval_on_a_text_is_the_loss_of_all_tokens(chat, dataset_dir, command):
    """It is what fine-tuning has cost. Strides and contexts are of texts."""
    config = chat({"stop_at": 2})
    fit(config)
    arguments = [f"checkpoint={config.run_dir}", "runtime.device=cpu", "batches=all"]
    assert " tokens): loss 5." in command("eval", *arguments, "contexts=[]", f"dataset_dir={dataset_dir}").out
    for option in "contexts=[8]", "stride=3":
        refused = command("eval", *arguments, option)
        assert refused.err.startswith("error: stride and contexts are for texts, and this loss is on the answers"), (
            option
        )


@pytest.fixture
def base(tiny, tmp_path):
    """Saves a run on text whose logits are all far below 0, as GPT-2's are; returns the model."""

    def build(**model):
        config = tiny(
            {"stop_at": 1, "runtime.dtype": "float64", **{f"model.{key}": value for key, value in model.items()}}
        )
        run = open_run(config)
        with torch.no_grad():
            run.gpt.norm.bias.fill_(1.0)
            run.gpt.output_weight.sub_(5.0)  # of 16 features: logits of -80
        tensors = {"model": run.gpt.state_dict(), "optimizer": {}, "random": {}}
        save_checkpoint(tmp_path / "base", tensors, run.state, run.tokenizer)
        return run.gpt

    return build


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("pad_vocab", "now"), [(64, 64), (1, 64)])
def test_markers_begin_as_the_mean_of_the_trained_ids(base, chat, tmp_path, tied, pad_vocab, now):
    """By Jensen's inequality, the loss on text grows by at most the log of the share of new rows."""
    before = base(pad_vocab=pad_vocab, tied=tied)
    begun = {"run_dir": str(tmp_path / "chat"), "init_from": str(tmp_path / "base")}
    after = open_run(chat(begun | {"model.pad_vocab": now, "model.tied": tied})).gpt
    tables = {"embed.weight"} if tied else {"embed.weight", "output.weight"}
    for name, value in after.state_dict().items():
        was = before.state_dict()[name]
        first = 257
        padding = 262
        if name not in tables:
            assert torch.equal(value, was)
            continue
        assert len(value) == 320
        assert torch.equal(value[:first], was[:first])
        torch.testing.assert_close(value[first:padding], was[:first].mean(0).expand(5, -1))
        if pad_vocab == 64:
            assert torch.equal(value[padding:], was[padding:])
    ids = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [gpt(ids[:, :-1])[..., :n] for gpt, n in ((before, 257), (after, 262))]
    first, second = (cross_entropy(each.flatten(0, 1), ids[:, 1:].flatten()).item() for each in logits)
    assert first < second <= first + math.log(262 / 257) + 1e-12


@pytest.mark.slow
def test_a_model_without_rows_for_the_markers_is_refused_in_one_line(
    base, chat, tiny_args, chat_dir, command, tmp_path
):
    base(pad_vocab=1)
    begun = {"run_dir": str(tmp_path / "chat"), "init_from": str(tmp_path / "base")}
    said = r"has rows for 257 ids, and the dataset has 262, with its markers: add rows by model\.pad_vocab=64$"
    for n_vocab in (257, 262):
        with pytest.raises(UserError, match=said):
            fit(chat(begun | {"model.n_vocab": n_vocab}))
    small = "seq_len=64 batch_tokens=128 max_steps=2 runtime.device=cpu"
    typed = ["experiment=chat", f"dataset_dir={chat_dir}", f"run_dir={tmp_path / 'chat'}", *small.split()]
    assert "init_from=runs/base does not exist: give a run directory" in command("train", *typed).err
    assert "add rows by model.pad_vocab=64" in command("train", *typed, f"init_from={tmp_path / 'base'}").err
    begun = command("train", *typed, f"init_from={tmp_path / 'base'}", "model.pad_vocab=64")
    assert begun.status == 0
    assert begun.out.endswith(f"python sample.py checkpoint={tmp_path / 'chat'} interactive=true\n")
    gpt, tokenizer = load_model(tmp_path / "chat")
    assert (gpt.config.n_vocab, gpt.config.n_vocab_padded, tokenizer.name) == (262, 320, "bytes+chat")
    assert "val_loss" in [*read_metrics(tmp_path / "chat" / "metrics.jsonl")][-1]
    assert command("train", f"run_dir={tmp_path / 'chat'}", "max_steps=4").status == 0, "a run keeps its own settings"
