"""Learning the order in which sites are needed."""

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

import ebbtide
from ebbtide._engine.timetable import Site, Timetable


def sites(count):
    return [Site("layers.0", 0, index) for index in range(count)]


def learn(table, order):
    """Need the sites in order; returns the number of expected sites."""
    hits = 0
    for site in order:
        expected = None if table.last is None else table.last.expected_after(table.before_last)
        hits += expected is site
        table.needed(site)
    return hits


def test_nothing_is_expected_at_first():
    site = Site("", 0, 3)
    assert site.expected_after(None) is None
    assert site.expected_after(Site("", 0, 4)) is None
    assert str(site) == "<root>#0.3"
    assert str(Site("layers.1", 2, 7)) == "layers.1#2.7"


def test_a_plain_loop_is_known_after_one_step():
    table = Timetable()
    order = sites(10)[::-1]
    assert learn(table, order) == 0
    assert learn(table, order) == 9  # the step from the end to the beginning is new
    assert learn(table, order) == 10


def test_each_order_is_learned_apart():
    table = Timetable()
    a, b, c, d = sites(4)
    for number, order in ((0, [a, b, c]), (1, [c, b, d]), (2, [b, d])) * 2:
        for site in order:
            site.begin(number)
        assert table.last is None or number == 0
        learn(table, order * 2)
        assert learn(table, order) == len(order)
    for number, order in ((0, [a, b, c]), (1, [c, b, d])):
        for site in order:
            site.begin(number)
        assert learn(table, order) == len(order) - 1  # the first need of an order follows nothing


def test_a_guess_counts_until_the_order_tells():
    a, b, c = sites(3)
    c.guess(a)
    learn(Timetable(), [c, b])
    c.guess(a)
    assert c.expected_after(None) is b
    b.begin(1)  # under other recipes, and no successor any more
    assert c.expected_after(None) is None
    a.begin(1)
    c.guess(a)  # a mark, which begins no order by itself
    assert c.expected_after(None) is a


def test_two_habits_at_one_site_are_told_apart_by_what_came_before():
    """Alternating orders: a first-order memory would miss every second time."""
    table = Timetable()
    a, b, c, d, e = sites(5)
    period = [a, c, d, b, c, e]
    learn(table, period * 2)
    assert learn(table, period * 3) == 18


def test_a_changed_order_is_learned_again():
    table = Timetable()
    order = sites(8)
    learn(table, order * 3)
    learn(table, order[::-1] * 2)
    assert learn(table, order[::-1]) == 8


@given(st.permutations(range(12)))
def test_any_order_without_repetition_is_known_after_two_steps(order):
    table = Timetable()
    known = sites(12)
    for _ in range(2):
        learn(table, [known[at] for at in order])
    assert learn(table, [known[at] for at in order]) == 12


@given(st.lists(st.integers(0, 30), min_size=40, max_size=200))
def test_habits_of_one_site_are_bounded(order):
    table = Timetable()
    known = sites(31)
    for at in order:
        learn(table, [known[at], known[0]])  # many come before site 0
    assert max(len(site._own.after) for site in known) <= 16


def test_without_the_site_before_the_last_habit_counts():
    a, b, c = sites(3)
    a.follow_with(b, c)
    assert a.expected_after(None) is c
    assert a.expected_after(Site("", 9, 9)) is c


def test_sites_of_a_model_that_is_gone_are_gone_too():
    """The first site of a model was needed after the last site of the model before."""

    def train():
        model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
        handle = ebbtide.offload(model, store="mock", min_bytes=1, mode="all", window="1KiB")
        for _ in range(4):
            model(torch.ones(4, 8)).sum().backward()
        handle.remove()

    def count():
        gc.collect()
        return sum(type(each) is Site for each in gc.get_objects())

    train()
    train()
    before = count()
    for _ in range(5):
        train()
    assert count() <= before
