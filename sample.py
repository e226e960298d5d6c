"""Sample from a checkpoint: python sample.py checkpoint=runs/demo prompt="def main("."""

from typing import Any

from cli import command


def run(config: dict[str, Any]) -> None:
    """Decode the configuration and sample."""
    from common.settings import decode
    from inference.sample import SampleConfig, run_sampling

    run_sampling(decode(SampleConfig, config))


if __name__ == "__main__":
    command("sample", run, text_keys=("prompt", "stop"))
