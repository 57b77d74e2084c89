"""Limits of host memory: free memory, control groups and the user's setting."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ebbtide._devices.cpu import CpuDevice
from ebbtide._errors import ConfigError
from ebbtide._stores import _limits
from ebbtide._stores._limits import HostMemoryLimit, cgroup_free_bytes, default_host_limit_bytes
from ebbtide._stores.host import HostStore
from ebbtide._utils.sizes import GIB, MIB


@pytest.fixture
def group(tmp_path):
    """Writes the files of a control group."""

    def write(path, **files):
        folder = tmp_path / "cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    (tmp_path / "cgroup").mkdir()
    return write


@pytest.fixture
def free_bytes(tmp_path):
    def read(membership):
        (tmp_path / "membership").write_text(membership)
        return cgroup_free_bytes(tmp_path / "cgroup", tmp_path / "membership")

    return read


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cgroup_free_bytes(tmp_path, tmp_path / "no-such-file") is None


def test_a_group_without_a_limit_is_none(group, free_bytes):
    group("job", memory__max="max", memory__current=5)
    assert free_bytes("0::/job\n") is None


def test_version_2_leaves_limit_less_use(group, free_bytes):
    group("job", memory__max=10 * GIB, memory__current=4 * GIB)
    assert free_bytes("0::/job\n") == 6 * GIB


def test_version_1_leaves_limit_less_use(group, free_bytes):
    group("memory/job", memory__limit_in_bytes=10 * GIB, memory__usage_in_bytes=GIB)
    assert free_bytes("5:cpu,cpuacct:/other\n4:memory:/job\n") == 9 * GIB


def test_the_page_cache_counts_as_free(group, free_bytes):
    stat = f"anon 7\ninactive_file {MIB}\nactive_file {2 * MIB}"
    group("job", memory__max=10 * MIB, memory__current=8 * MIB, memory__stat=stat)
    assert free_bytes("0::/job\n") == 5 * MIB


def test_the_tightest_of_the_parents_counts(group, free_bytes):
    group("user", memory__max=3 * GIB, memory__current=GIB)
    group("user/job", memory__max=10 * GIB, memory__current=GIB)
    group("user/job/step", memory__max="max", memory__current=GIB)
    assert free_bytes("0::/user/job/step\n") == 2 * GIB


def test_in_a_container_the_own_group_is_the_root(group, free_bytes):
    group("", memory__max=4 * GIB, memory__current=GIB)
    assert free_bytes("0::/not/visible/here\n") == 3 * GIB


def test_over_its_limit_nothing_is_left(group, free_bytes):
    group("job", memory__max=GIB, memory__current=2 * GIB)
    assert free_bytes("0::/job\n") == 0


LAUNCHERS = {
    "LOCAL_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "MPI_LOCALNRANKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4,8(x16),2",
}


@pytest.fixture
def machine(monkeypatch):
    """A machine with 100 GiB free and no control groups."""
    monkeypatch.setattr(_limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    monkeypatch.setattr(_limits, "cgroup_free_bytes", lambda root, membership: None)
    monkeypatch.delenv("EBBTIDE_HOST_LIMIT", raising=False)
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_most_of_free_memory_is_taken(machine):
    assert default_host_limit_bytes() == 80 * GIB


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_processes_of_a_host_share(machine, name):
    machine.setenv(name, LAUNCHERS[name])
    assert default_host_limit_bytes() == 10 * GIB


def test_torchrun_knows_better_than_the_launcher_around(machine):
    machine.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x4)")
    machine.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_host_limit_bytes() == 10 * GIB


@pytest.mark.parametrize(("devices", "processes"), [(0, 16), (1, 16), (8, 8), (64, 16)])
def test_ranks_without_a_launcher_share(machine, devices, processes):
    """Of sixteen ranks, one host has as many as accelerators; a rank may see its own accelerator only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    machine.setattr(torch.accelerator, "device_count", lambda: devices)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    try:
        assert default_host_limit_bytes() == 80 * GIB // processes
    finally:
        dist.destroy_process_group()


def test_the_control_group_counts_when_it_is_tighter(machine):
    machine.setattr(_limits, "cgroup_free_bytes", lambda root, membership: 10 * GIB)
    assert default_host_limit_bytes() == 8 * GIB


def test_the_limit_is_never_zero(machine):
    machine.setattr(_limits, "cgroup_free_bytes", lambda root, membership: 0)
    assert default_host_limit_bytes() == 1


def test_the_users_limit_is_not_divided(machine):
    machine.setenv("EBBTIDE_HOST_LIMIT", "64GiB")
    machine.setenv("LOCAL_WORLD_SIZE", "8")
    assert default_host_limit_bytes() == 64 * GIB


def test_an_invalid_limit_is_refused(machine):
    machine.setenv("EBBTIDE_HOST_LIMIT", "much")
    with pytest.raises(ConfigError, match="EBBTIDE_HOST_LIMIT='much'"):
        default_host_limit_bytes()


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
@pytest.mark.parametrize("value", ["0", "two"])
def test_an_invalid_number_of_processes_is_refused(machine, name, value):
    machine.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        default_host_limit_bytes()


def test_stores_of_one_setting_share_a_limit():
    limit = HostMemoryLimit(3 * 2**20)
    one, other = (HostStore(CpuDevice(), limit, smallest_slab_bytes=2**20) for _ in range(2))
    assert one.reserve(2**20) is not None
    assert other.reserve(2**20) is not None
    assert one.reserve(2**20) is not None
    assert other.reserve(2**20) is None
    one.close()
    assert other.reserve(2**20) is not None


def test_a_refusal_by_the_system_lowers_the_limit():
    class Stingy(CpuDevice):
        asked = 0

        def host_bytes(self, nbytes):
            Stingy.asked += 1
            raise MemoryError("out of pinned memory")

    store = HostStore(Stingy(), 2**30, smallest_slab_bytes=2**20)
    assert store.reserve(5) is None
    asked = Stingy.asked
    assert store.reserve(2**20) is None
    assert Stingy.asked == asked > 0


def test_another_error_is_no_refusal():
    class Broken(CpuDevice):
        def host_bytes(self, nbytes):
            raise RuntimeError("only dense tensors can be pinned")

    store = HostStore(Broken(), 2**30)
    with pytest.raises(RuntimeError, match="only dense"):
        store.reserve(5)


def test_a_machine_without_memory_raises():
    with pytest.raises(MemoryError, match="allocate"):
        CpuDevice().host_bytes(2**60)
