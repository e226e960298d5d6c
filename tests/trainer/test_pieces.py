"""Gradients of a sequence in pieces are those of the whole, in memory that grows with the piece."""

import pytest
import ranks
import torch
from alone import open_run
from test_torchrun import assert_same_steps

from common.settings import UserError
from data.tokenizers.chat import IGNORED
from runtime.device import Compute
from runtime.distributed import World
from trainer.step import SummedLoss, accumulate_gradients

pytestmark = pytest.mark.usefixtures("restored_torch")

CPU = torch.device("cpu")
FLAGSHIP = {"name": "log_space", "product": True, "d_key": 4, "decay": "head"}
MECHANISMS = {
    "flagship": {"model.attention": FLAGSHIP, "model.block": {"name": "mlp", "conv": 4}, "model.position.name": "none"},
    "log_space": {"model.n_layer": 2},
    "signed": {"model.attention": {"name": "log_space_signed"}, "model.position.name": "none"},
    "linear": {"model.attention": {"name": "linear"}, "model.block": {"name": "glu"}, "model.position.name": "rotary"},
    "windows": {"model.attention": {"name": "sliding_window", "window": [5, 40], "dilation": [1, None]}},
    "ngrams": {"model.ngrams": [1, 3], "model.position.name": "none"},
    "both": {"model.attention_pattern": ["log_space", "sliding_window"], "model.n_layer": 2},
    "longformer": {"model.attention": {"name": "longformer", "window": 20, "n_global": 3}},
}


def gradients(run, chunk, x, y):
    compute = Compute(CPU, torch.float64, chunk)
    for p in run.gpt.parameters():
        p.grad = None
    loss = accumulate_gradients(SummedLoss(run.gpt), [(x, y)], compute, World(CPU))
    return float(loss), [torch.zeros_like(p) if p.grad is None else p.grad for p in run.gpt.parameters()]


FAST = ["flagship", "windows", "longformer", "ngrams"]


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        pytest.param(name, documents, id=f"{name}-{documents}", marks=[] if name in FAST else pytest.mark.slow)
        for i, name in enumerate(MECHANISMS)
        for documents in ((False, True) if name == "flagship" else (i % 2 == 1 and name != "longformer",))
    ],
)
def test_gradients_are_those_of_the_whole(tiny, name, documents):
    run = open_run(tiny({"runtime.dtype": "float64", "data.document_reset": documents, **MECHANISMS[name]}))
    with torch.no_grad():  # weights that remember: the gradient through the state is large enough to be missed
        for p in run.gpt.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    ids = torch.randint(50, (2, 152))
    ids[:, torch.tensor([40, 64, 65, 129])] = run.tokenizer.eot_id
    x = ids[:, 20:-1]
    y = ids[:, 21:].clone()  # 131 tokens
    y[0, 50:70] = IGNORED
    loss, wanted = gradients(run, None, x, y)
    for chunk in (130, 64, 23):
        found, ours = gradients(run, chunk, x, y)
        assert found == pytest.approx(loss, rel=1e-12)
        for a, b in zip(ours, wanted, strict=True):
            assert float((a - b).abs().max()) <= 1e-9 * max(1.0, float(b.abs().max()))
    if not documents:
        cut = sum(gradients(run, None, *piece)[1][0] for piece in zip(x.split(64, 1), y.split(64, 1), strict=True))
        assert float((cut - wanted[0]).abs().max()) > 1e-6, "without the gradient through the state it is another"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_and_pieces_change_rounding_only(tiny_args, tmp_path, strategy):
    """Also with two micro-batches, block by block recomputed, documents apart and evaluations."""
    args = [*tiny_args, "runtime.dtype=float64", "seq_len=48", "batch_tokens=192"]
    args += ["data.document_reset=true", "runtime.micro_batch=1"]
    pieces = [*args, "runtime.sequence_chunk=20", "runtime.recompute=block", f"runtime.strategy={strategy}"]
    for name, processes, given in (("whole", 1, args), ("pieces", 2, pieces)):
        ranks.run(processes, "train.py", *given, f"run_dir={tmp_path / name}")
    assert_same_steps(tmp_path / "whole", tmp_path / "pieces", tolerance=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.attention": {"name": "softmax"}}, "sequence_chunk=8 needs a state of one size.*linear, "),
        ({"model.position": {"name": "learned", "max_len": 16}}, "runtime.sequence_chunk=8 needs more than 16 learned"),
    ],
)
def test_models_whose_state_grows_are_refused(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        tiny({"runtime.sequence_chunk": 8, **changes})
    tiny({"runtime.sequence_chunk": 16, **changes})  # is accepted, because sequences have no more tokens


def test_a_run_in_pieces_takes_the_same_steps(tiny, tmp_path):
    base = {"runtime.dtype": "float64", "seq_len": 50, "batch_tokens": 200, "max_steps": 3, "eval.batches": 1}
    lines, weights = {}, {}
    for chunk in (None, 20):
        run = open_run(tiny(base | {"runtime.sequence_chunk": chunk}))
        lines[chunk] = [run.train_step() for _ in range(3)]
        weights[chunk] = run.gpt.state_dict()
    for one, two in zip(lines[None], lines[20], strict=True):
        assert (one["loss"], one["grad_norm"]) == pytest.approx((two["loss"], two["grad_norm"]), rel=1e-9)
    torch.testing.assert_close(weights[None], weights[20], rtol=1e-8, atol=1e-10)
