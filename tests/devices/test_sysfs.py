"""Files of Linux about a GPU: NUMA nodes and PCIe lanes."""

import os
from types import SimpleNamespace

import pytest
import torch

from ebbtide._devices import sysfs

GPU = torch.device("cuda", 0)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of a GPU, in a system of one."""
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(sysfs, "Path", lambda name: tmp_path / name.removeprefix("/"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 4, 6})
    folder = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:1b:00.0"
    folder.mkdir(parents=True)
    return folder


def test_a_system_without_such_files_tells_nothing(folder):
    assert (sysfs.cpus_near(GPU), sysfs.node_of(GPU), sysfs.lanes_of(GPU)) == (set(), None, None)


def test_another_back_end_tells_nothing(folder):
    (folder / "numa_node").write_text("1\n")
    assert sysfs.node_of(torch.device("xpu", 0)) is None


def test_cpus_near_a_gpu_are_those_of_its_node_that_the_process_may_use(folder):
    (folder / "local_cpulist").write_text("0-1,4\n")
    assert sysfs.cpus_near(GPU) == {1, 4}


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None)])
def test_the_node_of_a_gpu(folder, text, node):
    (folder / "numa_node").write_text(text)
    assert sysfs.node_of(GPU) == node


@pytest.mark.parametrize(("used", "lanes"), [("8", (8, 16)), ("0", None), ("Unknown", None)])
def test_lanes_in_use_and_of_the_gpu(folder, used, lanes):
    (folder / "current_link_width").write_text(f"{used}\n")
    (folder / "max_link_width").write_text("16\n")
    assert sysfs.lanes_of(GPU) == lanes


def test_nodes_with_cpus_that_the_process_may_use(folder, monkeypatch, tmp_path):
    for node, cpus in ((0, "0-2"), (1, "3,5"), (2, "6-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(sysfs, "_NODES", tmp_path)
    assert sysfs.nodes_of_process() == [0, 2]
