"""Findings about outputs, kept by site."""

import gc

from ebbtide._engine.timetable import Site
from ebbtide._recompute import memory
from ebbtide._recompute.memory import history_of
from ebbtide._types import Output


def test_findings_decide_about_saving():
    history = history_of(Site("layers.0", 0, 0))
    assert not history.drops_output()
    history.output = Output.NEEDED
    assert not history.drops_output()
    history.output = Output.UNUSED
    assert all(history.drops_output() for _ in range(100))
    history.note_use()
    assert not history.drops_output()


def test_a_changed_output_gets_another_try():
    history = history_of(Site("layers.0", 0, 0))
    history.output = Output.CHANGED
    history.note_use()
    assert [history.drops_output() for _ in range(33)] == [True] * 31 + [False] * 2


def test_findings_live_as_long_as_the_site():
    site = Site("layers.0", 0, 0)
    history_of(site).output = Output.UNUSED
    assert history_of(site).output is Output.UNUSED
    assert history_of(Site("layers.0", 0, 0)).output is None
    del site
    gc.collect()
    assert not any(history.output is Output.UNUSED for history in memory._HISTORIES.values())
