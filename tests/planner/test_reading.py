"""What is read from the notes of two steps, where it is more than a difference of times."""

from types import SimpleNamespace

import pytest

from ebbtide.planner.reading import _slowdown


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
