"""What a run reads: weighted sets, and a thread that reads ahead of the steps."""

import random
import threading

import numpy as np
import pytest
import torch
from alone import open_run
from test_resume import assert_same_run
from texts import CHAT

from common.settings import UserError
from data.loader import TrainBatches
from data.tokenizers.build import save_tokenizer
from model.gpt import GPT
from runtime.checkpoint import open_checkpoint
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")

MIXTURE = {"few": 5, "none": 0}


@pytest.fixture(scope="module")
def sets_dir(make_dataset):
    """A dataset whose sets are told apart by their letters: 'many' of a, 'few' of b, 'none' of c."""
    rng = random.Random(0)
    sets = rng.choices(["many", "few", "none"], weights=[8, 1, 2], k=300)
    letters = {"many": "a", "few": "b", "none": "c"}
    return make_dataset(
        documents=[{"text": letters[name] * rng.randrange(20, 200), "meta": {"pile_set_name": name}} for name in sets]
    )


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_a_run_reads_its_mixture(tiny, sets_dir):
    config = tiny({"dataset_dir": str(sets_dir), "data.mixture": MIXTURE, "batch_tokens": 16 * 200, "seq_len": 16})
    run = open_run(config)
    text = torch.cat([token_ids for token_ids, _ in run.share(0)])
    most = np.array([np.bincount(row, minlength=257)[[97, 98, 99]].argmax() for row in text.numpy()])
    assert (most == 1).sum() > 0.2 * 200, "few is a twelfth of the text, and has five parts a window"
    assert (most == 2).sum() == 0


def test_a_run_with_a_mixture_goes_on_as_if_nothing_had_happened(tiny, sets_dir, tmp_path):
    changes = {"dataset_dir": str(sets_dir), "data.mixture": MIXTURE, "max_steps": 12}
    fit(tiny(changes | {"run_dir": tmp_path / "whole"}))
    fit(tiny(changes | {"stop_at": 5}))
    fit(tiny(changes))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, None, r"another run: data\.mixture=null \(checkpoint: \{\}\)"),
        (MIXTURE, {"few": 4, "none": 0}, r"another run: data.mixture.few=4.0 \(checkpoint: 5.0\); use the"),
        (MIXTURE, {"feww": 5}, "'feww', which is not a set of dataset_dir=.*: its sets are few, many, none"),
    ],
)
def test_another_mixture_is_refused(tiny, sets_dir, before, now, message):
    fit(tiny({"dataset_dir": str(sets_dir), "data.mixture": before, "stop_at": 2}))
    with pytest.raises(UserError, match=message):
        fit(tiny({"dataset_dir": str(sets_dir), "data.mixture": now}))


SHORT = {"data.document_reset": True, "runtime.dtype": "float64", "batch_tokens": 4 * 250, "seq_len": 250}


def test_a_step_learns_from_each_document_alone(tiny, sets_dir):
    config = tiny({**SHORT, "dataset_dir": str(sets_dir)})
    run = open_run(config)
    torch.manual_seed(config.seed)
    gpt = GPT(config.model).double()
    eot = run.tokenizer.eot_id
    nats = []
    for token_ids, targets in run.share(0):
        for ids, wanted in zip(token_ids, targets, strict=True):
            borders = (ids == eot).nonzero().flatten().tolist()
            pieces = zip(ids.tensor_split(borders), wanted.tensor_split(borders), strict=True)
            nats += [gpt.summed_loss(x[None], y[None]) for x, y in pieces if len(x)]
    loss = torch.stack(nats).sum() / (4 * 250)
    assert len(nats) > 8
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in gpt.parameters()])
    line = run.train_step()
    assert (line["loss"], line["grad_norm"]) == (pytest.approx(loss.item(), rel=1e-11), pytest.approx(norm.item()))


def test_a_run_keeps_documents_apart_or_not(command, tiny_args, tmp_path):
    assert command("train", *tiny_args, "data.document_reset=true", "stop_at=2").status == 0
    assert open_checkpoint(tmp_path / "run").state.data.document_reset
    result = command("train", *tiny_args, "data.document_reset=false", "stop_at=2")
    assert "another run: data.document_reset=false (checkpoint: true)" in result.err
    assert command("train", *tiny_args, "data.document_reset=true").status == 0


def test_attention_that_cannot_keep_documents_apart_is_refused(tiny):
    with pytest.raises(UserError, match=r"longformer's global tokens are .*: use another attention"):
        tiny({"data.document_reset": True, "model.attention_pattern": ["longformer"]})


def test_the_thread_ends_with_the_run_and_reads_nothing_that_no_step_asks_for(tiny, monkeypatch):
    read = []

    class Recorded(TrainBatches):
        def batch(self, step, start, stop):
            read.append((step, start, stop))
            return super().batch(step, start, stop)

    monkeypatch.setattr("trainer.start.TrainBatches", Recorded)
    fit(tiny({"stop_at": 3}))
    assert read == [(0, 0, 4), (1, 0, 4), (2, 0, 4)]
    assert threads() == []

    def interrupted(*_):
        assert len(threads()) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.loop.evaluate_windows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(tiny({"eval.every": 1}))
    assert threads() == []


def test_a_tokenizer_that_did_not_make_the_dataset_is_refused(tiny, make_dataset):
    """Its ids would mean other texts."""
    dataset_dir = make_dataset()
    (dataset_dir / "tokenizer.json").unlink()
    save_tokenizer(CHAT, dataset_dir / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json is not the manifest's tokenizer"):
        open_run(tiny({"dataset_dir": str(dataset_dir)}))
