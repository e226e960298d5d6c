"""What a run says at its start, in words that need no key of the configuration."""

import pytest
from alone import open_run

from data.shards import read_manifest
from trainer.records.announce import start_lines

pytestmark = pytest.mark.usefixtures("restored_torch")

SOFTMAX = {"name": "softmax", "decay": "head"}


def said(config):
    """The lines by their first word."""
    return dict(line.split(maxsplit=1) for line in start_lines(open_run(config)))


def test_six_lines_say_what_a_run_is(tiny, dataset_dir):
    config = tiny({"eval.batches": None})
    splits = read_manifest(dataset_dir).splits
    train, val = (splits[name].total.tokens for name in ("train", "val"))
    read = f"(tokenizer bytes, 257 ids); training reads 384 tokens, {384 / train:.3g} epochs"
    assert start_lines(open_run(config)) == [
        "model     7,968 parameters: 1 layer, 2 heads, 16 features; log-space attention",
        f"data      {train:,} tokens in {dataset_dir} {read}",
        "batch     64 tokens a step: 4 sequences of 16, 2 at a time",
        "schedule  6 steps of AdamW; the learning rate rises to 0.01 in 2 steps, then falls to 0.001",
        "device    the CPU with 1 thread in float32",
        f"run       {config.run_dir}: saved every 2 steps, evaluated every 3 steps on "
        f"all {val - 1:,} validation tokens",
    ]


@pytest.mark.parametrize(
    ("changes", "line", "text"),
    [
        ({"max_steps": 1_000_000}, "data", "training reads 64,000,000 tokens, 1,"),
        ({"eval.every": None, "checkpoint.every": None}, "run", ": saved at the end, evaluated at the end on 256 of"),
        ({"runtime.micro_batch": 8}, "batch", "4 sequences of 16, 4 at a time"),
        ({"schedule.warmup_steps": 90, "max_steps": 20}, "schedule", "rises to 0.01 in 2 steps (90 would not fit)"),
        (
            {"schedule": {"name": "wsd", "warmup_steps": 2, "decay": 0.2}, "max_steps": 21},
            "schedule",
            "the learning rate rises to 0.01 in 2 steps, then stays at 0.01 until step 16, then falls to 0",
        ),
    ],
)
def test_a_line_says_what_is_unusual(tiny, changes, line, text):
    assert text in said(tiny(changes))[line]


def test_what_is_lowered_to_fit_an_epoch_is_said(tiny, chat_dir, capsys):
    answers = {"dataset_dir": str(chat_dir), "data.loss": "answers", "seq_len": 64, "model.n_vocab": 262}
    config = tiny(answers | {"epochs": 1, "batch_tokens": 64_000, "eval.every": 1000, "checkpoint.every": None})
    fitted = open_run(config).config
    lowered = f"batch_tokens={fitted.batch_tokens} (given: 64000), eval.every={fitted.eval.every} (given: 1000)"
    assert f"to fit epochs=1 of this dataset: {lowered}; with max_steps they stay\n" in capsys.readouterr().out
    open_run(fitted)
    assert "to fit" not in capsys.readouterr().out


def test_layers_of_several_kinds_are_counted(tiny):
    pattern = {"model.attention_pattern": ["log_space", SOFTMAX], "model.n_layer": 3}
    kinds = "; log-space attention in 2 layers, softmax attention that forgets in 1 layer"
    assert said(tiny(pattern))["model"].endswith(kinds)
