"""The picture of docs/architecture.md comes from the source."""

from tools.structure import PLACES, files, imports_by_room, picture, room_of, shown


def test_a_module_is_in_the_most_specific_room():
    assert room_of("data.prepare.merge") == "data.prepare"
    assert room_of("data.loader") == "data"
    assert room_of("train.py") == room_of("scripts/plan.py") == "commands"
    assert room_of("trainer/loop.py") == "trainer"
    assert room_of("datasets") is room_of("tests/conftest.py") is None


def test_arrows_lead_down():
    arrows = imports_by_room()
    assert {("trainer", "model"), ("commands", "tools"), ("commands", "data.prepare")} <= arrows
    for start, end in arrows:
        assert PLACES[end][1] < PLACES[start][1], f"{start} imports {end}, which is not drawn below it"


def test_arrows_that_follow_from_others_are_left_out():
    assert shown({("a", "b"), ("b", "c"), ("a", "c"), ("a", "common")}) == {("a", "b"), ("b", "c")}


def test_every_room_has_code_and_a_box():
    assert set(files().values()) == set(PLACES)
    assert picture(imports_by_room()).startswith(b"\x89PNG")
