"""Fixtures for tests of runs that are killed."""

import pytest

pytest.register_assert_rewrite("faults")


@pytest.fixture
def quick(tiny, memory):
    """Builds a TrainConfig of a run in memory of 3 quick steps, each saved; its best checkpoint is that of step 2."""

    def build(changes=None):
        settings = {
            "run_dir": memory / "run",
            "max_steps": 3,
            "schedule": {"name": "constant", "warmup_steps": 1},
            "model.attention": {"name": "softmax"},
            "model.position": {"name": "learned", "max_len": 16},
            "runtime.micro_batch": 4,
            "optim.max_lr": 0.25,
            "checkpoint": {"every": 1, "keep_last": 1},
            "eval": {"every": 1, "batches": 1},
        }
        return tiny(settings | (changes or {}))

    return build
