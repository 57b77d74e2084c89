"""Small random profiles, for properties. A unit of bytes is a megabyte, one of time a millisecond."""

from hypothesis import strategies as st

from ebbtide._planner.simulate import with_host
from ebbtide._profiling.profile import (
    ExpensiveOp,
    Host,
    HostTime,
    Link,
    Outside,
    PostRegionPoint,
    Profile,
    RegionProfile,
    SavedTensor,
)

MB = 1_000_000
MS = 1e-3

_megabytes = st.integers(0, 60).map(lambda n: n * MB)
_times = st.integers(1, 40).map(lambda n: n * MS / 4)


@st.composite
def regions(draw, name):
    forward_s = draw(_times)
    moments = st.floats(0, 1).map(lambda share: share * forward_s)
    sizes = draw(st.lists(_megabytes, max_size=3))
    held_for = draw(st.sampled_from([0, 0, 1, 2]))  # by the caller: an input, which the region saves or not
    saves_input = held_for > 0 and bool(sizes) and draw(st.booleans())
    not_movable_bytes, backward_work_bytes = draw(_megabytes), draw(_megabytes)
    reads = [(0, 0)] * len(sizes)
    if sizes and draw(st.booleans()):  # measured, with all that was read still on the device
        works = [draw(_megabytes) for _ in sizes]
        order = draw(st.permutations(range(len(sizes))))
        read = [sum(sizes[each] for each in order[: place + 1]) for place in range(len(sizes))]
        places = [order.index(k) for k in range(len(sizes))]
        reads = [(place + 1, max(1, read[place] + work)) for place, work in zip(places, works, strict=True)]
        backward_work_bytes = sum(sizes) + not_movable_bytes + max(works)
    rows = zip(range(len(sizes)), sizes, reads, strict=True)
    tensors = tuple(
        SavedTensor(
            k, n, draw(moments), read_at=place, read_bytes=work, held_for=held_for if k == 0 and saves_input else 0
        )
        for k, n, (place, work) in rows
    )
    inputs = sizes[:1] if saves_input else draw(st.lists(_megabytes, max_size=1))
    ops = tuple(
        ExpensiveOp(
            index=k,
            nbytes=draw(_megabytes),
            at_s=draw(moments),
            recompute_s=draw(st.floats(0, 0.4)) * forward_s,
            op="aten::mm",
            downstream=tuple(sorted(draw(st.sets(st.sampled_from(range(len(sizes))))))) if sizes else (),
            downstream_s=draw(st.floats(0, 0.2)) * forward_s,
            downstream_ops=draw(st.integers(0, 5)),
        )
        for k in range(draw(st.integers(0, 1)))
    )
    return RegionProfile(
        name=name,
        forward_s=forward_s,
        backward_s=draw(_times),
        recompute_s=draw(st.one_of(st.just(0.0), _times)),
        saved_tensors=tensors,
        not_movable_bytes=not_movable_bytes,
        inputs=tuple(SavedTensor(0, size, 0.0, held_for=held_for) for size in inputs),
        expensive_ops=ops,
        forward_work_bytes=draw(_megabytes),
        backward_work_bytes=backward_work_bytes,
        moved_work_bytes=max((work for _, work in reads), default=0),
        grad_bytes=draw(st.sampled_from([0, 0, 5 * MB])),
    )


_host_times = st.builds(HostTime, _times, _times, _times, st.integers(0, 9))


@st.composite
def hosts(draw, count):
    """A host ahead of compute, or far too slow."""
    return Host(
        regions=tuple(draw(_host_times) for _ in range(count)),
        before_s=draw(_times),
        after_s=draw(_times),
        backward_before_s=draw(_times),
        launch_ahead_s=draw(st.sampled_from([0.0, 2 * MS, 1.0])),
        steady_launch_ahead_s=0.0,
        frame_s=draw(_times),
        op_s=draw(st.sampled_from([0.0, MS])),
        saved_output_s=draw(st.sampled_from([0.0, MS])),
        moved_s=draw(st.sampled_from([0.0, MS])),
    )


def in_order(passes):
    """The same passes, with graphs numbered in the order of forward."""
    numbers = {}
    return tuple(numbers.setdefault(each, len(numbers)) for each in passes)


def most_at_once(passes):
    alive = [2 * len(set(passes[:end])) - end for end in range(1, len(passes) + 1)]
    return max(alive)


@st.composite
def profiles(draw, most_regions=3, shared_names=False):
    count = draw(st.integers(1, most_regions))
    names = [f"layers.{draw(st.integers(0, k)) if shared_names else k}" for k in range(count)]
    rate = draw(st.sampled_from([1e9, 5e9, 2e10]))
    back = draw(st.sampled_from([1e9, 5e9, 2e10]))
    graphs = draw(st.sampled_from([1, 1, 2, 3]))
    passes = draw(st.one_of(st.just(()), st.permutations([*range(4), *range(4)]).map(in_order))) if graphs > 1 else ()
    step = Profile(
        made_for={"model": "generated"},
        regions=tuple(draw(regions(name)) for name in names),
        outside=Outside(
            before_s=draw(_times),
            after_s=draw(_times),
            backward_before_s=draw(_times),
            backward_after_s=draw(_times),
            kept_bytes=draw(_megabytes),
            post_region_points=tuple(
                PostRegionPoint(index, draw(_times), draw(_megabytes)) for index in range(-1, draw(st.integers(-1, 3)))
            ),
            held_bytes=draw(_megabytes),
        ),
        link=Link(rate, back, draw(st.sampled_from([0.0, 1e-4])), draw(st.sampled_from([0.0, 0.02, 0.3]))),
        base_bytes=draw(_megabytes),
        base={"parameters": 10 * MB},
        host_limit_bytes=None,
        tokens=1000,
        graphs=most_at_once(passes) if passes else graphs,
        passes=passes,
    )
    return with_host(step, draw(st.one_of(st.none(), hosts(count))))
