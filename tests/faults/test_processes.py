"""Forks, kills and ends of processes with parcels on disk."""

import contextlib
import os
import signal
import subprocess
import sys
import traceback

import pytest
import torch
from cases import Transformer, finish, make, tokens
from support import assert_equal

import ebbtide
from ebbtide._control.controller import Phase
from ebbtide._devices.cpu import HostStream
from ebbtide._stores import disk

CPU = torch.device("cpu")


class Training:
    """Steps of a model with parcels on disk, and of a plain twin."""

    def __init__(self, folder, **settings):
        self.model, self.twin = (make(lambda: Transformer(depth=1), CPU) for _ in range(2))
        self.handle = ebbtide.offload(self.model, store=f"disk:{folder}", min_bytes=1, **settings)

    def check(self, number=0):
        ours = finish(self.model(tokens(CPU, number)), self.model)
        assert_equal(ours, finish(self.twin(tokens(CPU, number)), self.twin))


@pytest.fixture
def settings():
    return {"mode": "all", "window": 1, "prefetch": 1000}


@pytest.fixture
def training(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(disk, "_MOUNTS", tmp_path / "no-such-list-of-mounts")
    training = Training(tmp_path, **settings)
    training.check()
    yield training
    training.handle.remove()
    ebbtide.release_memory()


@contextlib.contextmanager
def child(work):
    """A fork of the process runs `work`; yields the number of the fork. Fails if `work` fails or has no end."""
    number = os.fork()
    if number == 0:
        signal.alarm(600)
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    yield number
    assert os.waitpid(number, 0)[1] == 0


def test_a_forked_child_trains_apart_from_its_parent(training):
    """The child has no threads of the parent, and the file of the parent's parcels is the parent's alone."""
    held = training.model(tokens(CPU, 1))

    def work():
        for number in range(3):
            training.check(number)
        with pytest.raises(ebbtide.StoreError, match="forked"):
            held.backward()
        training.check(3)
        ebbtide.release_memory()
        training.check(4)

    with child(work):
        pass
    assert_equal(finish(held, training.model), finish(training.twin(tokens(CPU, 1)), training.twin))
    training.check(2)


def test_a_copy_under_way_at_a_fork_is_a_clear_error_in_the_child():
    stream = HostStream("lane")
    read, write = os.pipe()
    event = stream.submit(lambda: os.read(read, 1))  # until the parent writes

    def work():
        with pytest.raises(ebbtide.StoreError, match="forked before the copy was done"):
            event.result()
        assert stream.submit(lambda: 7).result() == 7

    with child(work):
        pass
    os.write(write, b"x")
    assert event.result() == b"x"
    for end in (read, write):
        os.close(end)


def test_two_processes_share_a_folder(training):
    """In turns: each has parcels on disk while the second process trains."""
    (to_child, from_parent), (to_parent, from_child) = os.pipe(), os.pipe()

    def work():
        for number in range(3):
            loss = training.model(tokens(CPU, number))
            os.write(from_child, b"x")
            os.read(to_child, 1)
            assert_equal(finish(loss, training.model), finish(training.twin(tokens(CPU, number)), training.twin))

    with child(work):
        for number in range(5, 8):
            loss = training.model(tokens(CPU, number))
            os.read(to_parent, 1)
            os.write(from_parent, b"x")
            assert_equal(finish(loss, training.model), finish(training.twin(tokens(CPU, number)), training.twin))
    for end in (to_child, from_parent, to_parent, from_child):
        os.close(end)


def test_a_killed_process_leaves_no_file(training, tmp_path):
    read, write = os.pipe()
    number = os.fork()
    if number == 0:
        loss = training.model(tokens(CPU))
        os.write(write, b"x" if loss.isfinite() and not os.listdir(tmp_path) else b"-")
        signal.pause()
    assert os.read(read, 1) == b"x"  # parcels are on disk, in a file without a name
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    assert os.listdir(tmp_path) == []
    training.check(1)
    for end in (read, write):
        os.close(end)


_WAITS_TO_BE_KILLED = "import os, signal; open({pipe!r}, 'w').write(str(os.getpid())); signal.pause()  # {{path}}"


@pytest.mark.parametrize("settings", [{"budget": "64GiB"}])
def test_the_solver_may_be_killed_during_a_training(training, tmp_path, monkeypatch, caplog):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("EBBTIDE_WAIT", "0")
    monkeypatch.setattr("ebbtide._planner.process._CODE", _WAITS_TO_BE_KILLED.format(pipe=str(pipe)))
    controller = training.handle._attachment.controller
    for number in range(6):
        training.check(number)
    assert controller.phase is Phase.SOLVING
    for is_last in (False, True):  # the questions for the fallback, and for the plan
        os.kill(int(pipe.read_text()), signal.SIGKILL)
        controller.tuner._asked.answer.result()
        training.check(6 + is_last)
    assert caplog.text.count("the solver's process ended with -9") == 2
    assert controller.phase is Phase.PLANNED
    assert training.handle.plan.predicted is not None


_ENDS = """
import pathlib, sys, torch
sys.path[:0] = [{tests!r}]
from cases import Transformer, make, tokens
import ebbtide
from ebbtide._devices.cpu import HostStream
from ebbtide._stores import disk
disk._MOUNTS = pathlib.Path("/no/such/list/of/mounts")
cpu, graphs = torch.device("cpu"), []
for store in ("disk:" + sys.argv[1], "mock"):
    model = make(lambda: Transformer(depth=1), cpu)
    handle = ebbtide.offload(model, mode="all", store=store, min_bytes=1, window=1, prefetch=1000)
    for number in range(2):
        model(tokens(cpu, number)).backward()
    graphs.append(model(tokens(cpu)))
    half = model(tokens(cpu))
    half.backward(retain_graph=True)
    graphs.append(half)
cycle = [graphs, handle]
cycle.append(cycle)
print("trained")
"""


def test_a_process_may_end_with_graphs_alive(tmp_path):
    code = _ENDS.format(tests=os.path.dirname(os.path.dirname(__file__)))
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "trained\n", "")
    assert os.listdir(tmp_path) == []
