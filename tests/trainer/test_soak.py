"""A long run that is killed repeatedly at random moments has the same results as an uninterrupted one."""

import random
import shutil
import time

import pytest
from faults import assert_same, finish, live, result

KILLS = 12


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_400_steps_with_12_kills(quick, processes):
    """Either of two processes is killed, or both at once."""
    config = quick(
        {
            "max_steps": 400,
            "checkpoint": {"every": 20, "keep_last": 2, "keep_every": 200},
            "eval.every": 75,
        }
    )
    started = time.monotonic()
    finish(config, processes)
    seconds_of_a_life = (time.monotonic() - started) / KILLS
    expected = result(config.run_dir)
    shutil.rmtree(config.run_dir)

    rng, kills = random.Random(processes), 0
    while kills < KILLS:
        ranks = list(range(processes))
        victims = rng.choice([[rank] for rank in ranks] + [ranks])
        life = live(config, processes, seconds=rng.uniform(0, 2 * seconds_of_a_life), victims=victims)
        kills += life.killed
        if life.finished:  # it made more steps in a life than we thought: the other kills hit it on another way
            assert_same(config.run_dir, expected)
            shutil.rmtree(config.run_dir)
        else:
            assert life.killed, life.err
        assert "warning" not in life.err
    life = finish(config, processes)
    assert life.err == ""
    assert_same(config.run_dir, expected)
