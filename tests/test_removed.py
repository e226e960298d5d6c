"""What is gone is ignored where it did nothing, and refused in one line elsewhere."""

import pytest

from common import removed
from common.settings import Settings, UserError, decode, differences


class Inner(Settings):
    decay: str = "none"


class Outer(Settings):
    norm: str = "layer"
    inner: Inner = Inner()


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(removed, "KEYS", {"inner.norm": removed.Removed(False, "leave it out")})
    monkeypatch.setattr(removed, "VALUES", {"inner.decay": {"fixed": "use decay=head"}})


def test_a_removed_key_that_did_nothing_is_ignored_at_any_depth():
    assert decode(Outer, {"norm": "rms", "inner": {"norm": False}}) == Outer(norm="rms")
    assert differences({"inner": {"norm": False, "decay": "none"}}, {"inner": {"decay": "none"}}) == {}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"norm": True}, "config inner.norm=True was removed: leave it out"),
        ({"decay": "fixed"}, "config inner.decay=fixed was removed: use decay=head"),
    ],
)
def test_a_removed_setting_that_did_something_is_refused_in_one_line(given, line):
    with pytest.raises(UserError, match=f"^{line}$"):
        decode(Outer, {"inner": given})


def test_a_change_of_a_removed_setting_is_a_difference():
    assert differences({"inner": {"norm": True}}, {"inner": {}}) == {"inner.norm": (True, None)}


def test_the_command_line_says_that_a_key_was_removed(command, monkeypatch):
    monkeypatch.setitem(removed.KEYS, "model.biases", removed.Removed(False, "leave it out"))
    result = command("train", "model.biases=true")
    assert result.err == "error: unknown config key 'model.biases': it was removed: leave it out\n"


def test_the_command_line_says_what_to_write_in_place_of_what_was_removed(command):
    result = command("train", "model=log_gpt2_10m")
    line = "model=log_gpt2_10m was removed: write model=flagship_10m"
    assert (result.status, result.err) == (1, f"error: {line}\n")
