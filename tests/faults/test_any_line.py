"""Interrupts and collections of garbage before random lines of ebbtide: the next step is right, and nothing is left."""

import contextlib
import gc
import random
import signal
import threading

import pytest
import torch
from faults.lines import Lines
from faults.training import TwinTraining
from support import HandleRig

from ebbtide._devices.sim import SimDevice
from ebbtide._errors import add_note
from ebbtide._stores import disk
from ebbtide._stores.disk import DiskStore
from ebbtide._stores.mock import MockStore

POINTS = 20
ALL_POINTS = 250


@pytest.fixture(
    params=["context on the host", "all in a mock", "all on a sim", "recompute on disk", "selective on a sim"]
)
def training(request, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_MOUNTS", tmp_path / "no-such-list-of-mounts")
    what, _, where = request.param.partition(" ")
    device = SimDevice(1, "late") if where.endswith("sim") else None
    stores = {"in a mock": MockStore, "on disk": lambda device: DiskStore(device, tmp_path)}
    settings = {"make_store": stores[where]} if where in stores else {}
    rig = HandleRig(device, window=1, prefetch=3000, **settings)
    training = TwinTraining(rig, None if what in ("context", "all") else what, is_context=what == "context")
    for _ in range(2):
        training.check()
    return training


@pytest.fixture
def points(request, training):
    """Random numbers of lines of a step, by the seed."""
    with Lines() as lines:
        training.step()
    choose = random.Random(len(request.node.name))
    return [choose.randrange(lines.count) for _ in range(ALL_POINTS if request.config.getoption("--all") else POINTS)]


@contextlib.contextmanager
def handling(number, handler):
    former = signal.signal(number, handler)
    try:
        yield lambda: signal.raise_signal(number)
    finally:
        signal.signal(number, former)


class Ended(BaseException):
    pass


def end(*_signal):
    raise Ended


def checked(training, place):
    try:
        training.check()
    except BaseException as error:
        add_note(error, f"after a fault at {place}")
        raise


@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [(signal.SIGINT, signal.default_int_handler, KeyboardInterrupt), (signal.SIGTERM, end, Ended)],
    ids=["KeyboardInterrupt", "a handler that raises"],
)
def test_after_an_exception_at_any_line_training_goes_on(training, points, number, handler, error):
    raised = 0
    with handling(number, handler) as signalled:
        for at in points:
            lines = Lines({at}, signalled)
            try:
                with lines:
                    training.step()
            except error:
                raised += 1
            checked(training, lines.place)
    assert raised > 0.8 * len(points)  # once learned, a step has fewer lines


def test_a_handler_may_evaluate_and_report_at_any_line(training, points):
    reports = []

    def handler(*_signal):
        with torch.no_grad():
            training.forward()
        reports.append(training.report())

    with handling(signal.SIGALRM, handler) as signalled:
        for at in points:
            lines = Lines({at}, signalled)
            with lines:
                training.step()
            checked(training, lines.place)
    assert len(reports) > 0.8 * len(points)
    assert all("saved" in report for report in reports)


def test_garbage_is_collected_at_any_line(training, points):
    """Graphs in cycles of references end in the middle of a call of the engine, also those of another thread."""
    collected = []
    ends = []

    def collect():
        collected.append(gc.collect())

    def leave_garbage():
        cycle = [training.forward()]
        cycle.append(cycle)

    gc.disable()
    gc.freeze()  # only what a step makes is looked at
    try:
        for at in points[::2]:
            leave_garbage()
            thread = threading.Thread(target=leave_garbage)
            thread.start()
            thread.join()
            with Lines(range(at % 97, 10**9, 997), collect):
                training.step()
            training.check()
            ends.append(sum(collected))
    finally:
        gc.unfreeze()
        gc.enable()
    assert ends[0] > 0
