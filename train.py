"""Train a GPT: python train.py experiment=quickstart run_dir=runs/demo."""

from cli import command

if __name__ == "__main__":
    message = "interrupted, and no step is lost: the same command starts the run, or continues it"
    command(
        "train",
        "trainer.launch:launch_training",
        "trainer.config:TrainConfig",
        text_keys=("eval.prompt",),
        when_interrupted=message,
        check="trainer.loop:check",
        after_sweep="tools.report:show_runs",
    )
