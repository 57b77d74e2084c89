"""Room: no two blocks overlap, nothing is lost, and the last reader stays known."""

import pytest
from faults.lines import Lines
from hypothesis import given
from hypothesis import strategies as st

from ebbtide._stores._slabs import Reader, Slabs

SLAB_BYTES = 10_000
ALIGN_BYTES = 100


def make_slabs(most: int = 10**9, sizes: list[int] | None = None) -> Slabs:
    """At most `most` slabs of SLAB_BYTES, or larger for a larger request. Appends each size to `sizes`."""
    sizes = [] if sizes is None else sizes

    def grow(nbytes: int) -> int:
        if len(sizes) == most:
            return 0
        sizes.append(max(nbytes, SLAB_BYTES))
        return sizes[-1]

    return Slabs(grow, ALIGN_BYTES)


def overlap(one, other) -> bool:
    return one.slab == other.slab and one.start < other.end and other.start < one.end


# A positive number takes bytes, a negative number gives a block back.
calls = st.lists(st.one_of(st.integers(1, 12_000), st.integers(-100, -1)), max_size=60)


def play(slabs: Slabs, calls: list[int], out: list | None = None) -> list:
    """Check each block handed out, beside those of `out`; returns the blocks not given back."""
    out = [] if out is None else out
    for call in calls:
        if call > 0:
            taken = slabs.take(call)
            assert taken is not None
            assert taken.start % ALIGN_BYTES == 0
            assert call <= taken.nbytes < call + ALIGN_BYTES
            assert not any(overlap(taken, other) for other in out)
            out.append(taken)
        elif out:
            slabs.give_back(out.pop(call % len(out)))
        assert slabs.used_bytes == sum(extent.nbytes for extent in out)
    return out


@given(calls)
def test_blocks_never_overlap_and_are_aligned(calls):
    slabs = make_slabs()
    play(slabs, calls)
    assert slabs.free_bytes + slabs.used_bytes == slabs.reserved_bytes


@given(calls)
def test_everything_joins_back_to_whole_slabs(calls):
    sizes = []
    slabs = make_slabs(sizes=sizes)
    for extent in play(slabs, calls):
        slabs.give_back(extent)
    assert slabs.used_bytes == 0
    assert slabs.reserved_bytes == sum(sizes)
    whole = [slabs.take(nbytes) for nbytes in sorted(sizes, reverse=True)]
    assert all(extent.start == 0 for extent in whole)
    assert {extent.slab for extent in whole} == set(range(len(sizes)))
    assert slabs.free_bytes == 0
    assert slabs.growths == len(sizes)


@given(st.lists(st.integers(1, 12_000), max_size=20), st.randoms(use_true_random=False))
def test_steps_alike_find_the_same_room(sizes, choose):
    slabs = make_slabs()
    steps = []
    for _ in range(3):
        out = [slabs.take(nbytes) for nbytes in sizes]
        steps.append((slabs.growths, {(extent.slab, extent.start, extent.nbytes) for extent in out}))
        choose.shuffle(out)
        for extent in out:
            slabs.give_back(extent)
    assert steps[1] == steps[0]
    assert steps[2] == steps[0]


@given(calls)
def test_room_at_the_limit_is_refused_and_nothing_changes(calls):
    slabs = make_slabs(most=1)
    out = []
    for call in calls:
        before = slabs.used_bytes
        if call > 0:
            taken = slabs.take(call)
            assert slabs.used_bytes == before + (0 if taken is None else taken.nbytes)
            out += [] if taken is None else [taken]
        elif out:
            slabs.give_back(out.pop())
    assert slabs.growths <= 1


def test_the_smallest_room_that_fits_is_taken():
    slabs = make_slabs(most=1)
    rooms = [slabs.take(nbytes) for nbytes in (1000, 100, 300, 100, 600, 100, 7800)]
    for at in (0, 2, 4):  # holes of 1000, 300 and 600
        slabs.give_back(rooms[at])
    assert slabs.take(500).start == rooms[4].start
    assert slabs.take(200).start == rooms[2].start
    assert slabs.take(700).start == rooms[0].start


def test_room_of_the_exact_size_is_reused_unjoined():
    slabs = make_slabs(most=1)
    first, second = slabs.take(1000), slabs.take(1000)
    slabs.give_back(first)
    slabs.give_back(second)
    assert {slabs.take(1000), slabs.take(1000)} == {first, second}


def readers_of(slabs: Slabs, orders: tuple, give: tuple[int, ...]):
    """The reader of a whole slab, joined from parts read at `orders` and given back in the order `give`."""
    parts = [slabs.take(SLAB_BYTES // len(orders)) for _ in orders]
    for part, order in zip(parts, orders, strict=True):
        part.reader = None if order is None else Reader(order, f"event {order}")
    for at in give:
        slabs.give_back(parts[at])
    return slabs.take(SLAB_BYTES).reader


@pytest.mark.parametrize("give", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
@pytest.mark.parametrize(
    ("orders", "last"), [((1, 2, 3, 4), 4), ((9, 2, 3, 4), 9), ((None, 5, None, 3), 5), ((None,) * 4, None)]
)
def test_joined_room_has_the_later_reader(orders, last, give):
    reader = readers_of(make_slabs(most=1), orders, give)
    assert reader == (None if last is None else (last, f"event {last}"))


@given(calls)
def test_room_is_never_handed_out_without_its_last_reader(calls):
    slabs, out, last_read = make_slabs(), [], {}
    for order, call in enumerate(calls):
        if call > 0:
            extent = slabs.take(call)
            known = 0 if extent.reader is None else extent.reader.order
            assert known >= max(last_read.pop(unit, 0) for unit in units(extent))
            extent.reader = None  # waited for
            out.append(extent)
        elif out:
            extent = out.pop(call % len(out))
            extent.reader = Reader(order, "event")
            last_read.update(dict.fromkeys(units(extent), order))
            slabs.give_back(extent)
    assert slabs.used_bytes == sum(extent.nbytes for extent in out)


def units(extent):
    return [(extent.slab, at) for at in range(extent.start, extent.end, ALIGN_BYTES)]


def test_both_parts_of_a_cut_room_know_its_reader():
    slabs = make_slabs(most=1)
    whole = slabs.take(SLAB_BYTES)
    whole.reader = Reader(1, "event")
    slabs.give_back(whole)
    assert slabs.take(4000).reader == (1, "event")
    assert slabs.take(6000).reader == (1, "event")


def interrupt():
    raise KeyboardInterrupt


@given(calls, st.integers(1, 12_000), st.integers(0, 120), calls)
def test_an_interrupt_at_any_line_of_a_call_loses_no_room(before, nbytes, at, after):
    slabs = make_slabs()
    out = play(slabs, before)
    try:
        with Lines({at}, interrupt):
            out.append(slabs.take(nbytes))
    except KeyboardInterrupt:
        pass
    out = play(slabs, after, out)
    assert slabs.used_bytes == sum(extent.nbytes for extent in out)
    for extent in out:
        slabs.give_back(extent)
    assert slabs.used_bytes == 0


def test_room_freed_by_an_interrupt_is_reused_behind_the_last_reader_of_all():
    slabs = make_slabs(most=1)
    one, two = slabs.take(1000), slabs.take(1000)
    for extent, order in ((one, 2), (two, 1)):
        extent.reader = Reader(order, f"event {order}")
        slabs.give_back(extent)
    with pytest.raises(KeyboardInterrupt), Lines({9}, interrupt):
        slabs.take(2000)
    assert slabs.take(SLAB_BYTES).reader == Reader(2, "event 2")
