"""Ranges that profilers show around the phases of offloading."""

from collections import Counter

import torch
from cases import Transformer, make, tokens
from support import HandleRig
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide._utils.tracing import is_tracing, span

PHASES = ("ebbtide::send", "ebbtide::release", "ebbtide::fetch", "ebbtide::unpack")


class OperatorCount(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += 1
        return op(*args, **(kwargs or {}))


def ranges_of(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    events = [event for event in profiler.events() if event.name.startswith("ebbtide::")]
    assert all(event.is_user_annotation for event in events)
    return Counter(event.name for event in events)


def test_a_profile_shows_each_phase_with_the_name_of_its_region():
    rig, model = HandleRig(window=1, prefetch=1 << 20), make(Transformer, torch.device("cpu"))
    handle = rig.offload(model)

    def step():
        model(tokens(torch.device("cpu"))).backward()

    step()
    before = handle.stats()
    ranges = ranges_of(step)
    after = handle.stats()
    for phase in PHASES:
        assert {f"{phase} layers.0", f"{phase} layers.1"} <= ranges.keys()
    by_phase = Counter(name.split(" ")[0] for name in ranges.elements())
    assert by_phase.keys() == set(PHASES)
    assert by_phase["ebbtide::send"] == after.out.count - before.out.count
    assert by_phase["ebbtide::fetch"] == after.inbound.count - before.inbound.count


def test_without_a_profiler_a_range_is_a_shared_context():
    assert not is_tracing()
    assert span("ebbtide::send", "layers.0") is span("ebbtide::fetch")
    assert ranges_of(lambda: None) == {}


def test_dispatch_modes_do_not_see_ranges():
    with torch.profiler.profile() as profiler, OperatorCount() as mode, span("ebbtide::send"):
        pass
    assert mode.count == 0
    assert [event.name for event in profiler.events()].count("ebbtide::send") == 1
