"""eval.py's tables against a direct computation, token by token in float64; its picture; and what it refuses."""

import itertools
import json
import math
import random
import statistics

import pytest
import torch

from common.figures import encode_png
from common.settings import UserError, decode
from data.document_index import find_documents
from data.shards import TokenStream, read_manifest
from inference.eval_report import draw_evaluation, show_evaluation
from inference.evaluate import EvaluateConfig, choose_position_bins, evaluate, open_evaluation, run_evaluation
from model.gpt import GPT
from runtime.checkpoint import load_model
from runtime.distributed import World

pytestmark = pytest.mark.usefixtures("restored_torch")

SEQ_LEN = 16


@pytest.fixture(scope="session")
def sets_dir(make_dataset):
    """A dataset of three named sets, one with a name that matplotlib and rich would read as markup."""
    rng = random.Random(1)
    words = {"code": ["def", "self", "("], "$x$ [red]_prose": ["the", "of", "é"], "chat": ["🙂", "hi", "日本"]}
    lines = [
        {"text": " ".join(rng.choices(words[name], k=rng.randrange(12))), "meta": {"pile_set_name": name}}
        for name in rng.choices(list(words), k=160)
    ]
    return make_dataset(documents=lines, val_fraction=0.4)


@pytest.fixture
def trained(run_of, sets_dir):
    """Trains a tiny model on the sets, once for all tests, and returns where."""
    settings = {"runtime.dtype": "float64", "max_steps": 3, "dataset_dir": str(sets_dir), "eval.batches": None}
    return lambda changes=None: run_of(settings | (changes or {}))


def configured(run_dir, **settings):
    float64 = {"device": "cpu", "dtype": "float64"}
    return decode(EvaluateConfig, {"checkpoint": run_dir, "runtime": float64} | settings)


def evaluated(run_dir, **settings):
    """What eval.json holds afterwards."""
    run_evaluation(configured(run_dir, **settings))
    return json.loads((run_dir / "eval.json").read_text())


def all_tokens(sets_dir):
    stream = TokenStream(sets_dir, read_manifest(sets_dir), "val")
    return torch.from_numpy(stream.read(0, stream.n_tokens))


@torch.no_grad()
def nats_of(gpt, window):
    """Cross-entropy of every token but the first, from one call."""
    p = gpt(window[None, :-1])[0].softmax(-1)
    return (-p[torch.arange(len(window) - 1), window[1:]].log()).tolist()


def in_windows(gpt, tokens, length):
    """(position, nats) of every target, in windows side by side."""
    found = []
    for begin in range(0, len(tokens) - 1, length):
        found += enumerate(nats_of(gpt, tokens[begin : begin + length + 1]))
    return found


@pytest.mark.parametrize("attention", [{"name": "log_space", "decay": "head"}, {"name": "softmax"}])
def test_documents_that_do_not_see_each_other_are_as_each_alone(trained, sets_dir, attention):
    """With the state carried through a text of many documents, and in windows: as each document alone."""
    run_dir = trained({"data.document_reset": True, "model.attention": attention})
    result = evaluated(run_dir, contexts=[40], context_windows=None, seq_len=40)
    gpt, tokenizer = load_model(run_dir)
    alone = GPT(gpt.config).double()
    alone.load_state_dict(gpt.state_dict())
    tokens = all_tokens(sets_dir)
    found = []
    for begin in range(0, len(tokens) - 1, 40):
        window = tokens[begin : begin + 41]
        starts = (window[:-1] == tokenizer.eot_id).nonzero().flatten().tolist()
        for first, last in itertools.pairwise(sorted({0, *starts, len(window) - 1})):
            found += nats_of(alone, window[first : last + 1])
    assert result["tokens"] == len(found) == len(tokens) - 1
    for losses in (result, result["contexts"][0]):
        assert losses["loss"] == pytest.approx(statistics.fmean(found), rel=1e-11)
    together = [nats for _, nats in in_windows(alone, tokens, 40)]
    assert sum(together) != pytest.approx(sum(found), rel=1e-6)


def assert_losses(result, found):
    """Check the loss, and that of every bin of positions, against (position, nats) of every target."""
    assert result["tokens"] == len(found)
    assert result["loss"] == pytest.approx(statistics.fmean(nats for _, nats in found), rel=1e-11)
    for part in result["by_position"]:
        nats = [n for position, n in found if part["start"] <= position < part["stop"]]
        assert part["tokens"] == len(nats)
        assert part["loss"] == pytest.approx(statistics.fmean(nats), rel=1e-11)
    assert sum(part["tokens"] for part in result["by_position"]) == len(found)


def test_sets_and_positions_have_the_losses_of_their_tokens(trained, sets_dir, capsys):
    run_dir = trained()
    result = evaluated(run_dir, micro_batch=5)
    gpt, tokenizer = load_model(run_dir)
    tokens = all_tokens(sets_dir)
    found = in_windows(gpt, tokens, SEQ_LEN)
    assert (len(tokens) - 1) % SEQ_LEN, "the last window must be ragged for this to be a test"
    assert_losses(result, found)

    places = find_documents(TokenStream(sets_dir, read_manifest(sets_dir), "val"), 0, len(tokens))
    names = [place.set_name for place in places for _ in range(place.start, place.stop)][1:]
    assert len(result["sets"]) == 3
    out = capsys.readouterr().out
    for name, row in result["sets"].items():
        of_set = [i for i, set_name in enumerate(names) if set_name == name]
        nats = [found[i][1] for i in of_set]
        n_bytes = sum(int(tokens[i + 1]) != tokenizer.eot_id for i in of_set)  # every other token is a byte
        assert (row["tokens"], row["bytes"]) == (len(nats), n_bytes)
        assert row["loss"] == pytest.approx(statistics.fmean(nats), rel=1e-12)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]), rel=1e-11)
        assert row["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / n_bytes, rel=1e-12)
        assert f"{name}  " in out
        assert f"{row['loss']:.4f}" in out
    order = [row["tokens"] for row in result["sets"].values()]
    assert order == sorted(order, reverse=True)


def test_a_stride_gives_every_token_the_window_before_it(trained, sets_dir):
    run_dir = trained()
    result = evaluated(run_dir, stride=5, contexts=[])
    gpt, _ = load_model(run_dir)
    tokens = all_tokens(sets_dir)
    found = list(enumerate(nats_of(gpt, tokens[: SEQ_LEN + 1])))
    while len(found) < len(tokens) - 1:  # by the definition: new targets at the end of a window of SEQ_LEN
        begin = len(found) - SEQ_LEN + 5
        window = list(enumerate(nats_of(gpt, tokens[begin : begin + SEQ_LEN + 1])))
        found += window[SEQ_LEN - 5 :]
    assert_losses(result, found)


@pytest.mark.parametrize("attention", ["log_space", "softmax"])
@pytest.mark.slow
def test_long_contexts_are_those_of_one_call(trained, sets_dir, monkeypatch, attention):
    monkeypatch.setattr("inference.evaluate._CONTEXT_CHUNK", 37)  # windows are read in several chunks
    run_dir = trained({"model.attention": {"name": attention}})
    tokens = all_tokens(sets_dir)
    longest = len(tokens) - 1
    result = evaluated(run_dir, contexts=[longest, 300, 50], context_windows=None, micro_batch=4)
    gpt, _ = load_model(run_dir)
    assert [row["context"] for row in result["contexts"]] == [SEQ_LEN, 50, 300, longest]
    for row in result["contexts"]:
        assert_losses(row, in_windows(gpt, tokens, row["context"]))


@pytest.mark.parametrize("size", [2, 50])
@pytest.mark.slow
def test_any_number_of_processes_covers_everything_once(trained, size):
    evaluation = open_evaluation(configured(trained(), contexts=[20, 300], micro_batch=3))
    alone = []
    shares = []

    class Recorded(World):
        """One of several processes, each of which continues with the sums of one process alone."""

        def sum(self, value):
            sums = alone if self.size == 1 else shares[self.rank]
            sums.append(value)
            return alone[len(sums) - 1]

    evaluate(evaluation, Recorded(torch.device("cpu")))
    for rank in range(size):
        shares.append([])
        evaluate(evaluation, Recorded(torch.device("cpu"), rank, size))
    for whole, *parts in zip(alone, *shares, strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"contexts": [8, 17]}, "contexts=17 is longer than the text or the learned positions: use at most 16"),
        ({"contexts": 5}, r"config contexts=5: Input should be a valid list"),
        ({"stride": 17}, "stride=17 would skip text between windows of 16 tokens: lower it"),
    ],
)
def test_what_cannot_be_measured_is_said(trained, settings, message):
    run_dir = trained({"model.position": {"name": "learned", "max_len": 16}})
    with pytest.raises(UserError, match=message):
        evaluated(run_dir, **settings)


def test_contexts_that_are_possible_are_chosen(trained, sets_dir):
    assert 1024 < len(all_tokens(sets_dir)) < 4096
    assert [row["context"] for row in evaluated(trained())["contexts"]] == [SEQ_LEN, 1024]  # on the same text
    assert evaluated(trained({"model.position": {"name": "learned", "max_len": 16}}))["contexts"] == []


def test_bins_of_positions_are_two_an_octave():
    assert choose_position_bins(1) == [0, 1]
    assert choose_position_bins(16) == [0, 1, 2, 3, 4, 6, 8, 12, 16]
    assert choose_position_bins(17) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 17]


def test_results_are_kept_by_checkpoint_and_settings(trained):
    """A quick evaluation replaces eval.json alone; the results of all others, in other dtypes too, stay."""
    run_dir = trained({"seed": 5})
    auto = {"device": "cpu", "dtype": "auto"}
    results = {
        "": evaluated(run_dir, micro_batch=3, runtime=auto),
        ",batches=1,contexts=none": evaluated(run_dir, batches=1, contexts=[], runtime=auto),
        ",contexts=20-30": evaluated(run_dir, contexts=[20, 30], runtime=auto),
        ",contexts=none,runtime.dtype=float64": evaluated(run_dir, contexts=[]),
    }
    kept = {path.name: json.loads(path.read_text()) for path in (run_dir / "evals").iterdir()}
    assert kept == {f"step-00000003{settings}.json": result for settings, result in results.items()}


def test_the_picture_shows_losses_and_plain_numbers(trained, monkeypatch):
    drawn = []
    monkeypatch.setattr("inference.eval_report.encode_png", lambda figure: drawn.append(figure) or encode_png(figure))
    result = evaluated(trained(), contexts=[20, 300])
    draw_evaluation(result, SEQ_LEN)
    draw_evaluation(result | {"contexts": [], "loss_of": "answers"}, SEQ_LEN)
    with_contexts, without = (figure.axes[0] for figure in drawn)
    assert {"16", "64", "256"} <= {label.get_text() for label in with_contexts.get_xticklabels()}
    lines = {line.get_label(): list(line.get_ydata()) for line in with_contexts.lines}
    for row in result["contexts"]:
        losses = [bin["loss"] for bin in row["by_position"] if bin["stop"] > 16]
        assert lines[f"contexts of {row['context']:,} tokens"] == losses
    assert lines["mean over a context"] == [row["loss"] for row in result["contexts"]]
    assert drawn[1].get_suptitle().startswith("loss on answers ")
    assert "mean over a context" not in [line.get_label() for line in without.lines]


def test_losses_that_are_not_finite_are_null_and_drawn_as_nothing(trained):
    result = evaluated(trained(), contexts=[20, 300])
    for row in (result, *result["contexts"], *result["by_position"]):
        row["loss"] = None
    assert draw_evaluation(result, SEQ_LEN).startswith(b"\x89PNG")


HEAD = {"q": [5, -54.9, -55.1, 0], "k": [46, 44, -26, -math.inf], "log_v": [24, 26, -21, -19]}  # bounded: 1, 2, 2 of 4
PAIRS = {"q": [0, 0, 0, -61], "k": [30, 0, 20, 0], "log_v": [0] * 4}  # a_i + b_j: two of q's, and one of k's


@pytest.mark.parametrize(
    ("attention", "head", "expected"),
    [
        ({"name": "log_space"}, HEAD, {"q": 1 / 4, "k": 2 / 4, "log_v": 2 / 4}),
        ({"name": "log_space_signed"}, HEAD, {"q": 1 / 4, "k": 2 / 4}),
        ({"name": "log_space", "product": True}, PAIRS, {"q": 2 / 4, "k": 1 / 4, "log_v": 0}),
    ],
)
def test_shares_beyond_bounds_are_those_of_all_log_space_layers(trained, attention, head, expected):
    """Of two such layers, one is far below its bounds."""
    sizes = {"d_key": 4, "d_val": 4}
    pattern = [attention | sizes, attention | sizes, {"name": "softmax"}]
    run_dir = trained({"model.n_layer": 3, "model.attention_pattern": pattern})
    assert evaluated(run_dir, contexts=[])["beyond_bounds"] == dict.fromkeys(expected, 0)
    evaluation = open_evaluation(configured(run_dir, contexts=[]))
    qkv = evaluation.loaded.gpt.blocks[1].attention.qkv
    with torch.no_grad():
        qkv.weight.zero_()
        of_two_heads = [torch.tensor(values * 2).unsqueeze(1) for values in head.values()]
        qkv.bias.copy_(qkv.join(of_two_heads).squeeze(1))
    result = evaluate(evaluation, World(torch.device("cpu")))
    assert result["beyond_bounds"] == {name: share / 2 for name, share in expected.items()}


def test_a_warning_says_what_is_beyond_bounds(trained, capsys):
    result = evaluated(trained({"model.attention": {"name": "softmax"}}), contexts=[])
    assert result["beyond_bounds"] is None
    show_evaluation(result | {"beyond_bounds": {"q": 0.0, "k": 0.001, "log_v": 0.001}}, "")
    assert capsys.readouterr().err == ""
    show_evaluation(result | {"beyond_bounds": {"q": 0.00125, "k": 0.001, "log_v": 1.0}}, "")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: 0.125 % of q and 100 % of log_v are beyond the bounds of log-space attention, and")
