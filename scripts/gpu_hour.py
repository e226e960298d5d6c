"""Test, check and time a GPU within an hour, the most important stages first: tests, race and memory checks, times.

    make gpu-hour
    python scripts/gpu_hour.py minutes=20

Stages: the tests that need a GPU; compute-sanitizer on the smallest benchmark; all benchmarks; a profile of a training
step; launch settings of the kernels side by side. Each is a process with a time limit of its own, an hour together, and
writes into `out`, where report.md and report.json are rewritten after each. The same command goes on where it was cut
off. A stage that has an outcome, good or bad, is not run again: delete its .json file for that.
"""

from pathlib import Path

from tools.bench.packages import refuse_without

NEEDED = ("torch", "hydra", "matplotlib", "numpy", "orjson", "pydantic", "rich", "safetensors", "tiktoken", "yaml")
refuse_without(*NEEDED, "hypothesis", "pytest")  # before an import stops at the first that is missing

from pydantic import PositiveFloat  # noqa: E402

from common.command import Settings, run_script  # noqa: E402


class Options(Settings):
    minutes: PositiveFloat = 60.0
    """time limit of all stages together"""
    out: Path = Path("runs/gpu_hour")
    """folder for the report and for what the stages write"""


if __name__ == "__main__":
    message = "interrupted; run the same command again to go on"
    run_script(__doc__, Options, "tools.bench.gpu_hour:run", when_interrupted=message)
