"""The loss on answers, and runs on conversations that begin with the weights of a run on text."""

import math
import re
from itertools import pairwise

import pytest
import torch
from alone import open_run
from test_torchrun import assert_same_steps
from torch.nn.functional import cross_entropy

from common.settings import UserError
from data.loader import IGNORED
from data.shards import TokenStream, read_manifest
from runtime.checkpoint import load_model, save_checkpoint
from runtime.losses import evaluate
from runtime.metrics import read_metrics
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")


@pytest.fixture
def chat(tiny, chat_dir):
    """Builds a TrainConfig of a tiny model on conversations, with the loss on answers."""

    def build(changes=None):
        own = {"dataset_dir": str(chat_dir), "model.n_vocab": 261, "data.loss": "answers", "runtime.dtype": "float64"}
        return tiny(own | (changes or {}))

    return build


def targets_of(config, split):
    """The target after each token of a split but the last, -1 where it is not of an answer, one after the other."""
    stream = TokenStream(config.dataset_dir, read_manifest(config.dataset_dir), split)
    ids, targets, answers = stream.read(0, stream.n_tokens).tolist(), [], False
    for token, following in pairwise(ids):
        if token >= 256:  # <|endoftext|> or a marker
            answers = token == 259
        targets.append(following if answers else IGNORED)
    return ids, targets


def loss_by_definition(gpt, ids, targets, starts, seq_len):
    """The mean loss of all answers' tokens in windows, one window after the other."""
    losses = []
    for start in starts:
        wanted = torch.tensor(targets[start : start + seq_len])
        with torch.no_grad():
            logits = gpt(torch.tensor([ids[start : start + len(wanted)]]))[0]
        losses += cross_entropy(logits.double(), wanted, ignore_index=IGNORED, reduction="none")[wanted >= 0].tolist()
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize("changes", [{}, {"data.document_reset": True}, {"data.mixture": {"chat": 1}}])
def test_training_and_evaluation_measure_the_answers(chat, changes):
    config = chat({"batch_tokens": 128, "eval.batches": None, **changes})
    run = open_run(config)
    expected = loss_by_definition(run.gpt, *targets_of(config, "train"), run.batches.starts(0), config.seq_len)
    ids, targets = targets_of(config, "val")
    of_val = loss_by_definition(run.gpt, ids, targets, range(0, len(targets), config.seq_len), config.seq_len)
    lengths = torch.from_numpy(run.tokenizer.byte_lengths)
    measured = evaluate(run.gpt, run.windows, lengths, 3, run.runtime, run.world)
    assert measured.per_token == pytest.approx(of_val, rel=1e-12)
    assert measured.tokens == sum(target >= 0 for target in targets)
    assert run.train_step()["loss"] == pytest.approx(expected, rel=1e-12)


def test_how_a_batch_is_shared_does_not_matter(train_in_processes, chat_dir):
    own = [f"dataset_dir={chat_dir}", "data.loss=answers", "data.document_reset=true", "max_steps=3"]
    whole = train_in_processes("whole", 1, *own)
    pieces = "runtime.micro_batch=1", "runtime.sequence_chunk=5"
    for processes, options in (1, pieces), (2, ()), (2, ["runtime.context_parallel=2"]):
        shared = train_in_processes(f"shared{len(options)}", processes, *own, *options)
        assert_same_steps(whole, shared, tolerance=1e-9)


def test_a_batch_without_answers_changes_nothing(chat, make_dataset, capsys):
    """Of windows of 16 tokens, most have only a question."""
    documents = [{"prompt": f"{i}" * 40, "completion": "y"} for i in range(100, 160)]
    own = {"dataset_dir": str(make_dataset(documents=documents, data="chat")), "batch_tokens": 16}
    config = chat(own | {"max_steps": 30, "eval.batches": None, "runtime.max_bad_steps": 30})
    run, skipped = open_run(config), 0
    for _ in range(30):
        before = [p.clone() for p in run.gpt.parameters()]
        line = run.train_step()
        same = all(torch.equal(p, was) for p, was in zip(run.gpt.parameters(), before, strict=True))
        assert same == (line.get("event") == "skipped")
        skipped += same
    assert 10 < skipped < 30
    assert all(p.isfinite().all() for p in run.gpt.parameters())
    assert "skipping step 1: none of its targets is counted" in capsys.readouterr().err
    with pytest.raises(
        UserError, match=r"targets is counted, after 1 bad steps in a row; .*: raise batch_tokens, in another run_dir"
    ):
        fit(chat(own | {"max_steps": 30, "eval.batches": None, "runtime.max_bad_steps": 1}))
    with pytest.raises(UserError, match=r"eval\.batches=1 has no answer to evaluate: give more, or null for all"):
        open_run(chat(own | {"eval.batches": 1}))


def test_the_loss_is_a_setting_of_the_run_and_needs_conversations(chat, dataset_dir):
    with pytest.raises(UserError, match=r"data\.loss=answers needs conversations, .* has none: prepare it"):
        fit(chat({"dataset_dir": str(dataset_dir)}))
    fit(chat({"stop_at": 2}))
    with pytest.raises(UserError, match=r"belongs to another run: data\.loss=all \(checkpoint: answers\)"):
        fit(chat({"data.loss": "all"}))


def test_eval_says_that_the_loss_is_on_answers(chat, dataset_dir, make_dataset, command):
    """On text, it is the loss of all tokens: what fine-tuning has cost."""
    questions = make_dataset(
        documents=[{"prompt": f"{i}" * 300, "completion": "y"} for i in range(100, 160)], data="chat"
    )
    config = chat({"stop_at": 2})
    fit(config)
    arguments = [f"checkpoint={config.run_dir}", "runtime.device=cpu", "batches=all", "contexts=[]"]
    counted = sum(target >= 0 for target in targets_of(config, "val")[1])
    assert f"(val, {counted:,} tokens): loss on answers " in command("eval", *arguments).out
    assert " tokens): loss 5." in command("eval", *arguments, f"dataset_dir={dataset_dir}").out
    none = command("eval", *arguments, "seq_len=1", "batches=1", f"dataset_dir={questions}")
    assert none.err == "error: batches=1 has no answer to evaluate: give more, or batches=all\n"
    long = command("eval", *arguments[:3], "contexts=[2]", "context_windows=1", f"dataset_dir={questions}").out
    assert re.search(r" 2 +0 +no answer +no answer +no answer", long)


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
        was, first, padding = before.state_dict()[name], 257, 261
        if name not in tables:
            assert torch.equal(value, was)
            continue
        assert len(value) == 320
        assert torch.equal(value[:first], was[:first])
        torch.testing.assert_close(value[first:padding], was[:first].mean(0).expand(4, -1))
        if pad_vocab == 64:
            assert torch.equal(value[padding:], was[padding:])
    ids = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [gpt(ids[:, :-1])[..., :n] for gpt, n in ((before, 257), (after, 261))]
    first, second = (cross_entropy(each.flatten(0, 1), ids[:, 1:].flatten()).item() for each in logits)
    assert first < second <= first + math.log(261 / 257) + 1e-12


def test_a_model_without_rows_for_the_markers_is_refused_in_one_line(
    base, chat, tiny_args, chat_dir, command, tmp_path
):
    base(pad_vocab=1)
    begun = {"run_dir": str(tmp_path / "chat"), "init_from": str(tmp_path / "base")}
    said = r"has rows for 257 ids, and the dataset has 261, with its markers: add rows by model\.pad_vocab=64$"
    for n_vocab in (257, 261):
        with pytest.raises(UserError, match=said):
            fit(chat(begun | {"model.n_vocab": n_vocab}))
    small = "seq_len=16 batch_tokens=64 max_steps=2 runtime.device=cpu"
    typed = ["experiment=chat", f"dataset_dir={chat_dir}", f"run_dir={tmp_path / 'chat'}", *small.split()]
    assert "init_from=runs/base does not exist: give a run directory" in command("train", *typed).err
    assert "add rows by model.pad_vocab=64" in command("train", *typed, f"init_from={tmp_path / 'base'}").err
    begun = command("train", *typed, f"init_from={tmp_path / 'base'}", "model.pad_vocab=64")
    assert begun.status == 0
    assert begun.out.endswith(f"python sample.py checkpoint={tmp_path / 'chat'} interactive=true\n")
    gpt, tokenizer = load_model(tmp_path / "chat")
    assert (gpt.config.n_vocab, gpt.config.n_vocab_padded, tokenizer.name) == (261, 320, "bytes+chat")
    assert "val_loss" in [*read_metrics(tmp_path / "chat" / "metrics.jsonl")][-1]
    assert command("train", f"run_dir={tmp_path / 'chat'}", "max_steps=4").status == 0, "a run keeps its own settings"
