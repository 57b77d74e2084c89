"""Region calls: names that are stable from step to step without any mark of a step's end."""

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide._engine.context import HookContext, Limits
from ebbtide._plans import ReleasePoint


def new_context(may_serve=lambda _: True):
    return HookContext(Limits(1, 1, 1), may_serve)


def test_a_plain_loop_uses_number_0_for_ever():
    context = new_context()
    seen = set()
    for _ in range(5):
        context.forward_begins()
        call = context.new_call("layers.0")
        seen.add((call.site(3).call, call.site(3)))
        del call
    assert len(seen) == 1
    assert next(iter(seen))[0] == 0


def test_calls_alive_together_have_numbers_of_their_own():
    context = new_context()
    first, second, other = context.new_call("a"), context.new_call("a"), context.new_call("b")
    assert [call.site(0).call for call in (first, second, other)] == [0, 1, 0]
    assert first.site(0) is not second.site(0)
    del first
    third = context.new_call("a")
    assert third.site(0).call == 2  # in the order of forward
    del second, third, other
    context.forward_begins()
    empty, fourth = context.new_call("a"), context.new_call("a")
    assert fourth.site(0).call == 0
    assert empty.site(0).call == 1  # a call counts from its first parcel on


def test_sites_are_named_and_made_once():
    context = new_context()
    call = context.new_call("layers.1")
    assert call.site(2) is call.site(2)
    assert [str(call.site(index)) for index in range(3)] == ["layers.1#0.0", "layers.1#0.1", "layers.1#0.2"]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_numbers_count_as_long_as_a_forward_waits(choices):
    """Each choice is the backward of a waiting forward, or another forward."""
    context = new_context()
    waiting, last = [], -1
    for choice in choices:
        if choice < len(waiting):
            waiting.pop(choice).forward.backward_begins()
        else:
            context.forward_begins()
            last = last + 1 if waiting else 0
            waiting.append(context.new_call("a"))
            assert waiting[-1].site(0).call == last


def test_regions_that_backward_never_reads_make_no_numbers_count_on():
    """An output that the loss does not use keeps saved tensors of the step before alive."""
    context = new_context()
    seen, left = set(), None
    for _ in range(20):
        context.forward_begins()
        call, unused = context.new_call("a"), context.new_call("head")
        seen |= {call.site(0).call, unused.site(0).call}
        call.forward.backward_begins()
        left = call, unused
    assert left is not None
    assert seen == {0, 1}


def test_numbers_of_all_modules_count_together():
    """A stage of a pipeline may have no forward waiting while another stage of the rank has."""
    first, second = new_context(), new_context()
    first.forward_begins()
    waiting = first.new_call("a")
    assert waiting.site(0).call == 0
    numbers = []
    for _ in range(3):
        second.forward_begins()
        call = second.new_call("b")
        numbers.append(call.site(0).call)
        call.forward.backward_begins()
    assert numbers == [0, 1, 2]


def test_numbers_begin_again_beside_a_graph_kept_alive():
    context = new_context()
    kept = context.new_call("a")
    numbers = [kept.site(0).call]
    for _ in range(200):
        context.forward_begins()
        call = context.new_call("a")
        numbers.append(call.site(0).call)
        call.forward.backward_begins()
    assert max(numbers) < 64
    assert len(set(numbers[-50:])) == 1  # a period of one step again


def test_calls_may_end_on_any_thread():
    context = new_context()
    calls = [context.new_call("a") for _ in range(100)]
    threads = [threading.Thread(target=calls[at::4].clear) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls.clear()
    context.forward_begins()
    assert context.new_call("a").site(0).call == 0
    alive = [context.new_call("a") for _ in range(100)]
    assert sorted(call.site(0).call for call in alive) == list(range(100))


def test_a_device_is_asked_for_once():
    asked = []

    def may_serve(device):
        asked.append(device)
        return device.type == "cpu"

    context = new_context(may_serve)
    for _ in range(3):
        assert context.serves(torch.device("cpu"))
        assert not context.serves(torch.device("meta"))
    assert asked == [torch.device("cpu"), torch.device("meta")]


POINTS = (ReleasePoint(1, 10), ReleasePoint(2, 20), ReleasePoint(5, 50))


def windows_of(call, indices):
    """For each saved tensor: whether a release point is reached, and the window afterwards."""
    return [(call.reaches_point(index), call.limits.window_bytes) for index in indices]


def test_a_call_comes_to_each_point_once():
    call = new_context().new_call("a")
    call.set_points(POINTS, None)
    assert windows_of(call, range(7)) == [
        (False, 1), (True, 10), (True, 20), (False, 20), (False, 20), (True, 50), (False, 50),
    ]  # fmt: skip
    assert call.points == ()


def test_points_that_were_passed_over_are_come_to_with_the_next_saved_tensor():
    """Tensors on a device that is not offloaded reach no point."""
    call = new_context().new_call("a")
    call.set_points(POINTS, None)
    assert windows_of(call, (0, 3, 4, 9)) == [(False, 1), (True, 20), (False, 20), (True, 50)]


def test_a_plan_bounds_what_a_call_brings_back_and_nothing_else():
    context = new_context()
    call = context.new_call("a")
    call.set_points((), None)
    assert call.limits is context.limits
    call.set_points((), 7)
    assert call.limits == Limits(1, 7, 1)
    assert context.new_call("a").limits is context.limits


def test_a_call_that_begins_again_has_all_its_plan_and_the_window_of_now():
    call = new_context().new_call("a")
    call.set_points(POINTS, 7)
    call.sites, call.recomputes = frozenset({3}), True
    windows_of(call, range(4))
    restarted = call.restart()
    assert (restarted.region, restarted.next_index) == ("a", 0)
    assert (restarted.points, restarted.sites, restarted.recomputes) == (POINTS, frozenset({3}), True)
    assert restarted.limits == Limits(20, 7, 1)
    assert restarted.restart().points == POINTS


def test_a_call_goes_on_with_the_window_that_holds():
    call = new_context().new_call("a")
    call.set_points(POINTS, 7)
    call.keep_window(33)
    assert call.limits == Limits(33, 7, 1)
    assert windows_of(call, range(2)) == [(False, 33), (True, 10)]
