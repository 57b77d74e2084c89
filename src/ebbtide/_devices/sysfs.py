"""The NUMA node and the PCIe lanes of a GPU, from files of Linux. Elsewhere nothing is known."""

import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

_NODES = Path("/sys/devices/system/node")


class Lanes(NamedTuple):
    """PCIe lanes of a GPU: in use, and as many as the GPU has."""

    used: int
    most: int


def cpus_near(device: torch.device) -> set[int]:
    """CPUs of the GPU's NUMA node that the process may use; empty if unknown."""
    text = _text_of(device, "local_cpulist")
    return _parse_cpulist(text) & os.sched_getaffinity(0) if text else set()


def node_of(device: torch.device) -> int | None:
    """The GPU's NUMA node; None if unknown."""
    text = _text_of(device, "numa_node")
    return int(text) if text.isdigit() else None  # "-1": a machine with one node, or firmware that does not tell


def nodes_of_process() -> list[int]:
    """NUMA nodes with CPUs that the process may use; empty if unknown."""
    folders = _NODES.glob("node[0-9]*")
    cpus = {int(folder.name[4:]): _parse_cpulist((folder / "cpulist").read_text()) for folder in folders}
    return sorted(node for node, own in cpus.items() if own & os.sched_getaffinity(0))


def lanes_of(device: torch.device) -> Lanes | None:
    """PCIe lanes of the GPU; None if unknown, as in most virtual machines."""
    used, most = (_text_of(device, f"{which}_link_width") for which in ("current", "max"))
    return Lanes(int(used), int(most)) if used.isdigit() and most.isdigit() and int(used) > 0 else None


def _text_of(device: torch.device, name: str) -> str:
    """Text of a file of the GPU; empty without the file."""
    if device.type != "cuda":
        return ""
    gpu = cast(Any, torch.cuda).get_device_properties(device)
    folder = Path(f"/sys/bus/pci/devices/{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    file = folder / name
    return file.read_text().strip() if file.exists() else ""


def _parse_cpulist(text: str) -> set[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}, the kernel's list format."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
