"""Sample from a checkpoint: python sample.py checkpoint=runs/demo prompt="def main("."""

from cli import command

if __name__ == "__main__":
    command("sample", "inference.sample:SampleConfig", "inference.sample:run_sampling", text_keys=("prompt", "stop"))
