"""The comparison of mechanisms: equal terms, complete results, and it resumes after any interruption."""

import json
import math

import pytest

import tools.compare.compare as compare
import tools.compare.report as compare_report
from common.exits import AGAIN
from common.settings import UserError
from model.attention import ATTENTION
from tools.compare.compare import CONTROL, arms, count, follow, models_of, search
from tools.compare.report import verdict

PAIR = (CONTROL, "linear mlp rotary")
SMALL = compare.Size(3, 4, 24, 96, seq_len=32, batch_tokens=32)


@pytest.fixture
def compared(command, dataset_dir, tmp_path, restored_torch, monkeypatch):
    """Runs the script on two arms by default, with short sequences; returns its status and output."""
    monkeypatch.setitem(compare.SIZES, "small", SMALL)
    monkeypatch.setattr(compare_report, "_ROUNDS", 2)
    monkeypatch.setattr(compare, "_EVAL_BATCHES", 4)
    monkeypatch.setattr("trainer.run.draw_losses", lambda *_, **__: None)  # it takes longer than these runs

    def run(*more, arms=PAIR[1:], out="out", steps="2"):
        options = [f"dataset_dir={dataset_dir}", f"out={tmp_path / out}", f"steps={steps}"]
        return command("scripts/compare_attention", *options, f"arms={','.join(arms)}", *more)

    return run


@pytest.mark.parametrize(
    ("size", "each"), [("small", 7), *(pytest.param(size, 1, marks=pytest.mark.slow) for size in ("small", "large"))]
)
def test_parameters_are_equal_within_one_percent(dataset_dir, size, each):
    """Of each seventh arm, and of all in the slow tests."""
    size, names = compare.SIZES[size], list(arms())[::each]
    models = models_of(dataset_dir, size, names)
    assert next(iter(models)) == CONTROL
    assert models.keys() == {CONTROL, *names}
    wanted = count(models[CONTROL])
    for name, model in models.items():
        assert abs(count(model) / wanted - 1) <= 0.01, name
        assert (model.n_head, model.head_features) == (size.n_head, size.head_dim), name


def test_parameters_that_cannot_be_equal_are_refused():
    with pytest.raises(UserError, match=r"^linear mlp rotary: [\d,]+ parameters are not within 1 % .* 175,900$"):
        compare.equal_model("linear mlp rotary", arms()["linear mlp rotary"], 257, 175_900, SMALL)


def test_every_mechanism_is_in_it_and_log_space_on_equal_terms():
    every = arms()
    used = [arm["attention"]["name"] for arm in every.values()]
    used += [layer["name"] for arm in every.values() for layer in arm.get("attention_pattern", [])]
    assert set(used) == {cls.model_fields["name"].annotation.__args__[0] for cls in ATTENTION}
    for block in ("mlp", "glu"):
        for position in ("none", "learned", "rotary", "log_recurrence"):
            names = ["softmax", *(["log_space", "log_space_signed"] if position != "rotary" else [])]
            assert {f"{name} {block} {position}" for name in names} <= set(every)
    forms = {
        (a["attention"].get("values"), a["attention"].get("learned")) for n, a in every.items() if "projection" in n
    }
    assert len(forms) == 4


@pytest.mark.slow
def test_it_trains_reports_and_goes_on_where_it_was(compared, tmp_path, monkeypatch):
    result = compared()
    assert result.status == 0, result.err
    whole = json.loads((tmp_path / "out" / "compare.json").read_text())["small"]
    assert set(whole["arms"]) == set(PAIR)
    for row in whole["arms"].values():
        assert len(row["losses"]) == 3
        assert len(row["tried"]) >= 3
        assert row["losses"][0] == min(row["tried"].values()) == row["tried"][f"{row['lr']:g}"]
        assert row["tokens_per_second"] > 0
    text = (tmp_path / "out" / "compare.md").read_text()
    assert f"| **{CONTROL}** |" in text
    assert "| linear mlp rotary |" in text
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")

    # Finished runs are read, not run.
    (tmp_path / "out" / "small" / "compare.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(compare, "fit", lambda config: pytest.fail("a finished run was begun again"))
        assert compared().status == 0
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["small"]["arms"] == whole["arms"]

    # Stopped in the midst of the second run, and killed before the fourth.
    fit, begun = compare.fit, []

    def stopped(config):
        begun.append(config)
        if len(begun) == 2:
            fit(config.model_copy(update={"stop_at": 1}))
            raise SystemExit(AGAIN)
        if len(begun) == 5:
            raise KeyboardInterrupt
        fit(config)

    monkeypatch.setattr(compare, "fit", stopped)
    for _ in range(2):
        result = compared(arms=[CONTROL], out="other")
        assert (result.status, result.err) == (130, "error: interrupted; run the same command again to continue\n")
    assert begun[1] == begun[2]
    assert compared(arms=[CONTROL], out="other").status == 0
    other = json.loads((tmp_path / "other" / "compare.json").read_text())["small"]["arms"]
    assert other.keys() == {CONTROL}
    for key in ("tried", "losses", "lr", "parameters"):
        assert other[CONTROL][key] == whole["arms"][CONTROL][key]

    # Two at a time; and not on other terms.
    result = compared("jobs=2")
    assert result.status == 0, result.err
    result = compared(steps="3")
    assert result.status == 1
    assert "terms.json shows that this folder has runs with other options" in result.err


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (4, [2, 4, 8]),
        (8, [2, 4, 8, 16]),
        (2, [1, 2, 4, 8]),
        (16, [2, 4, 8, 16, 32]),
        (100, [2, 4, 8, 16, 32]),
        (0.01, [0.5, 1, 2, 4, 8]),
    ],
)
def test_the_grid_is_extended_while_the_best_is_at_an_edge(best, tried):
    losses = search(lambda lr: abs(math.log(lr / best)), [8, 2, 4])
    assert sorted(losses) == tried


def test_a_learning_rate_that_fails_a_seed_is_not_the_best():
    losses = {2.0: 1.5, 4.0: 1.0, 8.0: math.inf}
    row = follow(
        lambda lr, seed: math.inf if (lr, seed) == (4.0, 2) else losses[lr] + seed / 100, [2.0, 4.0, 8.0], [1, 2, 3]
    )
    assert row["lr"] == 2.0
    assert row["losses"] == [1.51, 1.52, 1.53]
    assert row["at_edge"]
    assert follow(lambda lr, seed: math.inf, [2.0, 4.0, 8.0], [1, 2, 3]) is None


def test_a_run_that_diverged_is_not_begun_again(tiny, tmp_path, monkeypatch, dataset_dir):
    terms = compare.Terms(dataset_dir, tmp_path, SMALL, 2, [1.0, 2.0, 3.0], [1, 2, 3])

    def diverge(config):
        (config.run_dir / "bad_steps").mkdir(parents=True)
        (config.run_dir / "metrics.jsonl").write_text("")
        (config.run_dir / "config.json").write_text(json.dumps({"config": config.model_dump(mode="json")}))
        raise UserError("step 1: loss is nan")

    monkeypatch.setattr(compare, "fit", diverge)
    model = models_of(dataset_dir, SMALL, [CONTROL])[CONTROL]
    assert [compare.train(terms, CONTROL, model, 1.0, 1) for _ in range(2)] == [math.inf, math.inf]
    other = model.model_copy(update={"n_layer": 2})
    with pytest.raises(UserError, match=f"has another model than {CONTROL} now has: give another out$"):
        compare.train(terms, CONTROL, other, 1.0, 1)


def test_better_is_better_by_every_seed():
    assert verdict([1.0, 1.1, 1.2], [1.3, 1.4, 1.5]) == "better"
    assert verdict([1.6, 1.7, 1.8], [1.3, 1.4, 1.5]) == "worse"
    assert verdict([1.0, 1.1, 1.3], [1.2, 1.4, 1.5]) == "level"


def test_what_cannot_be_done_is_one_line(compared):
    result = compared(arms=["log_space glu non"])
    assert result.status == 1
    assert result.err.startswith("error: there is no arm 'log_space glu non'")
    result = compared("learning_rates=0")
    assert result.status == 1
    assert result.err.startswith("error: config learning_rates='0'")


def test_one_learning_rate_and_one_seed_are_one_run():
    assert follow(lambda lr, seed: lr + seed, [2.0], [7]) == {
        "lr": 2.0,
        "at_edge": False,
        "losses": [9.0],
        "tried": {2.0: 9.0},
    }


def test_sizes_are_drawn_together(tmp_path):
    row = {"lr": 1e-3, "at_edge": False, "losses": [2.0, 2.25], "mean": 2.125, "parameters": 1000}
    arms = {CONTROL: row | {"tokens_per_second": 10.0, "times_as_fast": 1.0}}
    for size in ("large", "small"):
        (tmp_path / size).mkdir()
        found = {"control": CONTROL, "tokens": 64, "seq_len": 32, "arms": arms}
        (tmp_path / size / "compare.json").write_text(json.dumps(found))
    compare_report.draw(tmp_path)
    assert list(json.loads((tmp_path / "compare.json").read_text())) == ["small", "large"]
    assert (tmp_path / "compare.md").read_text().count(f"| **{CONTROL}** | 2.1250 (2.0000 to 2.2500) | +0.0000 |") == 2
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
