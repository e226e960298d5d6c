"""Check, time and test a GPU within an hour, the most important stages first: the first 20 minutes have the speeds.

    make gpu-hour
    python scripts/gpu_hour.py minutes=20

Stages: scripts/doctor.py, which checks all kernels; training, attention and decoding, timed; a profile of a training
step; the tests that need a GPU; launch settings of the kernels side by side; other benchmarks; compute-sanitizer. Each
is a process with a time limit of its own, an hour together, and writes into `out`, where report.md and report.json are
rewritten after each. The same command goes on where it was cut off. A stage that has an outcome, good or bad, is not
run again: delete its .json file for that.
"""

from pathlib import Path

from tools.bench.packages import refuse_without

NEEDED = ["torch", "annotated_types", "antlr4", "hydra", "matplotlib", "numpy", "omegaconf", "orjson", "pydantic"]
NEEDED += ["pydantic_core", "rich", "safetensors", "tiktoken", "typing_inspection", "yaml"]
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
