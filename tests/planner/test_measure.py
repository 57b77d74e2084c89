"""One step, watched: what it comes by, and which forwards one backward is of."""

import gc
import itertools
import weakref

import pytest
from planner.test_control import batch, make
from support import HandleRig
from torch import nn

from ebbtide.devices.cpu import CpuDevice
from ebbtide.planner.measure import Pulse, StepWatch
from ebbtide.planner.profile import Link
from ebbtide.planner.reading import Surroundings, profile_of

NAMES = ["layers.0", "layers.1", "layers.2"]


class Ticking(CpuDevice):
    """Each event is one second after the one before it."""

    def __init__(self):
        super().__init__()
        self._seconds = itertools.count()

    def record(self, stream):
        return next(self._seconds) if stream is self.current_stream() else super().record(stream)

    def is_done(self, event):
        return isinstance(event, int) or super().is_done(event)

    def seconds_between(self, start, end):
        return float(end - start)


class Watched:
    """A model, each forward of which is followed by what `follow` gives, in the place of its planner."""

    def __init__(self, model=None):
        self.device = Ticking()
        self.model = make() if model is None else model
        self.rig = HandleRig()
        self.rig.offload(self.model)._control = self
        self.coming = []

    def step_begins(self, tokens):
        return self.coming.pop(0)

    def forward(self, watch):
        self.coming.append(watch)
        return self.model(batch(0))

    def watch(self, is_detailed=False):
        watch = StepWatch(self.device, self.rig.scope, is_detailed=is_detailed, runs_again=False)
        watch.began()
        return watch


@pytest.fixture
def watched():
    return Watched()


def profile_from(times, details, names=NAMES):
    link = Link(1e9, 1e9, 1e9, 1e9, 0.0)
    about = Surroundings({}, link, {}, {}, None, tokens=1, compiled=(), device_bytes=2**40)
    return profile_of(times, details, names, about)


def alone(watched, watch):
    watched.forward(watch).backward()


def with_another_of_the_same_backward(watched, watch):
    first = watched.forward(watch)
    (first + watched.forward(watch.beside())).backward()


def with_another_two_of_the_same_backward(watched, watch):
    losses = [watched.forward(watch), watched.forward(watch.beside()), watched.forward(watch.beside())]
    sum(losses).backward()


def with_another_of_a_backward_before(watched, watch):
    first = watched.forward(watch)
    watched.forward(watch.beside()).backward()
    first.backward()


def with_another_of_a_backward_behind(watched, watch):
    first = watched.forward(watch)
    other = watched.forward(watch.beside())
    first.backward()
    other.backward()


def with_another_that_is_dropped(watched, watch):
    first = watched.forward(watch)
    watched.forward(watch.beside())
    first.backward()


PARTS = [with_another_of_the_same_backward, with_another_two_of_the_same_backward]
WHOLES = [
    alone, with_another_of_a_backward_before, with_another_of_a_backward_behind, with_another_that_is_dropped,
]  # fmt: skip


@pytest.mark.parametrize("run", [*WHOLES, *PARTS])
def test_a_part_of_a_step_makes_no_profile(watched, run):
    whole, watch = watched.watch(), watched.watch(is_detailed=True)
    alone(watched, whole)
    run(watched, watch)
    assert watch.is_over
    assert watch.is_whole == (run in WHOLES)
    assert (profile_from(whole, watch) is None) == (run in PARTS)
    assert (profile_from(watch, whole) is None) == (run in PARTS)


@pytest.mark.parametrize("recipe", ["keep", "offload", "recompute"])
def test_what_runs_again_belongs_to_its_backward_too(recipe):
    watched = Watched()
    watched.rig.handles[0].set_recipe(recipe)
    watched.rig.handles[0]._control = watched
    watch = watched.watch()
    with_another_of_the_same_backward(watched, watch)
    assert watch.is_over
    assert not watch.is_whole


# -- pulses ------------------------------------------------------------------------------------------------------------


def pulses_of(watched, count):
    """Those of forwards, one after the other, and their losses. The clock ticks between them."""
    pulses, losses = [], []
    for _ in range(count):
        pulses.append(Pulse(watched.device, looks_at_peak=False, before=pulses[-1] if pulses else None))
        losses.append(watched.forward(pulses[-1]))
        watched.device.record(watched.device.current_stream())
    return pulses, losses


def test_a_step_of_several_forwards_begins_with_the_first(watched):
    pulses, losses = pulses_of(watched, 3)  # they begin at 0, 2 and 4, and then it is 6
    sum(losses).backward()
    assert [pulse.is_readable for pulse in pulses] == [True] * 3
    assert sorted(pulse.seconds() for pulse in pulses) == [6.0, 7.0, 8.0]


def test_forwards_with_backwards_of_their_own_are_steps_of_their_own(watched):
    pulses, losses = pulses_of(watched, 2)  # they begin at 0 and 2
    losses[1].backward()  # ends at 4
    losses[0].backward()  # ends at 5
    assert [pulse.seconds() for pulse in pulses] == [5.0, 2.0]


def test_forwards_that_are_dropped_leave_no_pulse_behind(watched):
    pulses, losses = pulses_of(watched, 3)
    known = [weakref.ref(pulse) for pulse in pulses]
    loss = losses[2]
    del pulses[:2], losses
    gc.collect()
    assert [ref() is None for ref in known] == [True, True, False]
    loss.backward()
    assert pulses[0].seconds() == 2.0


def test_a_pulse_of_a_model_that_saves_nothing_is_never_over():
    watched = Watched(nn.Identity())
    pulses, losses = pulses_of(watched, 1)
    losses[0].sum().backward()
    assert not pulses[0].is_over
