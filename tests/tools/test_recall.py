"""The recall command: arms, accuracy by its definition, resuming, and one-line errors."""

import json

import pytest
import torch

import tools.compare.recall as recall
from data.prepare.dataset import prepare
from data.shards import TokenStream

ARMS = ["softmax_rotary", "hybrid_softmax"]


@pytest.fixture
def recalled(command, tmp_path, restored_torch):
    """Runs the script on tiny tasks."""

    def run(*more, arms=ARMS, steps=4):
        options = ["difficulties=2,3", "head_dim=4", "learning_rates=1e-3", f"steps={steps}", f"out={tmp_path}"]
        return command("scripts/recall", *options, f"arms={','.join(arms)}", *more)

    return run


def case(**changes):
    values = {"task": "mqar", "difficulty": 2, "arm": ARMS[0], "head_dim": 4, "lr": 1e-3, "steps": 1}
    return recall.Case(**values | {"seed": 1} | changes)


def test_hybrids_have_one_layer_in_four_of_the_other_mechanism():
    for name, last in (("hybrid_softmax", "softmax"), ("hybrid_window", "sliding_window")):
        _, model = case(arm=name, head_dim=8).model()
        assert [layer.name for layer in model.layers] == ["log_space"] * 3 + [last]
        assert [layer.decay for layer in model.layers[:3]] == ["head"] * 3


def test_accuracy_counts_the_answers_of_all_held_out_documents(tmp_path):
    """A model that knows the right token in some places, and is wrong in the others."""

    class Knows:
        embed = torch.nn.Embedding(1, 1)

        def features(self, ids, state, return_state):
            follows = torch.nn.functional.one_hot(ids.roll(-1, 1), 257)
            follows[:, 4] = 0  # the second of four answers
            return follows, None

        def logits(self, x):
            return x

    config = case(difficulty=4).dataset(tmp_path)
    manifest = prepare(config)
    held_out = recall.EvalBatches(TokenStream(config.out_dir, manifest, "val"), 17)
    assert 450 < len(held_out) < 570
    places = [place - 1 for place in config.data.answers]
    assert places == [8, 10, 12, 14]
    whole = held_out.rows(0, len(held_out))
    assert recall.accuracy(Knows(), *recall.only_answers(*whole, places)) == 1
    assert recall.accuracy(Knows(), *recall.only_answers(*whole, [4, 8, 10, 12])) == 0.75


def test_documents_of_other_difficulties_are_whole_and_new(tmp_path):
    """Their answers are the last five digits, which stand earlier in the text too."""
    (far,) = case(task="passkey", difficulty=100, tested_at="3000").tests()
    ids, answers = recall.unseen(far)
    assert ids.shape == (512, len(far.source.text(recall.Random(1))) - 1)
    for text, wanted in zip(ids[:20], answers[:20], strict=True):
        key = bytes(wanted[wanted >= 0].tolist())
        assert len(key) == 5
        assert bytes(text.tolist()).count(b"The pass key is " + key) == 1
        assert bytes(text.tolist()).endswith(b"The pass key is " + key[:4])
    assert len(recall.unseen(case(task="induction", difficulty=200_000))[0]) == 16


def test_a_model_is_tested_at_other_difficulties(recalled, tmp_path):
    result = recalled("task=passkey", "tested_at=5,700", arms=["log_space_forgets"], steps=1)
    assert result.status == 0, result.err
    whole = json.loads((tmp_path / "recall.json").read_text())
    assert [[n for n, _ in row["tested"]] for row in whole["runs"]] == [[5, 700]] * 2
    assert all(0 <= share <= 1 for row in whole["runs"] for _, share in row["tested"])
    assert "at 700" in result.out


def test_a_bigger_head_keeps_more_and_log_space_the_same_of_any_length(tmp_path):
    def kept(arm, head_dim, difficulty):
        config = case(difficulty=difficulty).dataset(tmp_path)
        tested = recall.EvalBatches(TokenStream(config.out_dir, prepare(config), "val"), 4 * difficulty + 1)
        _, model = case(arm=arm, head_dim=head_dim).model()
        return recall.state_size(recall.GPT(model), torch.from_numpy(tested.rows(0, 1)[0]))

    fixed = "log_space_forgets"
    assert kept(fixed, 4, 2) == kept(fixed, 4, 5) < kept(fixed, 8, 2)
    assert kept(ARMS[0], 4, 5) - kept(ARMS[0], 4, 2) == 4 * 2 * 2 * 4 * 12, "layers, keys and values, heads, head_dim"


def test_only_answers_are_trained_on(tmp_path, monkeypatch, restored_torch):
    seen = []
    monkeypatch.setattr(recall.Training, "step", lambda self: seen.append(self.batch))
    config = case().dataset(tmp_path)
    prepare(config)
    (tmp_path / "runs").mkdir()
    recall.train(case(), tmp_path)
    (((ids, targets),),) = seen
    assert ids.shape == (32, 9)
    assert ((targets >= 0).sum(0) > 0).nonzero().flatten().tolist() == [4, 6]
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        pairs = dict([row[:2], row[2:4]])
        assert [pairs[row[4]], pairs[row[6]]] == [wanted[4], wanted[6]]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mqar", "induction", "selective_copy", "passkey"])
def test_it_trains_reports_and_goes_on_where_it_was(recalled, task, tmp_path, monkeypatch):
    result = recalled(f"task={task}")
    assert result.status == 0, result.err
    whole = json.loads((tmp_path / "recall.json").read_text())
    assert [(row["difficulty"], row["arm"]) for row in whole["best"]] == [(n, arm) for n in (2, 3) for arm in ARMS]
    assert all(0 <= row["accuracy"] <= 1 and row["state"] > 0 and row["steps"] == 4 for row in whole["runs"])
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")

    next((tmp_path / "runs").glob("*-3-softmax*")).unlink()
    trained, train = [], recall.train
    monkeypatch.setattr(recall, "train", lambda case, out: (trained.append(case.arm), train(case, out))[1])
    assert recalled(f"task={task}").status == 0
    assert trained == [ARMS[0]]
    again = json.loads((tmp_path / "recall.json").read_text())
    assert again["runs"] == whole["runs"]


@pytest.mark.slow
def test_two_at_a_time_give_the_same(recalled, tmp_path):
    assert recalled("jobs=2").status == 0
    runs = sorted((tmp_path / "runs").iterdir())
    found = [path.read_text() for path in runs]
    assert len(found) == 4
    for path in runs:
        path.unlink()
    assert recalled().status == 0
    assert [path.read_text() for path in runs] == found


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["difficulties=2,65"], "error: config data: n_pairs=65 is more than the 64 keys of key_letters=1"),
        (["arms=log_space mlp non"], "error: there is no arm 'log_space mlp non': did you mean 'log_space mlp none'?"),
        (
            ["head_dim=3"],
            "error: attention: rotary positions rotate pairs of features: 3 a head is odd, use an even number",
        ),
        (["tested_at=4,65"], "error: config data: n_pairs=65 is more than the 64 keys of key_letters=1"),
        (["learning_rates=0"], "error: config learning_rates='0'"),
        (["learning_rates="], "error: config learning_rates=''"),
        (["task=copy"], "error: config task='copy'"),
    ],
    ids=str,
)
def test_mistakes_are_one_line_before_anything_is_made(recalled, tmp_path, more, message):
    result = recalled(*more)
    assert result.status == 1
    assert result.err.startswith(message)
    assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
