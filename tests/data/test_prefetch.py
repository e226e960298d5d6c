import itertools
import threading
import time

import pytest

from common.settings import UserError
from data.loader import Prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_the_same_items_in_the_same_order():
    with Prefetch(range(1000)) as ahead:
        assert list(ahead) == list(range(1000))
        assert list(ahead) == [], "and then no more"
    assert threads() == []


def test_no_more_than_two_items_ahead():
    made = []
    with Prefetch(map(made.append, range(100))) as ahead:
        for i in range(10):
            next(ahead)
            time.sleep(0.01)
            assert len(made) <= i + 3
    assert len(made) <= 12


@pytest.mark.parametrize("error", [UserError("a shard is damaged"), KeyboardInterrupt()])
def test_an_error_in_the_thread_is_raised_where_its_item_would_have_come(error):
    def items():
        yield 1
        yield 2
        raise error

    with Prefetch(items()) as ahead:
        assert [next(ahead), next(ahead)] == [1, 2]
        for _ in range(2):
            with pytest.raises(type(error)) as raised:
                next(ahead)
            assert raised.value is error
            assert raised.traceback[-1].name == "items", "with the place where it happened"
    assert threads() == []


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_the_thread_ends_with_the_context_also_by_an_error(taken):
    def use():
        with Prefetch(itertools.count()) as ahead:
            for _ in range(taken):
                next(ahead)
            assert len(threads()) == 1
            raise KeyboardInterrupt

    for _ in range(20):
        with pytest.raises(KeyboardInterrupt):
            use()
        assert threads() == []
