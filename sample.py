"""Sample from a checkpoint: python sample.py checkpoint=runs/demo prompt="def main("."""

from cli import command

if __name__ == "__main__":
    texts = ("prompt", "message", "stop", "system")
    command(
        "sample", "inference.sample:run_sampling", "inference.sample:SampleConfig", text_keys=texts
    )
