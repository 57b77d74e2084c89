"""What is read from the notes of two steps, where it is more than a difference of times."""

from types import SimpleNamespace

import pytest

from ebbtide._profiling.build import _Curve, _slowdown
from ebbtide._profiling.profile import Save
from ebbtide._profiling.recorder import Note, OutsideSave, Place, Seen, VisitNotes
from ebbtide._profiling.region_times import Clock
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


def notes_of(places):
    return [Note(place, region, 0, Memory(now, peak), save=save) for place, region, now, peak, save in places]


def curve_of(places):
    return _Curve(watched(notes_of(places)), ("a", "b"), 0)


def clock_of(places, names):
    """Compute comes by the k-th of them at 2**k: a difference says which two it is of."""
    notes = [Note(place, region, 2**k, Memory(0, 0)) for k, (place, region) in enumerate(places)]
    return Clock(notes, names, lambda start, end: end.event - start.event)


def watched(notes, visits=(), outside=(), waiting_bytes=0, freed_common_bytes=0):
    device = SimpleNamespace(seconds_between=lambda start, end: 0.0)
    return SimpleNamespace(
        notes=notes,
        visits=list(visits),
        outside=list(outside),
        waiting_bytes=waiting_bytes,
        freed_common_bytes=freed_common_bytes,
        device=device,
    )


def moved_work(places, saves, at_hand_bytes=50):
    return curve_of(places).moved_work(0, saves, at_hand_bytes)


FORWARD = [
    (Place.BEGAN, "", 0, 0, -1),
    (Place.ENTERED, "a", 0, 0, -1),
    (Place.LEFT, "a", 0, 0, -1),
    (Place.FORWARD, "", 0, 0, -1),
    (Place.AGAIN, "a", 1000, 1000, -1),
    (Place.AGAIN_ENDED, "a", 1500, 1900, -1),  # of the second run itself
]
SAVES = (Save(0, 400, 0.0), Save(1, 100, 0.0), Save(2, 0, 0.0, shares=0))
END = None


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        # 500 of saves, none asked for; then the one of 100 is at hand, with 200 made; at the end all have been asked
        # for. With inputs of 50 that were there before.
        ([(1500, 1520, 1), (1500, 1700, 2), (1400, 1450, 0), (1000, 1650, END)], 650 + 50),
        ([(1500, 1520, 1), (1500, 1700, 2), (1400, 1450, 0), (1000, 1400, END)], 450 + 50),
        ([(1500, 1520, 0), (1500, 1700, 2), (1400, 1450, 1), (1000, 1400, END)], 700 - 100 + 50),
        ([(1500, 1520, 1), (1000, 1500, END)], 500 + 50),  # what nobody asks for is no part of it
        ([(1000, 1500, END)], 0),
    ],
)
def test_what_backward_works_with_leaves_out_what_it_asks_for_later(backward, expected):
    asked = [(Place.ASKED, "a", now, peak, save) for now, peak, save in backward[:-1]]
    now, peak, _ = backward[-1]
    assert moved_work([*FORWARD, *asked, (Place.ENDED, "", now, peak, -1)], SAVES) == expected


def test_saves_of_another_region_that_are_asked_for_meanwhile_say_nothing():
    """As by a hook that looks at a node of a region in front."""
    places = [
        *FORWARD,
        (Place.ASKED, "b", 1500, 1520, 0),
        (Place.ASKED, "a", 1500, 1520, 1),
        (Place.ASKED, "a", 1500, 1700, 0),
        (Place.ASKED, "b", 1500, 1520, 7),
        (Place.ENDED, "", 1000, 1400, -1),
    ]
    assert moved_work(places, SAVES) == 520 + 50


def test_saves_that_nobody_asks_for_are_told_apart():
    """The third shares the memory of the first, which is asked for by it alone."""
    ended = (Place.ENDED, "", 1000, 1400, -1)
    assert curve_of([*FORWARD, (Place.ASKED, "a", 1500, 1520, 2), ended]).unasked(0, SAVES) == 100
    assert curve_of([*FORWARD, (Place.ASKED, "a", 1500, 1520, 1), ended]).unasked(0, SAVES) == 400
    assert curve_of([*FORWARD, ended]).unasked(0, SAVES) == 0


def test_what_a_backward_leaves_behind_is_what_the_next_one_begins_with():
    """Inputs of 100 and 50 are there when a second run begins; and a gradient of 700 stays."""
    places = [
        *FORWARD[:3],
        (Place.ENTERED, "b", 0, 0, -1),
        (Place.LEFT, "b", 0, 0, -1),
        (Place.FORWARD, "", 0, 0, -1),
        (Place.AGAIN, "b", 1100, 1100, -1),
        (Place.AGAIN_ENDED, "b", 1500, 1900, -1),
        (Place.AGAIN, "a", 1750, 1900, -1),
        (Place.AGAIN_ENDED, "a", 2000, 2000, -1),
        (Place.ENDED, "", 900, 2500, -1),
    ]
    notes = notes_of(places)
    for common_bytes, expected in ((800, 700), (600, 600), (0, 0)):  # no more than what was given to several
        visits = [VisitNotes("a", inputs=[Seen(0, 50, None)])]
        visits.append(VisitNotes("b", inputs=[Seen(0, 100, None)], common_bytes=common_bytes))
        curve = _Curve(watched(notes, visits), ("a", "b"), 0)
        assert curve.left_bytes == [0, expected]


def test_what_runs_between_two_regions_is_part_of_the_one_before_it():
    """In forward and in backward, or it would be part of nothing, and plans would be for a shorter step."""
    places = [
        (Place.BEGAN, ""), (Place.ENTERED, "a"), (Place.LEFT, "a"), (Place.ENTERED, "b"), (Place.LEFT, "b"),
        (Place.FORWARD, ""), (Place.READ, ""), (Place.AGAIN, "b"), (Place.AGAIN_ENDED, "b"), (Place.READ, ""),
        (Place.AGAIN, "a"), (Place.AGAIN_ENDED, "a"), (Place.READ, ""), (Place.ENDED, ""),
    ]  # fmt: skip
    clock = clock_of(places, ("a", "b"))
    assert clock.forward_s == [2**3 - 2**1, 2**4 - 2**3]
    assert clock.again_s == [2**11 - 2**10, 2**8 - 2**7]
    assert clock.backward_s == [2**12 - 2**11, 2**10 - 2**8]
    around = [clock.before_s, clock.after_s, clock.turn_s, clock.end_s]
    assert around == [2**1 - 2**0, 2**5 - 2**4, 2**7 - 2**5, 2**13 - 2**12]
    assert sum(around) + sum(clock.forward_s + clock.again_s + clock.backward_s) == 2**13 - 2**0


def test_what_is_read_in_the_midst_of_a_region_is_inside_of_its_backward():
    places = [
        (Place.BEGAN, ""), (Place.ENTERED, "a"), (Place.LEFT, "a"), (Place.FORWARD, ""), (Place.READ, "a"),
        (Place.READ, ""), (Place.READ, "a"), (Place.READ, ""), (Place.ENDED, ""),
    ]  # fmt: skip
    clock = clock_of(places, ("a",))
    assert clock.backward_s == [2**7 - 2**4]
    assert clock.end_s == 2**8 - 2**7


def test_what_is_there_behind_the_regions_is_all_but_what_plans_decide():
    """At its peaks: 40 that were there before the step, 60 in front of the regions, 300 that these keep, 70 on their
    way out. The caller has let go of 20 that two regions share, and each plan may have one that keeps them."""
    notes = notes_of(
        [
            (Place.BEGAN, "", 40, 40, -1),
            (Place.ENTERED, "a", 100, 100, -1),
            (Place.LEFT, "a", 200, 900, -1),
            (Place.ENTERED, "b", 200, 200, -1),
            (Place.LEFT, "b", 500, 900, -1),
            (Place.FORWARD, "", 480, 700, -1),
            (Place.READ, "b", 480, 800, -1),
            (Place.ENDED, "", 40, 900, -1),
        ]
    )
    outside = [OutsideSave(3, 0, Memory(490, 510)), OutsideSave(5, 0, Memory(600, 650))]
    curve = _Curve(watched(notes, (), outside, 70, 20), ("a", "b"), 300)
    assert [(turn.save, turn.peak_bytes) for turn in curve.turns] == [(-1, 60), (3, 200), (5, 350)]
    assert curve.held_bytes == 30
    assert (curve.base_bytes, curve.kept_bytes) == (40, 60)
