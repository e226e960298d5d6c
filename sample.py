"""Sample from a checkpoint: python sample.py checkpoint=runs/demo prompt="def main("."""

from typing import Any

from cli import command, configure

CONFIG = "inference.sample:SampleConfig"
TEXT_KEYS = ("prompt", "message", "stop", "system")


def sample(*options: str, **settings: Any) -> list[str]:
    """Print samples, and return them: sample(checkpoint="runs/demo", prompt="def main(")."""
    config = configure("sample", CONFIG, options, settings, TEXT_KEYS)
    from inference.sample import run_sampling

    return run_sampling(config)


if __name__ == "__main__":
    command("sample", "inference.sample:run_sampling", CONFIG, text_keys=TEXT_KEYS)
