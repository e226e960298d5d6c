"""scripts/bench_decode.py runs, and sees which states are constant and which grow."""

import json

SMALL = ["n_layer=1", "n_embd=32", "n_head=2", "head_dim=16", "n_vocab=64"]


def test_state_is_constant_in_log_space_and_grows_with_softmax(command, restored_torch, tmp_path):
    result = command(
        *("scripts/bench_decode", "--models", "log_gpt_1m", "gpt2_124m", "--positions", "1100", "40", "--steps", "3"),
        *("--set", "runtime.device=cpu", *(f"model.{option}" for option in SMALL), "--out", str(tmp_path)),
    )
    assert result.status == 0, result.err
    models = json.loads((tmp_path / "bench.json").read_text())["models"]
    rows = {(name, row["position"]): row for name in models for row in models[name]}
    assert list(rows) == [(name, position) for name in ("log_gpt_1m", "gpt2_124m") for position in (40, 1100)]
    assert all(row["seconds_per_token"] > 0 for row in rows.values())
    log_space = 4 * (2 * (16 * 16 + 16) + 32)  # a head's two sums, and the recurrence's
    assert [rows["log_gpt_1m", position]["state_bytes"] for position in (40, 1100)] == [log_space] * 2
    keys_and_values = 4 * 2 * 2 * 16  # of a token; 1,100 tokens are more than the 1,024 positions of the file
    assert [rows["gpt2_124m", at]["state_bytes"] for at in (40, 1100)] == [at * keys_and_values for at in (40, 1100)]
    assert "log_gpt_1m" in result.out
    assert "1,100" in result.out
