"""The report has every figure of Stats, readable, and needs nothing but Stats."""

import re

import pytest

from ebbtide._engine.stats import CopyTiming, Count, Stats
from ebbtide._reports.stats_text import stats_text
from ebbtide._types import Reason, Unable
from ebbtide._utils.sizes import GIB, MIB


@pytest.fixture
def stats() -> Stats:
    return Stats(
        parcels=Count(314, 28 * GIB),
        out=Count(310, 27 * GIB),
        inbound=Count(309, 26 * GIB),
        shared=Count(120, 12 * GIB),
        packed=Count(24, 3 * GIB),
        forwarded=Count(4, 5 * MIB),
        misses=Count(3, 6 * MIB),
        kept={Reason.SMALL: Count(40, 7 * MIB), Reason.PARAMETER: Count(60, 8 * MIB), Reason.BUFFER: Count(1, 64)},
        freed_nothing=Count(2, 9 * MIB),
        failed=Count(1, 10 * MIB),
        recomputed=Count(500, 13 * GIB),
        dropped=Count(16, 4 * GIB),
        unable={Unable.USER_CHECKPOINT: 5},
        stall_forward_s=0.0123,
        stall_backward_s=1.5,
        stall_by_region={
            "": 0.125,
            "layers.2": 1.25,
            "layers.3": 0.0,
            "a" * 60: 0.125,
            **{f"b.{k}": 0.01 for k in range(9)},
        },
        out_sample=CopyTiming(29 * 10**9, 2.0),
        in_sample=CopyTiming(),
        host_bytes=11 * MIB,
        host_reserved_bytes=32 * GIB,
    )


ROWS = [
    ("made", "314", "28.00 GiB"),
    ("moved out", "310", "27.00 GiB"),
    ("fetched back", "309", "26.00 GiB"),
    ("shared with a parcel on its way", "120", "12.00 GiB"),
    ("masks packed into bits (bytes as saved)", "24", "3.00 GiB"),
    ("used straight from the device", "4", "5.00 MiB"),
    ("fetched on demand (misses)", "3", "6.00 MiB"),
    ("smaller than min_bytes", "40", "7.00 MiB"),
    ("parameter or a view of one", "60", "8.00 MiB"),
    ("buffer of the module", "1", "64 B"),
    ("offloaded, but memory still referenced", "2", "9.00 MiB"),
    ("failed to be written", "1", "10.00 MiB"),
    ("recomputed tensors", "500", "13.00 GiB"),
    ("outputs not worth keeping", "16", "4.00 GiB"),
    ("not prepared: it is inside a checkpoint of the user's own", "5"),
    ("forward", "12.3 ms"),
    ("backward", "1500.0 ms"),
    ("for layers.2", "1250.0 ms"),
    ("for outside", "125.0 ms"),
    ("out", "14.5 GB/s"),
    ("in", "0.0 GB/s"),
    ("held now", "11.00 MiB"),
    ("reserved", "32.00 GiB"),
]


def cells_of(text: str) -> list[tuple[str, ...]]:
    return [tuple(re.split(r" {2,}", line.strip())) for line in text.splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_text_has_every_figure(stats, row):
    assert row in cells_of(stats_text(stats))


def test_reasons_come_largest_first(stats):
    text = stats_text(stats)
    places = [text.index(reason.value) for reason in (Reason.PARAMETER, Reason.SMALL, Reason.BUFFER)]
    assert places == sorted(places)


def test_few_regions_with_the_longest_stalls_have_a_line(stats):
    lines = [cells[0] for cells in cells_of(stats_text(stats)) if cells[0].startswith("for ")]
    assert lines == ["for layers.2", "for outside", f"for {'a' * 19}...{'a' * 20}", "for b.0"]
    assert max(map(len, stats_text(stats).splitlines())) <= 100


def test_ranks_are_told_apart(stats):
    stats.rank, stats.ranks = 3, 8
    assert stats_text(stats).startswith("ebbtide, rank 3 of 8: 535 saved tensors, ")


def test_headline_counts_saved_tensors_and_bytes(stats):
    assert stats_text(stats).splitlines()[0].strip() == "ebbtide: 535 saved tensors, 27.00 GiB moved out"


def test_text_is_plain_and_every_line_equally_wide(stats):
    text = stats_text(stats)
    assert text.isascii()
    assert "\x1b" not in text
    assert len({len(line) for line in text.splitlines()}) == 1


def test_fresh_stats_say_that_nothing_was_kept():
    assert ("none", "0", "0 B") in cells_of(stats_text(Stats()))


def test_memory_of_captured_graphs_is_shown_if_any(stats):
    assert "captured" not in stats_text(stats)
    stats.host_captured_bytes = 3 * MIB
    assert re.search(r"kept for captured graphs +3.00 MiB", stats_text(stats))
