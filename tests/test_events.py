"""Events equal the counts, come in a sensible order, and subscriptions can end."""

from collections import Counter

import torch
from support import Rig, leaves

from ebbtide import Event, EventKind


def _step(rig: Rig) -> None:
    (weight,) = leaves(0, (8, 8))
    with rig.context:
        x = torch.ones(4, 8) @ weight
        for _ in range(4):
            x = x.exp().tanh()
        loss = x.sum()
    loss.backward()


def test_events_add_up_to_the_stats():
    rig, events = Rig(window=100, prefetch=400), list[Event]()
    rig.context.subscribe(events.append)
    for _ in range(3):
        _step(rig)
    counts, stats = Counter(event.kind for event in events), rig.stats
    assert counts[EventKind.SENT] == stats.out.count > 0
    assert counts[EventKind.FETCHED] + counts[EventKind.MISSED] == stats.inbound.count > 0
    assert counts[EventKind.FORWARDED] == stats.forwarded.count > 0
    assert sum(event.nbytes for event in events if event.kind is EventKind.SENT) == stats.out.nbytes


def test_a_parcel_is_sent_then_released_then_fetched():
    rig, events = Rig(window=1), list[Event]()
    rig.context.subscribe(events.append)
    _step(rig)
    site = next(event.site for event in events if event.kind is EventKind.RELEASED)
    assert [event.kind for event in events if event.site == site] in (
        [EventKind.SENT, EventKind.RELEASED, EventKind.MISSED],
        [EventKind.SENT, EventKind.RELEASED, EventKind.FETCHED],
    )
    times = [event.seconds for event in events]
    assert times == sorted(times)


def test_listening_ends():
    rig, events = Rig(window=1), list[Event]()
    end = rig.context.subscribe(events.append)
    _step(rig)
    heard = len(events)
    end()
    _step(rig)
    assert len(events) == heard > 0
