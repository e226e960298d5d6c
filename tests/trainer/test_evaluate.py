"""The loss on held-out text against a direct computation in float64."""

import json
import math
import statistics

import pytest
import torch
from safetensors.torch import load_file

from common.settings import decode
from data.loader import open_eval_batches
from data.shards import TokenStream, read_manifest
from data.tokenizers.build import load_tokenizer
from inference.evaluate import EvaluateConfig, run_evaluation
from model.config import GPTConfig
from model.gpt import GPT
from runtime.checkpoint import load_model
from runtime.device import Compute
from runtime.distributed import World
from runtime.losses import evaluate_windows
from tools.convert.export_hf import export_checkpoint
from trainer.loop import fit

pytestmark = pytest.mark.usefixtures("restored_torch")

SEQ_LEN = 50
RUNTIME = {"device": "cpu", "dtype": "float64"}
ON_SPLIT = {"runtime": RUNTIME, "contexts": []}
CPU = Compute(torch.device("cpu"), torch.float64)


@pytest.fixture
def gpt(tiny):
    torch.manual_seed(0)
    return GPT(tiny().model).double()


@pytest.fixture
def val(dataset_dir):
    return TokenStream(dataset_dir, read_manifest(dataset_dir), "val")


@pytest.fixture
def tokenizer(dataset_dir):
    return load_tokenizer(dataset_dir / "tokenizer.json")


@pytest.fixture
def measure(gpt, val, tokenizer):
    """Evaluates windows of the split, all or `n`: the loss of each group, and last that of all."""

    def evaluate(micro_batch, n=None):
        windows = open_eval_batches(val, SEQ_LEN, n)
        byte_lengths = torch.from_numpy(tokenizer.byte_lengths)
        return evaluate_windows(gpt, windows, byte_lengths, micro_batch, CPU, World(CPU.device))

    return evaluate


@pytest.fixture
def direct(gpt, val):
    """Nats and targets of every window, one after the other, without batches; the last is ragged."""
    nats = []
    targets = []
    tokens = torch.from_numpy(val.read(0, val.n_tokens))
    for begin in range(0, len(tokens) - 1, SEQ_LEN):
        window = tokens[begin : begin + SEQ_LEN + 1]
        targets.append(window[1:])
        with torch.no_grad():
            p = gpt(window[None, :-1])[0].softmax(-1)
        nats.append(-p[torch.arange(len(window) - 1), window[1:]].log().sum().item())
    return nats, targets


@pytest.mark.parametrize("micro_batch", [1, 7, 1000])
def test_the_whole_split_token_by_token(gpt, val, tokenizer, measure, direct, micro_batch):
    assert (val.n_tokens - 1) % SEQ_LEN, "the last window must be ragged for this to be a test"
    *_, loss = measure(micro_batch)
    nats = sum(direct[0])
    ids = torch.cat(direct[1]).tolist()
    text = b"".join(tokenizer.decode_bytes([i]) for i in ids if i != tokenizer.eot_id)
    assert (loss.tokens, loss.bytes) == (val.n_tokens - 1, len(text))
    assert loss.nats == pytest.approx(nats, rel=1e-12)
    assert loss.per_token == pytest.approx(nats / (val.n_tokens - 1), rel=1e-12)
    assert loss.bits_per_byte == pytest.approx(nats / math.log(2) / len(text), rel=1e-12)
    assert loss.perplexity == pytest.approx(math.exp(nats / (val.n_tokens - 1)), rel=1e-11)
    assert gpt.training
    assert all(p.grad is None for p in gpt.parameters())


@pytest.mark.parametrize("micro_batch", [1, 7])
def test_a_standard_error_is_that_of_the_mean_over_windows(val, measure, direct, micro_batch):
    """Of equal windows: their standard deviation over the root of their number."""
    n = (val.n_tokens - 1) // SEQ_LEN // 2
    *_, loss = measure(micro_batch, n)
    nats, _ = direct
    read = [nats[i * len(nats) // n] / SEQ_LEN for i in range(n)]
    assert loss.per_token == pytest.approx(statistics.fmean(read), rel=1e-12)
    assert loss.stderr == pytest.approx(statistics.stdev(read) / math.sqrt(n), rel=1e-9)


def test_windows_of_other_lengths_count_by_their_tokens_and_bytes(tokenizer, measure, direct):
    """A standard error of a ratio of sums: that of the mean of what each window is above the ratio."""
    *_, loss = measure(3)
    nats, targets = direct
    n_tokens = [len(text) for text in targets]
    n_bytes = [int(tokenizer.byte_lengths[text].sum()) for text in targets]
    n = len(nats)
    for amounts, unit, stderr in ((n_tokens, 1, loss.stderr), (n_bytes, math.log(2), loss.bits_stderr)):
        ratio = sum(nats) / sum(amounts)
        above = [(x - ratio * amount) / statistics.fmean(amounts) for x, amount in zip(nats, amounts, strict=True)]
        assert stderr == pytest.approx(statistics.stdev(above) / math.sqrt(n) / unit, rel=1e-9)


def test_groups_are_every_sixteenth_window(measure, direct):
    *groups, _ = measure(7)
    nats, targets = direct
    expected = [sum(nats[i::16]) / sum(map(len, targets[i::16])) for i in range(16)]
    assert [group.per_token for group in groups] == pytest.approx(expected, rel=1e-12)
    *groups, loss = measure(2, n=1)
    assert math.isnan(loss.stderr)
    assert sum(math.isfinite(group.per_token) for group in groups) == 1


def test_command_evaluates_what_training_does_and_writes_what_it_prints(tiny, capsys, val):
    fit(tiny({"runtime.dtype": "float64", "eval.batches": 2}))
    run_dir = tiny().run_dir
    raw = {"checkpoint": str(run_dir), "micro_batch": 3, **ON_SPLIT}
    run_evaluation(decode(EvaluateConfig, raw | {"batches": "all"}))
    assert json.loads((run_dir / "eval.json").read_text())["tokens"] == val.n_tokens - 1

    run_evaluation(decode(EvaluateConfig, raw))
    result = json.loads((run_dir / "eval.json").read_text())
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (result["step"], result["tokens"]) == (6, 2 * 64)  # batches of training
    assert result["loss"] == pytest.approx(last["val_loss"], rel=1e-12)
    assert result["bits_per_byte"] == pytest.approx(last["val_bits_per_byte"], rel=1e-12)
    out = capsys.readouterr().out
    assert result["loss_stderr"] == pytest.approx(last["val_loss_stderr"], rel=1e-9)
    assert f"loss {result['loss']:.4f} ± {result['loss_stderr']:.4f} nats per token" in out
    assert f"{result['bits_per_byte']:.4f} ± {result['bits_per_byte_stderr']:.4f} bits per byte" in out
    assert f"validation loss {last['val_loss']:.4f} ± {last['val_loss_stderr']:.4f} nats/token" in out


def test_training_evaluation_export_and_the_harness_measure_the_same_loss_of_a_padded_vocabulary(run_of, val, tmp_path):
    """That of the model's own probabilities of its 257 ids; only the loss whose gradient is taken has all 320 rows."""
    run_dir = run_of({"runtime.dtype": "float64", "eval.batches": 2, "model.pad_vocab": 64})
    run_evaluation(decode(EvaluateConfig, {"checkpoint": str(run_dir), **ON_SPLIT}))
    gpt, _ = load_model(run_dir)
    token_ids, targets = map(torch.from_numpy, open_eval_batches(val, 16, 8).rows(0, 8))
    with torch.no_grad():
        wanted = -gpt(token_ids).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean().item()

    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_loss"] == pytest.approx(wanted, rel=1e-12)
    assert json.loads((run_dir / "eval.json").read_text())["loss"] == pytest.approx(wanted, rel=1e-12)
    export_checkpoint(run_dir, tmp_path / "export")
    raw = json.loads((tmp_path / "export" / "config.json").read_text())["architecture"]
    exported = GPT(decode(GPTConfig, raw)).double()
    weights = load_file(tmp_path / "export" / "model.safetensors")
    exported.load_state_dict({name.removeprefix("gpt."): weight for name, weight in weights.items()})
    assert exported.loss(token_ids, targets).item() == pytest.approx(wanted, rel=1e-12)
    harness = pytest.importorskip("inference.harness_model", reason="lm-evaluation-harness is not installed")
    texts = [(ids, 1) for ids in torch.cat([token_ids, targets[:, -1:]], dim=1).tolist()]
    scores = harness.score_texts(gpt, texts, 3, CPU)
    assert -sum(nats for nats, _ in scores) / targets.numel() == pytest.approx(wanted, rel=1e-12)

    rows = torch.nn.functional.cross_entropy(
        (gpt.features(token_ids)[0] @ gpt.embed.weight.T).flatten(0, 1), targets.flatten()
    )
    assert gpt.loss(token_ids, targets).item() == pytest.approx(rows.item(), rel=1e-12)
    assert rows.item() > wanted + 1e-3  # there is a difference to speak of
