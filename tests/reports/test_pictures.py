"""Curves of memory become a picture, without a display."""

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest

from ebbtide._reports.pictures import Curve, batch_sizes, draw_timeline, steps
from ebbtide._utils.sizes import MIB

CURVES = [
    Curve("plain", [0.0, 0.5, 1.0], [100 * MIB, 900 * MIB, 200 * MIB], 950 * MIB),
    Curve("offloaded", [0.0, 0.7, 1.4], [100 * MIB, 300 * MIB, 200 * MIB], 310 * MIB),
]


def colours_in(path) -> set[tuple[int, ...]]:
    picture = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(np.uint8)
    return {tuple(colour) for colour in np.unique(picture.reshape(-1, 3), axis=0).tolist()}


def test_both_curves_are_in_the_picture(tmp_path):
    path = tmp_path / "memory.png"
    draw_timeline(CURVES, path, title="what it shows", memory="memory")
    assert {(0x82, 0x8B, 0x96), (0x0B, 0x6F, 0xB8)} <= colours_in(path)


def test_one_curve_is_drawn_alone(tmp_path):
    path = tmp_path / "memory.png"
    draw_timeline(CURVES[:1], path, title="what it shows", memory="memory")
    assert (0x0B, 0x6F, 0xB8) not in colours_in(path)


def test_marked_batch_sizes_and_the_budget_are_in_the_picture(tmp_path):
    path = tmp_path / "sizes.png"
    rows = [(1, 10.0, 100 * MIB), (2, 20.0, 200 * MIB), (3, 15.0, 250 * MIB)]
    batch_sizes(rows, [2], {"fastest": 2, "largest": 3}, 260 * MIB, "what it shows").savefig(path)
    blue, orange, green, purple = (0x0B, 0x6F, 0xB8), (0xD1, 0x66, 0x1F), (0x3A, 0x8F, 0x3A), (0x82, 0x50, 0xBF)
    assert {blue, orange, green} <= colours_in(path)
    assert purple not in colours_in(path)


def test_backend_of_the_user_stays(tmp_path):
    before = mpl.rcParams._get_backend_or_none()
    draw_timeline(CURVES, tmp_path / "memory.png", title="what it shows", memory="memory")
    assert mpl.rcParams._get_backend_or_none() == before


@pytest.mark.parametrize("count", [1, 2, 7])
def test_steps_of_a_short_run_have_whole_numbers(count):
    figure = steps([(number, 1.0, 1.0) for number in range(1, count + 1)], (), "any", "s", 1.0)
    figure.draw_without_rendering()
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())
