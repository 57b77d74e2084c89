"""What is read from the notes of two steps, where it is more than a difference of times."""

from types import SimpleNamespace

import pytest

from ebbtide.planner.measure import Note, Place, VisitNotes
from ebbtide.planner.profile import Save
from ebbtide.planner.reading import _Curve, _slowdown
from ebbtide.types import Memory


@pytest.mark.parametrize(
    ("again_s", "detailed_s", "expected"),
    [
        ([0.011, 0.011], [0.010, 0.010], 1.1),  # the device had power to spare where it was looked into
        ([0.010, 0.010], [0.013, 0.013], 1.0),  # looking took longer: what it found is as it is
        ([0.0, 0.0], [0.0, 0.0], 1.0),  # nothing ran again
    ],
)
def test_dear_operators_take_as_long_as_where_nobody_looks(again_s, detailed_s, expected):
    step = _slowdown(SimpleNamespace(again_s=again_s), SimpleNamespace(again_s=detailed_s))
    assert step == pytest.approx(expected)


def test_what_backward_works_with_leaves_out_what_it_has_not_asked_for():
    """Saves of 400, 100 and a share of the first, with inputs of 50 that were there before."""
    places = [
        (Place.BEGAN, "", 0, 0),
        (Place.ENTERED, "a", 0, 0),
        (Place.LEFT, "a", 0, 0),
        (Place.FORWARD, "", 0, 0),
        (Place.AGAIN, "a", 1000, 1000),
        (Place.AGAIN_ENDED, "a", 1500, 1900),  # of the second run itself
        (Place.ASKED, "a", 1500, 1520),  # 500 of saves, none asked for
        (Place.ASKED, "a", 1500, 1700),  # the one of 100 is at hand, with 200 made
        (Place.ASKED, "a", 1400, 1450),  # the share: all have been asked for
        (Place.ENDED, "", 1000, 1650),
    ]
    notes = [Note(place, region, 0, Memory(now, peak)) for place, region, now, peak in places]
    curve = _Curve(SimpleNamespace(notes=notes, outside=[], freed_behind_bytes=0), ("a",))
    saves = (Save(0, 400, 0.0), Save(1, 100, 0.0), Save(2, 0, 0.0, shares=0))
    visit = VisitNotes("a", asked=[1, 2, 0])
    assert curve.moved_work(0, visit, saves, at_hand_bytes=50) == 650 + 50
    assert curve.moved_work(0, VisitNotes("a"), saves, at_hand_bytes=50) == 0
    first_asked = VisitNotes("a", asked=[0, 1, 2])
    assert curve.moved_work(0, first_asked, saves, at_hand_bytes=50) == 650 + 50
    late = [*notes[:-1], Note(Place.ENDED, "", 0, Memory(1000, 1400))]
    curve = _Curve(SimpleNamespace(notes=late, outside=[], freed_behind_bytes=0), ("a",))
    assert curve.moved_work(0, visit, saves, at_hand_bytes=50) == 500  # 450 and the inputs when all had been asked for
    assert curve.moved_work(0, first_asked, saves, at_hand_bytes=50) == 700 - 100 + 50
