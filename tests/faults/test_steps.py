"""A fault in a step: a clear error, or a counted fallback; the repeated step equals the twin's."""

import errno
import os
import threading

import pytest
import torch
from faults.training import TwinTraining
from support import Boom, HandleRig

import ebbtide
from ebbtide._devices.cpu import CpuDevice, HostEvent
from ebbtide._engine import engine
from ebbtide._stores import disk
from ebbtide._stores.disk import DiskStore
from ebbtide._stores.host import HostStore
from ebbtide._types import Reason


def failing(function, error, after=0):
    """`function` for `after` calls, and a new `error` in all further calls: an error holds frames and graphs."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) > after:
            raise error()
        return function(*args, **kwargs)

    return call


def os_error(number):
    return lambda: OSError(number, os.strerror(number))


def full():
    return torch.OutOfMemoryError("no memory left")


def refused():
    return MemoryError("refused by the driver")


def no_host_memory(training, patch):
    patch.setattr(training.rig.device, "host_bytes", failing(None, refused))


def host_memory_runs_out(training, patch):
    device = training.rig.device
    patch.setattr(device, "host_bytes", failing(device.host_bytes, refused, after=1))


def disk_is_full(training, patch):
    patch.setattr(os, "posix_fallocate", failing(None, os_error(errno.ENOSPC)))


def disk_fills_up(training, patch):
    patch.setattr(os, "pwrite", failing(os.pwrite, os_error(errno.ENOSPC), after=3))


def writes_fail(training, patch):
    patch.setattr(os, "pwrite", failing(os.pwrite, os_error(errno.EIO), after=3))


def writes_are_short(training, patch):
    genuine = os.pwrite
    patch.setattr(os, "pwrite", lambda fd, data, at: genuine(fd, data[: max(4096, len(data) // 2)], at))


def reads_are_short(training, patch):
    genuine = os.preadv
    patch.setattr(os, "preadv", lambda fd, rooms, at: genuine(fd, [rooms[0][: max(4096, len(rooms[0]) // 2)]], at))


def reads_fail(training, patch):
    patch.setattr(os, "preadv", failing(os.preadv, os_error(errno.EIO), after=1))


def disk_is_slow(training, patch):
    """Nothing is written or read before the training thread waits."""
    opened, pwrite, preadv, result = threading.Event(), os.pwrite, os.preadv, HostEvent.result

    def is_training():
        return threading.current_thread() is threading.main_thread()

    def late(move):
        return lambda *args: (is_training() or opened.wait()) and move(*args)

    def waiting(self):
        if not is_training():
            return result(self)
        opened.set()
        try:
            return result(self)
        finally:
            opened.clear()

    patch.setattr(os, "pwrite", late(pwrite))
    patch.setattr(os, "preadv", late(preadv))
    patch.setattr(HostEvent, "result", waiting)
    training.then = opened.set  # for copies without a waiting thread


def out_of_memory_in_pack(training, patch):
    patch.setattr(engine, "make_dense", failing(None, full))


def out_of_memory_in_fetch(training, patch):
    patch.setattr(training.rig.device, "allocate", failing(None, full))


def out_of_memory_ahead(training, patch):
    """The device has room for the needs of a node, and for nothing more."""
    device, guesses = training.rig.device, []
    allocate, guess = device.allocate, engine.Engine._fetch_guessed

    def full(*args):
        if guesses:
            raise torch.OutOfMemoryError("no memory left")
        return allocate(*args)

    def guessing(self, tokens):
        guesses.append(tokens)
        try:
            return guess(self, tokens)
        finally:
            guesses.pop()

    patch.setattr(device, "allocate", full)
    patch.setattr(engine.Engine, "_fetch_guessed", guessing)


def of_the_user(at, error):
    """An `error` in code of the user."""

    def fault(training, patch):
        block = training.model.layers[0]
        module = {"forward": block.mlp, "loss": training.model.head, "backward": block.mlp}[at]
        genuine = module.forward

        def forward(x):
            if at != "backward":
                raise error()
            out = genuine(x)
            out.register_hook(failing(None, error))
            return out

        patch.setattr(module, "forward", forward)

    fault.__name__ = f"{error.__name__} in {at}"
    return fault


def optimizer_raises(training, patch):
    optimizer, step = torch.optim.SGD(training.model.parameters()), training.step
    optimizer.register_step_pre_hook(failing(None, Boom))
    patch.setattr(training, "step", lambda: (step(), optimizer.step()))


HOST, DISK = "host", "disk"
ERRORS = [  # the store, the fault, the error
    (DISK, reads_fail, ebbtide.StoreError),
    (HOST, out_of_memory_in_fetch, torch.OutOfMemoryError),
    *((HOST, of_the_user(at, Boom), Boom) for at in ("forward", "loss", "backward")),
    (HOST, optimizer_raises, Boom),
    *((HOST, of_the_user(at, full), torch.OutOfMemoryError) for at in ("forward", "loss", "backward")),
]
FALLBACKS = [  # the store, the fault, the count
    *((HOST, fault, lambda stats: stats.kept[Reason.STORE_FULL]) for fault in (no_host_memory, host_memory_runs_out)),
    (DISK, disk_is_full, lambda stats: stats.kept[Reason.STORE_FULL]),
    *((DISK, fault, lambda stats: stats.failed) for fault in (disk_fills_up, writes_fail)),
    *((DISK, fault, lambda stats: stats.inbound) for fault in (writes_are_short, reads_are_short, disk_is_slow)),
    (HOST, out_of_memory_in_pack, lambda stats: stats.out),
    (HOST, out_of_memory_ahead, lambda stats: stats.misses),
]


@pytest.fixture(params=[None, "recompute", "selective"], ids=str)
def training(request, store, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_MOUNTS", tmp_path / "no-such-list-of-mounts")
    make = {DISK: lambda device: DiskStore(device, tmp_path), HOST: lambda device: HostStore(device, 2**24, 512)}
    rig = HandleRig(CpuDevice(), window=1, prefetch=3000, make_store=make[store])
    return TwinTraining(rig, request.param, is_context=False)


def of_name(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("store", "fault", "error"), ERRORS, ids=of_name)
@pytest.mark.parametrize("is_learned", [False, True], ids=["first step", "later step"])
def test_a_fault_is_a_clear_error_and_the_step_can_be_repeated(training, fault, error, is_learned, monkeypatch):
    if is_learned:
        training.check()
    with monkeypatch.context() as patch:
        fault(training, patch)
        for _ in range(2):
            with pytest.raises(error):
                training.step()
    for _ in range(2):
        training.check()


@pytest.mark.filterwarnings("ignore::ebbtide.EbbtideWarning")  # tests of stores and engine look for the warnings
@pytest.mark.parametrize(("store", "fault", "counted"), FALLBACKS, ids=of_name)
def test_a_fault_is_counted_and_the_step_is_right(training, fault, counted, monkeypatch):
    with monkeypatch.context() as patch:
        fault(training, patch)
        for _ in range(3):
            training.check()
        training.then()
    assert counted(training.stats()).count > 0
    for _ in range(2):
        training.check()
