"""Schedules against torch's own, and properties of every schedule."""

from typing import get_args

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from common.settings import variant_names
from trainer.schedule import WSD, Constant, Cosine, OneCycle, ScheduleConfig


def torch_one_cycle(warmup, total, start, end):
    """Learning rates of torch's scheduler with the same settings."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = OneCycleLR(
        optimizer,
        max_lr=1.0,
        total_steps=total,
        pct_start=warmup / total,
        cycle_momentum=False,
        div_factor=1 / start,
        final_div_factor=start / end,
    )
    rates = []
    for step in range(total):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        if step < total - 1:
            scheduler.step()
    return rates


@pytest.mark.parametrize(("warmup", "total"), [(2, 7), (99, 100), (100, 100)])
@pytest.mark.parametrize(("start", "end"), [(0.1, 0.1), (0.04, 0.001), (1.0, 0.5)])
def test_one_cycle_is_torchs(warmup, total, start, end):
    ours = OneCycle(name="one_cycle", warmup_steps=warmup, start=start, end=end)
    factors = [ours.factor(step, total) for step in range(total)]
    assert factors == pytest.approx(torch_one_cycle(warmup, total, start, end), rel=1e-12)


@pytest.mark.parametrize("cls", get_args(get_args(ScheduleConfig)[0]), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(("warmup", "total"), [(1, 1), (1, 2), (5, 50), (50, 50)])
def test_every_schedule_stays_between_0_and_1_reaches_1_and_is_pure(cls, warmup, total):
    schedule = cls(name=variant_names(cls)[0], warmup_steps=warmup)
    factors = [schedule.factor(step, total) for step in range(total)]
    assert all(0 < factor <= 1 for factor in factors[:-1])
    assert 0 <= factors[-1] <= 1  # the last may be a schedule's end of 0
    assert max(factors) == pytest.approx(1, abs=1e-12)
    assert factors == [schedule.factor(step, total) for step in reversed(range(total))][::-1]


def test_cosine_is_half_way_between_its_ends_in_the_middle():
    cosine = Cosine(name="cosine", warmup_steps=10, end=0.2)
    assert [cosine.factor(step, 111) for step in (0, 9, 10, 60, 110)] == pytest.approx([0.1, 1, 1, 0.6, 0.2])


def test_wsd_is_flat_then_falls_in_a_line():
    wsd = WSD(name="wsd", warmup_steps=10, decay=0.2, end=0.0)
    factors = [wsd.factor(step, 101) for step in range(101)]
    assert factors[9:81] == [1.0] * 72
    assert factors[80:] == pytest.approx([1 - i / 20 for i in range(21)], abs=1e-12)


def test_constant_is_flat_after_its_warm_up():
    constant = Constant(name="constant", warmup_steps=4)
    assert [constant.factor(step, 6) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
