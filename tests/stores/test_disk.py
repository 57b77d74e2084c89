"""Peculiarities of a disk: folders, room that runs out, files that fail, and threads between disk and device."""

import errno
import fcntl
import gc
import mmap
import os
import re
import stat
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from late_device import LateDevice

from ebbtide._devices.cpu import CpuDevice
from ebbtide._errors import ConfigError, StoreError
from ebbtide._stores import DiskStore, _scratch, disk
from ebbtide._types import Wait
from ebbtide._utils.sizes import GIB, MIB


@pytest.fixture
def store(folder):
    store = DiskStore(CpuDevice(), folder, threads=2)
    yield store
    store.close()


@pytest.fixture
def lane():
    return CpuDevice().new_stream("lane")


def data_of(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def raising(number: int):
    def fail(*args):
        raise OSError(number, os.strerror(number))

    return fail


# -- folders -------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_refused(folder):
    with pytest.raises(ConfigError, match=r"nowhere' does not exist: make it, or name a folder on a disk, like store="):
        DiskStore.check_folder(folder / "nowhere")


def test_a_file_is_no_folder(folder):
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="file' is not a folder"):
        DiskStore(CpuDevice(), folder / "file")


def test_a_folder_that_cannot_be_written_to_is_refused(folder, monkeypatch):
    monkeypatch.setattr(disk.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written to: change its permissions"):
        DiskStore.check_folder(folder)


def mounts(tmp_path, kind: str):
    """A list of mounts with `tmp_path` on a `kind`."""
    number = tmp_path.stat().st_dev
    listing = tmp_path / "mountinfo"
    listing.write_text(
        "22 27 0:99999 / /sys rw,relatime - sysfs sysfs rw\n"
        f"27 1 {os.major(number)}:{os.minor(number)} / / rw,relatime shared:1 - {kind} source rw\n"
    )
    return listing


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_folder_in_ram_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(disk, "_MOUNTS", mounts(tmp_path, kind))
    with pytest.raises(ConfigError, match=rf"is on a {kind}, which is RAM.*store='disk:/scratch'"):
        DiskStore.check_folder(tmp_path)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "overlay", "nfs4"])
def test_a_folder_on_a_disk_is_taken(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(disk, "_MOUNTS", mounts(tmp_path, kind))
    DiskStore.check_folder(tmp_path)
    assert disk._file_system_of(tmp_path) == kind


def test_a_folder_on_an_unknown_file_system_is_taken(tmp_path, monkeypatch):
    empty = tmp_path / "mountinfo"
    empty.touch()
    monkeypatch.setattr(disk, "_MOUNTS", empty)
    DiskStore.check_folder(tmp_path)
    assert disk._file_system_of(tmp_path) is None


def test_a_store_needs_a_thread(folder):
    with pytest.raises(ConfigError, match="threads=0"):
        DiskStore(CpuDevice(), folder, threads=0)


# -- the file ------------------------------------------------------------------------------------------------------


def test_the_file_is_of_the_user_alone_and_has_no_name(store, folder):
    store.reserve(MIB)
    assert list(folder.iterdir()) == []
    found = os.fstat(store._file._fd)
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_nlink) == (0o600, os.getuid(), 0)
    assert not os.get_inheritable(store._file._fd)


def test_the_file_has_no_name_before_anything_is_written(folder, monkeypatch):
    """Whoever may write to the folder must not be able to put a link in the place of the file."""
    seen = []
    monkeypatch.setattr(_scratch, "_set_direct", lambda fd: seen.append(list(folder.iterdir())) or False)
    DiskStore(CpuDevice(), folder).close()
    assert seen == [[]]


def test_the_file_is_closed_with_the_last_reference(folder):
    store = DiskStore(CpuDevice(), folder)
    number = store._file._fd
    assert os.fstat(number).st_nlink == 0
    store.close()
    del store
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_closing_frees_the_room_at_once(store):
    store.reserve(MIB)
    assert os.fstat(store._file._fd).st_size >= MIB
    store.close()
    assert os.fstat(store._file._fd).st_size == 0


@pytest.mark.parametrize(("module", "call"), [(fcntl, "fcntl"), (os, "pwrite")], ids=["at once", "at a write"])
def test_a_file_system_may_refuse_to_pass_the_cache(folder, monkeypatch, lane, module, call):
    genuine = getattr(module, call)

    def refuse(fd, what, flags=0):
        if call == "pwrite" or flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return genuine(fd, what, flags)

    with monkeypatch.context() as patched:
        patched.setattr(module, call, refuse)
        store = DiskStore(CpuDevice(), folder)
    assert not store._file.is_direct
    data = data_of(3 * MIB + 5)
    block = store.reserve(data.numel())
    store.write(block, data, lane).result()
    back = torch.empty_like(data)
    store.read(block, back, lane).result()
    assert torch.equal(back, data)
    store.close()


@pytest.mark.parametrize("step", [4096, 5000, 100_000])
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_short_reads_and_writes_go_on(store, lane, monkeypatch, call, step):
    data = data_of(MIB + 17)
    block = store.reserve(data.numel())
    genuine = getattr(os, call)

    def short(fd, room, offset):
        moved = genuine(fd, room, offset)
        return min(moved, step)

    monkeypatch.setattr(os, call, short)
    store.write(block, data, lane).result()
    back = torch.empty_like(data)
    store.read(block, back, lane).result()
    assert torch.equal(back, data)


def test_a_read_past_the_end_is_an_error(store, lane):
    block = store.reserve(MIB)
    store.write(block, data_of(MIB), lane).result()
    os.ftruncate(store._file._fd, 4096)
    with pytest.raises(StoreError, match="the file system moved only 0 bytes"):
        store.read(block, torch.empty(MIB, dtype=torch.uint8), lane).result()


# -- room ----------------------------------------------------------------------------------------------------------


def statvfs_with(free_bytes: int):
    return lambda fd: SimpleNamespace(f_frsize=4096, f_blocks=1024 * GIB // 4096, f_bavail=free_bytes // 4096)


def test_a_full_disk_keeps_its_last_gibibyte(store, monkeypatch):
    monkeypatch.setattr(os, "fstatvfs", statvfs_with(GIB + 10 * MIB))
    assert store.reserve(11 * MIB) is None
    assert store.reserve(10 * MIB) is not None
    assert store.stats().reserved_bytes == 10 * MIB


def test_a_small_disk_keeps_a_share(store, monkeypatch):
    small = SimpleNamespace(f_frsize=4096, f_blocks=100 * MIB // 4096, f_bavail=20 * MIB // 4096)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: small)
    assert store.reserve(19 * MIB) is None
    assert store.reserve(17 * MIB) is not None


def test_the_processes_of_a_host_share_a_disk(store, monkeypatch):
    """Of the room at the first parcel: what other processes take later counts once."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(os, "fstatvfs", statvfs_with(GIB + 40 * MIB))
    assert store.reserve(11 * MIB) is None
    assert store.reserve(6 * MIB) is not None
    monkeypatch.setattr(os, "fstatvfs", statvfs_with(GIB + 10 * MIB))
    assert store.reserve(5 * MIB) is None
    assert store.reserve(4 * MIB) is not None
    assert store.stats().reserved_bytes == 10 * MIB


def test_room_is_taken_in_steps(store):
    blocks = [store.reserve(MIB) for _ in range(3)]
    assert len({block.start for block in blocks}) == 3
    assert store.stats().growths == 1
    assert store.stats().reserved_bytes == 256 * MIB


def test_a_large_parcel_gets_a_step_of_its_size(store):
    assert store.reserve(256 * MIB + 1).start == 0
    assert store.stats().reserved_bytes == 256 * MIB + 4096


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_room_lost_to_other_programs_is_no_room(store, monkeypatch, number):
    monkeypatch.setattr(os, "posix_fallocate", raising(number))
    assert store.reserve(MIB) is None
    monkeypatch.undo()
    assert store.stats().used_bytes == 0
    assert store.stats().growths == 0


def test_a_disk_that_fails_is_no_full_disk(store, monkeypatch, folder):
    monkeypatch.setattr(os, "posix_fallocate", raising(errno.EIO))
    with pytest.raises(StoreError, match=rf"{re.escape(str(folder))}' failed taking 256.00 MiB: Input/output error"):
        store.reserve(MIB)


# -- failures at work ----------------------------------------------------------------------------------------------


def test_a_failed_write_is_raised_in_the_wait(store, lane, monkeypatch, folder):
    block = store.reserve(5 * MIB)
    monkeypatch.setattr(os, "pwrite", raising(errno.EIO))
    landed = store.write(block, data_of(5 * MIB), lane)
    with pytest.raises(StoreError, match=rf"{re.escape(str(folder))}' failed writing .*: Input/output error"):
        CpuDevice().wait(None, landed, Wait.LANDED)


def test_a_disk_full_at_a_write_raises_with_advice(store, lane, monkeypatch, folder):
    block = store.reserve(MIB)
    monkeypatch.setattr(os, "pwrite", raising(errno.ENOSPC))
    with pytest.raises(
        StoreError, match=rf"{re.escape(str(folder))}' failed writing .*No space left.*Free some space in the folder"
    ):
        store.write(block, data_of(MIB), lane).result()


def test_a_failed_read_is_raised_and_can_be_repeated(store, lane, monkeypatch):
    data = data_of(5 * MIB)
    block = store.reserve(5 * MIB)
    store.write(block, data, lane).result()
    back = torch.empty_like(data)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", raising(errno.EIO))
        with pytest.raises(StoreError, match="failed reading"):
            store.read(block, back, lane).result()
    store.read(block, back, lane).result()
    assert torch.equal(back, data)


def test_a_block_never_written_is_not_read(store, lane, monkeypatch):
    block = store.reserve(MIB)
    monkeypatch.setattr(os, "pwrite", raising(errno.EIO))
    store.write(block, data_of(MIB), lane)
    with pytest.raises(StoreError, match="failed writing"):
        store.read(block, torch.empty(MIB, dtype=torch.uint8), CpuDevice().new_stream("in")).result()


def test_every_part_is_over_when_a_failure_is_raised(store, lane, monkeypatch):
    genuine, calls, slow_began, fast_failed = os.pwrite, [], threading.Event(), threading.Event()
    block = store.reserve(MIB)  # two parts for two threads

    def fail_one(fd, data, offset):
        calls.append(offset)
        if offset == block.start:
            slow_began.wait()
            fast_failed.set()
            raise OSError(errno.EIO, "broken")
        slow_began.set()
        fast_failed.wait()
        written = genuine(fd, data, offset)
        calls.append("over")
        return written

    monkeypatch.setattr(os, "pwrite", fail_one)
    with pytest.raises(StoreError, match="broken"):
        store.write(block, data_of(MIB), lane).result()
    assert calls[-1] == "over"


def test_a_read_waits_for_the_write_of_its_block(store):
    device, gate = CpuDevice(), threading.Event()
    outbound, inbound = device.new_stream("out"), device.new_stream("in")
    data = data_of(MIB)
    block = store.reserve(MIB)
    device.submit(outbound, gate.wait)
    store.write(block, data, outbound)
    back = torch.zeros_like(data)
    arrived = store.read(block, back, inbound)
    assert not arrived.is_done()
    gate.set()
    arrived.result()
    assert torch.equal(back, data)


def test_queued_work_holds_the_memory_of_its_parcel(store):
    device, gate = CpuDevice(), threading.Event()
    outbound = device.new_stream("out")
    src = data_of(MIB)
    is_freed = threading.Event()
    weakref.finalize(src.untyped_storage(), is_freed.set).atexit = False
    block = store.reserve(MIB)
    device.submit(outbound, gate.wait)
    landed = store.write(block, src, outbound)
    del src
    assert not is_freed.is_set()
    gate.set()
    landed.result()
    assert is_freed.wait()


# -- the end -------------------------------------------------------------------------------------------------------


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"ebbtide-{name}")]


@pytest.mark.parametrize("make_device", [CpuDevice, LateDevice])
def test_the_threads_end_with_close(folder, make_device):
    device = make_device()
    store = DiskStore(device, folder, threads=2)
    before = threads_of("disk-")
    stream = device.new_stream("lane")
    block = store.reserve(MIB)
    store.write(block, data_of(MIB), stream).result()
    store.read(block, torch.empty(MIB, dtype=torch.uint8), stream).result()
    mine = set(threads_of("disk-")) - set(before)
    assert len(mine) >= 4
    assert all(thread.daemon for thread in mine)
    store.close()
    for thread in mine:
        thread.join()
    assert not any(thread.is_alive() for thread in mine)


def test_parcels_of_a_closed_store_are_unreadable(store, lane, folder):
    block = store.reserve(MIB)
    store.write(block, data_of(MIB), lane).result()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.read(block, torch.empty(MIB, dtype=torch.uint8), lane).result()
    with pytest.raises(StoreError, match="closed"):
        store.write(block, data_of(MIB), lane).result()
    with pytest.raises(StoreError, match=rf"{re.escape(str(folder))}' is closed"):
        store.reserve(256 * MIB)


def test_work_under_way_ends_with_an_error_when_the_store_is_closed(store, monkeypatch):
    device, began, gate = CpuDevice(), threading.Event(), threading.Event()
    genuine = os.pwrite

    def pause(fd, data, offset):
        began.set()
        gate.wait()
        return genuine(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pause)
    landed = store.write(store.reserve(20 * MIB), data_of(20 * MIB), device.new_stream("out"))
    began.wait()
    store.close()
    gate.set()
    with pytest.raises(StoreError, match="is closed"):
        landed.result()


# -- the memory of an accelerator ----------------------------------------------------------------------------------


@pytest.fixture
def late(folder):
    """A store of a device with copies that run at a wait."""
    device = LateDevice()
    store = DiskStore(device, folder, threads=2)
    yield SimpleNamespace(device=device, store=store, out=device.new_stream("out"), back=device.new_stream("in"))
    store.close()
    assert device.faults == []


def test_landed_means_in_the_file(late):
    data = data_of(9 * MIB + 1)
    block = late.store.reserve(data.numel())
    late.store.write(block, data.clone(), late.out).result()
    found = memoryview(mmap.mmap(-1, 10 * MIB))
    late.store._file.read(found, block.start)
    assert torch.equal(torch.frombuffer(found, dtype=torch.uint8)[: data.numel()], data)


def test_copies_wait_for_the_waits_of_the_engines_stream(late):
    ran = []
    late.out.put(lambda: ran.append("ready"))
    block = late.store.reserve(10)
    data = data_of(10)
    late.store.write(block, data, late.out).result()
    assert ran == ["ready"]
    assert late.device.waits == [("disk-outbound", Wait.READY)]
    late.back.put(lambda: ran.append("room"))
    dst = torch.zeros(10, dtype=torch.uint8)
    late.store.read(block, dst, late.back).result().synchronize()
    assert ran == ["ready", "room"]
    assert late.device.waits[1:] == [("disk-inbound", Wait.ROOM)]
    assert torch.equal(dst, data)


def test_copies_do_not_wait_for_later_work(late):
    ran, gate = [], threading.Event()
    late.store._outbound._host.submit(gate.wait)
    landed = late.store.write(late.store.reserve(MIB), data_of(MIB), late.out)
    late.out.put(lambda: ran.append("a wait of the next parcel"))
    gate.set()
    landed.result()
    assert ran == []


def test_a_buffer_is_refilled_only_after_the_last_copy(late):
    data = data_of(40 * MIB + 9)  # more parts than buffers
    block = late.store.reserve(data.numel())
    late.store.write(block, data, late.out).result()
    dst = torch.zeros_like(data)
    late.store.read(block, dst, late.back).result().synchronize()
    assert torch.equal(dst, data)


def test_memory_lives_until_the_last_copy_has_run(late):
    data = data_of(MIB)
    block = late.store.reserve(MIB)
    late.store.write(block, data, late.out).result()
    dst = torch.zeros(MIB, dtype=torch.uint8)
    is_freed = threading.Event()
    weakref.finalize(dst.untyped_storage(), is_freed.set).atexit = False
    with late.device.gate:  # no copy runs
        arrived = late.store.read(block, dst, late.back)
        del dst
        arrived.result()
        assert not is_freed.is_set()
    assert is_freed.wait()


def test_memory_of_a_failed_read_lives_until_the_copies_have_run(late, monkeypatch):
    block = late.store.reserve(MIB)  # two parts
    late.store.write(block, data_of(MIB), late.out).result()
    dst = torch.zeros(MIB, dtype=torch.uint8)
    is_freed = threading.Event()
    weakref.finalize(dst.untyped_storage(), is_freed.set).atexit = False
    genuine = os.preadv

    def fail_one(fd, room, offset):
        if offset == block.start:
            raise OSError(errno.EIO, "broken")
        return genuine(fd, room, offset)

    monkeypatch.setattr(os, "preadv", fail_one)
    with late.device.gate:
        arrived = late.store.read(block, dst, late.back)
        with pytest.raises(StoreError, match="broken"):
            arrived.result()
    del dst, arrived
    block.extent.reader = None
    gc.collect()
    assert is_freed.wait()


def test_on_an_accelerator_room_is_reused_behind_its_last_reader(late):
    first, second = data_of(MIB, 1), data_of(MIB, 2)
    block = late.store.reserve(MIB)
    late.store.write(block, first, late.out).result()
    gate = threading.Event()
    late.store._inbound._host.submit(gate.wait)  # the read is as late as possible
    dst = torch.zeros_like(first)
    arrived = late.store.read(block, dst, late.back)
    late.store.give_back(block)
    reused = late.store.reserve(MIB)
    landed = late.store.write(reused, second, late.out)
    assert reused.start == block.start
    assert not landed.is_done()
    gate.set()
    arrived.result().synchronize()
    landed.result()
    assert torch.equal(dst, first)


def test_a_failed_write_is_raised_on_an_accelerator_too(late, monkeypatch):
    block = late.store.reserve(9 * MIB)
    monkeypatch.setattr(os, "pwrite", raising(errno.EIO))
    landed = late.store.write(block, data_of(9 * MIB), late.out)
    with pytest.raises(StoreError, match="failed writing"):
        late.device.wait(late.device.current_stream(), landed, Wait.LANDED)


def test_buffers_are_aligned_for_the_disk(late):
    late.store.write(late.store.reserve(9 * MIB), data_of(9 * MIB), late.out).result()
    buffers = [worker._staging._memory for worker in late.store._outbound.workers._workers]
    assert [buffer.data_ptr() % 4096 for buffer in buffers] == [0, 0]
