"""Train a GPT: python train.py experiment=quickstart run_dir=runs/demo."""

from cli import command

if __name__ == "__main__":
    message = "interrupted; the same command continues from the last checkpoint"
    check = "trainer.loop:check"
    run, settings, text_keys = "trainer.loop:fit", "trainer.config:TrainConfig", ("eval.prompt",)
    command("train", run, settings, text_keys, message, check, show="tools.report:show_runs")
