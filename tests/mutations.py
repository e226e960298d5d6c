"""Break the code in ten ways, one at a time, and check that a test of `make test` notices each.

    python tests/mutations.py                # all of them
    python tests/mutations.py fsync window   # these

Each mutation is applied in a temporary copy of the repository. The tests most likely to notice run first, then all
others. The exit status is 1 if a mutation survives, or if the text that it replaces is gone: adapt MUTATIONS then.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """One edit that must not go unnoticed."""

    name: str
    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    breaks: str
    tests: str
    """Files whose tests are the most likely to notice."""


MUTATIONS = [
    Mutation(
        "gradient-sign",
        "model/ops/log_attention/chunked_attention.py",
        ".div_(norm).neg_()",
        ".div_(norm)",
        "the normalizer's gradient in log-space attention has the wrong sign",
        "tests/model/test_attention_contract.py",
    ),
    Mutation(
        "decay",
        "trainer/optim.py",
        "self.weight_decay / scale",
        "0.0",
        "weight decay is lost",
        "tests/trainer/test_optim.py",
    ),
    Mutation(
        "window",
        "model/ops/sparse_attention/patterns.py",
        "Band(dilation + 1, 0, size - 1)",
        "Band(dilation + 1, 0, size)",
        "a sliding window has one key too many",
        "tests/model/test_sparse_attention.py",
    ),
    Mutation(
        "proof",
        "runtime/proof.py",
        "if configured.share <= 1:",
        "if configured.share <= math.inf:",
        "a run uses kernels whose gradient is wrong",
        "tests/trainer/test_proof.py",
    ),
    Mutation(
        "fsync",
        "runtime/tensor_file.py",
        "        os.fsync(file.fileno())\n",
        "        pass\n",
        "a checkpoint gets its name before its tensors are on the disk",
        "tests/trainer/test_commit.py",
    ),
    Mutation(
        "rank-share",
        "trainer/step.py",
        "first = group.index * batches.batch_size // group.count\n    stop = (group.index + 1)",
        "first = 0\n    stop = 1",
        "all processes train on the first process's share of a batch",
        "tests/trainer/test_torchrun.py",
    ),
    Mutation(
        "schedule",
        "trainer/loop.py",
        "config.schedule.factor(state.step, config.max_steps)",
        "config.schedule.factor(state.step + 1, config.max_steps)",
        "the learning rate is that of the next step",
        "tests/trainer/test_loop.py",
    ),
    Mutation(
        "prefetch",
        "trainer/loop.py",
        "steps = range(run.state.step, config.last_step)",
        "steps = range(0, config.last_step)",
        "a resumed run reads the batches of its first steps again",
        "tests/trainer/test_resume.py",
    ),
    Mutation(
        "denominator",
        "trainer/step.py",
        "scale=world.size / n_valid",
        "scale=world.size / n_valid / len(micro_batches)",
        "the gradient is divided by the number of micro-batches, too",
        "tests/trainer/test_micro_batch.py",
    ),
    Mutation(
        "mask",
        "model/attention/cache.py",
        "(key <= query)",
        "(key <= query + 1)",
        "a token that continues a cache sees the next one",
        "tests/model/test_attention_contract.py",
    ),
]


def mutated(mutation: Mutation, source: str) -> str:
    """The file's text with the edit; ValueError if the old text does not occur exactly once."""
    if (count := source.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} has {mutation.old!r} {count} times, not once")
    return source.replace(mutation.old, mutation.new)


def is_noticed(tree: Path, *tests: str) -> bool:
    """Whether a test of the fast tier fails in this copy of the repository, and which one is printed by pytest."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "-x", "-q", "-m", "not slow", *tests]
    # The first would notice every one, and the second needs git.
    for test in ("test_mutations_fit_the_code", "test_what_the_house_holds_is_within_its_budget"):
        command += ["--deselect", f"tests/test_house.py::{test}"]
    status = subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}).returncode
    if status not in (0, 1, 2):  # 2: -x ended the run while another process was testing
        sys.exit(f"error: pytest ended with status {status}")
    return status != 0


def main(names: list[str]) -> int:
    """Try these mutations, or all; 1 if one survives."""
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "datasets", "runs", "multirun", "outputs")
        shutil.copytree(ROOT, tree, ignore=ignored)
        if is_noticed(tree, *{mutation.tests for mutation in MUTATIONS}):
            sys.exit("error: a test fails without any mutation")
        for mutation in MUTATIONS:
            if names and mutation.name not in names:
                continue
            file = tree / mutation.file
            source = file.read_text(encoding="utf-8")
            file.write_text(mutated(mutation, source), encoding="utf-8")
            if not is_noticed(tree, mutation.tests) and not is_noticed(tree):
                survivors.append(mutation)
            file.write_text(source, encoding="utf-8")
    for mutation in survivors:
        print(f"SURVIVED: {mutation.name}: {mutation.breaks}")
    return int(survivors != [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
