"""A scaling law is found again in losses that were computed from it, and predictions say how far they reach."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_report import make_run, val

from common.settings import UserError
from tools.scaling import Law, fit, run

TRUE = Law(*map(np.float64, (1.69, 406.4, 0.34, 410.7, 0.28)))  # Hoffmann et al. 2022, eq. 10
N, D = (x.ravel() for x in np.meshgrid([1e5, 3e5, 1e6, 3e6], [1e6, 3e6, 1e7, 3e7, 1e8], indexing="ij"))


def losses(noise=0.0, seed=1):
    return TRUE.loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, noise, len(N)))


def test_the_law_is_found_again():
    law, samples = fit(N, D, losses(), resamples=100)
    assert law == pytest.approx(TRUE, rel=1e-6)
    assert np.median(samples.E) == pytest.approx(TRUE.E, rel=1e-4)


def test_the_law_of_a_public_table_is_the_published_one():
    """Besiroglu et al. 2024 (arXiv 2404.10102) fitted 240 runs, read off figure 4 of Hoffmann et al. 2022."""
    N, D, L = np.loadtxt(Path(__file__).with_name("chinchilla.csv"), delimiter=",", skiprows=1).T
    law, samples = fit(N, D, L, resamples=200)
    # Printed by their notebook: the best fit, and standard errors of the constants, by the bootstrap too. Two of its
    # fits differ by 0.0006 of B; a standard deviation of 200 samples is off by 5 %, more for B's long tail.
    best = Law(*map(np.float64, (1.817236, 477.842, 0.347313, 2143.864, 0.367183)))
    errors = Law(*map(np.float64, (0.02566, 124.52, 0.01540, 1293.28, 0.02060)))
    assert law == pytest.approx(best, rel=1e-3)
    assert [sampled.std() for sampled in samples] == pytest.approx(list(errors), rel=0.2)


def test_one_run_that_went_wrong_changes_little():
    """The Huber loss counts it linearly."""
    wrong = losses()
    wrong[7] *= 1.1
    law, _ = fit(N, D, wrong, resamples=1)
    assert law.loss(1e7, 1e9) == pytest.approx(TRUE.loss(1e7, 1e9), rel=0.01)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Of 12 intervals that should each hold it with a chance of 90 %, at most 4 miss: more would have one of 200."""
    held = 0
    for seed in range(12):
        _, samples = fit(N, D, losses(noise=0.003, seed=seed), resamples=100)
        low, high = np.percentile(samples.loss(1e7, 3e8), (5, 95))
        held += bool(low <= TRUE.loss(1e7, 3e8) <= high)
    assert held >= 8


def test_tokens_and_the_best_size_are_those_of_the_law():
    assert TRUE.loss(1e7, TRUE.tokens(1e7, 5.5)) == pytest.approx(5.5, rel=1e-12)
    assert TRUE.tokens(1e5, 5.0) == np.inf  # more parameters are needed
    size, tokens = TRUE.best(1e18)
    assert 6 * size * tokens == pytest.approx(1e18)
    nearby = [TRUE.loss(size * factor, tokens / factor) for factor in (0.9, 1.1)]
    assert TRUE.loss(size, tokens) < min(nearby)


def test_runs_that_determine_no_law_are_refused():
    sizes = np.geomspace(1e5, 1e8, 8)
    for runs, message in [
        ((N[:6], D[:6], losses()[:6]), "at least 7 runs, not 6"),
        ((N[:10], D[:10], losses()[:10]), "2 sizes and 5 numbers of tokens"),
        ((sizes, 20 * sizes, TRUE.loss(sizes, 20 * sizes)), "tokens and size vary together"),
        ((N, D, 2 + 400 / D**0.3 + 0.01 * np.log(N)), "no law fits these runs: their loss does not fall with size"),
    ]:
        with pytest.raises(UserError, match=message):
            fit(*runs, resamples=1)


def table(path, rows):
    path.write_text("\n".join(["loss,parameters,tokens", *(f"{loss},{n},{d}" for n, d, loss in rows)]))
    return path


def test_a_table_of_runs_becomes_predictions_and_a_picture(tmp_path, capsys):
    csv = table(tmp_path / "runs.csv", zip(N, D, losses(0.003), strict=True))
    run([], csv, tmp_path / "out", 100, parameters=1e7, loss=6.0)
    near = capsys.readouterr().out
    assert "1e+07 parameters, 3.33 x the largest model:" in near
    assert "2 x the longest run" in near
    assert "order of magnitude" not in near
    predictions = json.loads((tmp_path / "out/scaling.json").read_text())["predictions"]
    low, middle, high = predictions["tokens to a loss of 6"]
    assert low < middle < high
    assert middle == pytest.approx(TRUE.tokens(1e7, 6.0), rel=0.2)
    assert (tmp_path / "out/scaling.png").stat().st_size > 10_000
    run([], csv, tmp_path / "out", 100, parameters=1e9, loss=1.0)
    far = capsys.readouterr().out
    assert "too far outside the runs for more than the order of magnitude" in far
    assert "tokens to a loss of 1: never, by this law" in far


def write_run(folder, n, steps, tokens, loss, n_vocab=257):
    config = {"max_steps": 10, "model": {"n_vocab": n_vocab}}
    make_run(folder, [val(steps, loss) | {"tokens": round(tokens)}], config, {"n_params": n})


def test_finished_runs_of_one_vocabulary_count(tmp_path, capsys):
    for i, (n, d, loss) in enumerate(zip(N, D, losses(), strict=True)):
        write_run(tmp_path / f"runs/{i}", n, 10 if i else 5, d, loss)  # the first has not finished
    run([tmp_path / "runs"], None, tmp_path / "out", 100)
    told = capsys.readouterr()
    assert "not finished, and left out: 1 run" in told.err + told.out
    law = json.loads((tmp_path / "out/scaling.json").read_text())["law"]
    assert law["alpha"] == pytest.approx(0.34, rel=1e-4)
    write_run(tmp_path / "runs/other", 1e5, 10, 1e6, 2.0, n_vocab=50257)
    with pytest.raises(UserError, match="different datasets or vocabularies"):
        run([tmp_path / "runs"], None, tmp_path / "out", 100)


@pytest.mark.slow
def test_a_ladder_is_trained_once_and_fitted(tmp_path, tiny_args, command, monkeypatch, capsys):
    """As train.py does, in this process."""
    trained = lambda line: SimpleNamespace(returncode=command("train", *line[2:]).status)  # noqa: E731
    monkeypatch.setattr("tools.scaling.subprocess", SimpleNamespace(run=trained))
    varied = "run_dir", "model.n_embd", "max_steps", "checkpoint.every", "eval.every"
    own = [option for option in tiny_args if option.split("=")[0] not in varied]
    ladder = f"{' '.join(own)} model.n_embd=8,16,32 max_steps=12,24,48"
    tmp_path /= "a, b"
    run([], None, tmp_path, 100, ladder)
    assert "9 runs; the law is off by" in capsys.readouterr().out
    assert len({n for n, _, _ in json.loads((tmp_path / "scaling.json").read_text())["runs"]}) == 3
    written = {path: path.read_bytes() for path in tmp_path.glob("runs/*/metrics.jsonl")}
    assert len(written) == 9
    run([], None, tmp_path, 100, ladder)
    assert written == {path: path.read_bytes() for path in written}


def test_a_ladder_that_cannot_be_trained_is_refused(tmp_path, capfd):
    with pytest.raises(UserError, match="training failed, see above"):
        run([], None, tmp_path / "a", 100, "model.n_layer=0,1,2 max_steps=12,24,48")
    assert "n_layer" in capfd.readouterr().err
    with pytest.raises(UserError, match="No closing quotation: give options"):
        run([], None, tmp_path, 100, "seed='1,2")


@pytest.mark.parametrize("cell", ["x", "-1", "inf", "", "0"])
def test_a_cell_that_is_no_positive_number_is_named(tmp_path, cell):
    csv = table(tmp_path / "runs.csv", [(1e5, 1e6, 3.0), (1e5, 1e6, cell)])
    with pytest.raises(UserError, match=r"runs.csv, line 3: .*numbers"):
        run([], csv, tmp_path, 100)


def test_a_loss_without_a_size_is_refused(tmp_path):
    with pytest.raises(UserError, match="loss=2 needs parameters"):
        run([], tmp_path / "runs.csv", tmp_path, 100, loss=2.0)
