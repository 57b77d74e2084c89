"""Visits: names that are stable from step to step without anybody saying where a step ends."""

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide._engine.context import CallNumbers, HookContext, Limits
from ebbtide._plans import ReleasePoint


def new_scope(may_serve=lambda _: True):
    return HookContext(Limits(1, 1, 1), may_serve)


def test_a_plain_loop_uses_number_0_for_ever():
    scope = new_scope()
    seen = set()
    for _ in range(5):
        visit = scope.visit("layers.0")
        seen.add((visit.number, visit.site(3)))
        del visit
    assert len(seen) == 1
    assert next(iter(seen))[0] == 0


def test_visits_alive_together_have_numbers_of_their_own():
    scope = new_scope()
    first, second, other = scope.visit("a"), scope.visit("a"), scope.visit("b")
    assert (first.number, second.number, other.number) == (0, 1, 0)
    assert first.site(0) is not second.site(0)
    del first
    assert scope.visit("a").number == 0  # the smallest that is free
    third, fourth = scope.visit("a"), scope.visit("a")
    assert {third.number, fourth.number} == {0, 2}


def test_sites_are_named_and_made_once():
    scope = new_scope()
    visit = scope.visit("layers.1")
    assert visit.site(2) is visit.site(2)
    assert [str(visit.site(index)) for index in range(3)] == ["layers.1#0.0", "layers.1#0.1", "layers.1#0.2"]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_numbers_are_the_smallest_free_ones(choices):
    slots = CallNumbers("a")
    taken: list[int] = []
    for choice in choices:
        if choice < len(taken):
            slots.give_back(taken.pop(choice))
        else:
            free = min(set(range(len(taken) + 1)) - set(taken))
            number = slots.take()
            assert number == free
            taken.append(number)
    assert len(set(taken)) == len(taken)
    assert len(slots._sites) <= 6


def test_visits_may_end_on_any_thread():
    scope = new_scope()
    visits = [scope.visit("a") for _ in range(100)]
    threads = [threading.Thread(target=visits[at::4].clear) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    visits.clear()
    assert sorted(scope.visit("a").number for _ in range(1)) == [0]
    alive = [scope.visit("a") for _ in range(100)]
    assert sorted(visit.number for visit in alive) == list(range(100))


def test_a_device_is_asked_for_once():
    asked = []

    def may_serve(device):
        asked.append(device)
        return device.type == "cpu"

    scope = new_scope(may_serve)
    for _ in range(3):
        assert scope.serves(torch.device("cpu"))
        assert not scope.serves(torch.device("meta"))
    assert asked == [torch.device("cpu"), torch.device("meta")]


POINTS = (ReleasePoint(1, 10), ReleasePoint(2, 20), ReleasePoint(5, 50))


def windows_of(visit, indices):
    """For each save: whether it is at a release point or behind it, and the window then."""
    return [(visit.comes_to_point(index), visit.limits.window_bytes) for index in indices]


def test_a_visit_comes_to_each_point_once():
    visit = new_scope().visit("a")
    visit.follow(POINTS, None)
    assert windows_of(visit, range(7)) == [
        (False, 1), (True, 10), (True, 20), (False, 20), (False, 20), (True, 50), (False, 50),
    ]  # fmt: skip
    assert visit.points == ()


def test_points_that_were_passed_over_are_come_to_with_the_next_save():
    """Saves on a device that is not the door's come to no point."""
    visit = new_scope().visit("a")
    visit.follow(POINTS, None)
    assert windows_of(visit, (0, 3, 4, 9)) == [(False, 1), (True, 20), (False, 20), (True, 50)]


def test_a_plan_bounds_what_a_visit_brings_back_and_nothing_else():
    scope = new_scope()
    visit = scope.visit("a")
    visit.follow((), None)
    assert visit.limits is scope.limits
    visit.follow((), 7)
    assert visit.limits == Limits(1, 7, 1)
    assert scope.visit("a").limits is scope.limits


def test_a_visit_that_begins_again_has_all_its_plan_and_the_window_of_now():
    visit = new_scope().visit("a")
    visit.follow(POINTS, 7)
    visit.sites, visit.recomputes = frozenset({3}), True
    windows_of(visit, range(4))
    again = visit.again()
    assert (again.region, again.number, again.next_index) == ("a", 1, 0)
    assert (again.points, again.sites, again.recomputes) == (POINTS, frozenset({3}), True)
    assert again.limits == Limits(20, 7, 1)
    assert again.again().points == POINTS


def test_a_visit_goes_on_with_the_window_that_holds():
    visit = new_scope().visit("a")
    visit.follow(POINTS, 7)
    visit.hold(33)
    assert visit.limits == Limits(33, 7, 1)
    assert windows_of(visit, range(2)) == [(False, 33), (True, 10)]
