"""`ebbtide doctor`: verdicts and advice for machines of all kinds, exit status, JSON."""

import json
import resource
from dataclasses import replace

import pytest
import torch

from ebbtide._cli import _machine, doctor, main
from ebbtide._cli._machine import CopyRates, MeasuredDevice
from ebbtide._cli.doctor import Level
from ebbtide._devices import pinned, sysfs
from ebbtide._devices.sysfs import Lanes
from ebbtide._stores import _limits, disk
from ebbtide._stores._scratch import ScratchFile
from ebbtide._utils.sizes import GIB, MIB

GPU = MeasuredDevice(
    name="cuda:0",
    product="NVIDIA H200",
    free_bytes=130 * GIB,
    total_bytes=140 * GIB,
    link=CopyRates(55e9, 54e9, 50e9),
    lanes=Lanes(16, 16),
    node=1,
    pinned_bytes=GIB,
    pin_s_per_gib=0.13,
)


@pytest.fixture(autouse=True)
def _a_machine(monkeypatch):
    """With huge pages, 200 GiB free, disks that are disks, two NUMA nodes for the process, and no GPU."""
    monkeypatch.setattr(pinned, "has_huge_pages", lambda: True)
    monkeypatch.setattr(sysfs, "nodes_of_process", lambda: [0, 1])
    monkeypatch.setattr(disk, "_file_system_of", lambda folder: "ext4")
    monkeypatch.setattr(_limits.psutil, "virtual_memory", lambda: type("", (), {"available": 200 * GIB}))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.delenv("EBBTIDE_HOST_LIMIT", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    leave(monkeypatch, None)


def leave(monkeypatch, nbytes):
    """Have control groups leave so much."""
    monkeypatch.setattr(_limits, "cgroup_free_bytes", lambda root, membership: nbytes)


def lock(monkeypatch, nbytes):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (nbytes, nbytes))


def on_gpu(**changes):
    """Findings about a GPU, by subject."""
    return {each.subject: each for each in doctor.on_device(replace(GPU, **changes))}


def run(capsys, *arguments):
    """Exit status and findings of the command, by subject."""
    status = main(["doctor", "--json", *map(str, arguments)])
    result = json.loads(capsys.readouterr().out)
    findings = {each["subject"]: each for each in result["findings"]}
    assert all(each["advice"] for each in findings.values() if each["verdict"] != "ok")
    return status, findings, result


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_has_a_warning_and_figures_of_its_disk(tmp_path, capsys):
    status, findings, result = run(capsys, "--disk-dir", tmp_path)
    assert (status, result["verdict"]) == (0, "warning")
    assert "no accelerator" in findings["device"]["found"]
    assert findings["device"]["verdict"] == "warning"
    assert {"Python", "torch", "packages", "host memory", "memlock", "disk"} <= findings.keys()
    assert findings["disk"]["verdict"] == "ok"
    assert all(rate > 0 for rate in findings["disk"]["figures"].values())
    assert list(tmp_path.iterdir()) == []


def test_text_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ScratchFile, "_spare_bytes", lambda self: 0)
    assert main(["doctor", "--disk-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "problem  disk" in printed
    assert "No parcel fits" in printed
    assert "If this machine has a GPU, install a torch that is built for it." in printed
    assert printed.splitlines()[-1].startswith("ok: ")


def test_every_gpu_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(_machine, "measure_device", lambda device: replace(GPU, name=str(device)))
    _, findings, _ = run(capsys, "--disk-dir", tmp_path)
    assert {"cuda:0 link", "cuda:1 link", "cuda:1 pinning", "cuda:1 NUMA"} <= findings.keys()
    assert findings["cuda:0 link"]["figures"]["duplex_bytes_per_s"] == 50e9
    assert findings["host memory"]["verdict"] == "ok"


# -- software ----------------------------------------------------------------------------------------------------------


def test_an_older_torch_is_a_problem_and_ends_the_search(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    status, findings, _ = run(capsys)
    assert status == 1
    assert findings["torch"]["verdict"] == "problem"
    assert findings.keys() == {"Python", "torch", "packages"}


@pytest.mark.parametrize(("version", "verdict"), [("2.16.0a0+git1", "warning"), ("2.11.0", "ok"), ("2.15.1", "ok")])
def test_a_newer_torch_is_a_warning(monkeypatch, version, verdict):
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.torch_release().verdict.value == verdict


def test_packages_too_old_get_their_pip_line(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", {"ebbtide": "1", "trl": "0.1", "peft": "99.0"}.get)
    found = doctor.packages()
    assert found.found == "peft 99.0, trl 0.1"
    assert found.verdict is Level.WARNING
    assert "pip install --upgrade 'ebbtide[trl]'" in found.advice
    assert "peft" not in found.advice


def test_a_source_tree_knows_no_packages(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    assert doctor.packages().verdict is Level.WARNING


# -- devices -----------------------------------------------------------------------------------------------------------


def test_a_driver_without_a_device_is_named(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    assert "built for cuda and finds no device" in doctor.no_accelerator().found


def test_a_good_gpu_has_no_advice():
    findings = on_gpu()
    assert {each.verdict for each in findings.values()} == {Level.OK}
    assert "55.00 GB/s out, 54.00 back, 50.00 each way at once; PCIe x16" in findings["cuda:0 link"].found
    assert "node 1" in findings["cuda:0 NUMA"].found


@pytest.mark.parametrize(
    ("changes", "subject", "verdict", "advice"),
    [
        ({"lanes": Lanes(8, 16)}, "link", Level.WARNING, "x16"),
        ({"link": None}, "link", Level.PROBLEM, "takes no copies"),
        ({"pinned_bytes": 0, "pin_s_per_gib": None}, "pinning", Level.PROBLEM, "limits of memory"),
        ({"node": 3}, "NUMA", Level.WARNING, "numactl --cpunodebind=3"),
    ],
    ids=["lanes", "no room", "refused", "far"],
)
def test_a_gpu_with_a_fault(changes, subject, verdict, advice):
    findings = on_gpu(**changes)
    found = findings.pop(f"cuda:0 {subject}")
    assert found.verdict is verdict
    assert advice in found.advice
    assert {each.verdict for each in findings.values()} == {Level.OK}


def test_pinning_without_huge_pages_is_slow(monkeypatch):
    monkeypatch.setattr(pinned, "has_huge_pages", lambda: False)
    assert "transparent_hugepage" in on_gpu()["cuda:0 pinning"].advice


def test_a_failing_driver_is_quoted(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: out of memory\nfurther lines")

    monkeypatch.setattr(_machine, "measure_device", fail)
    found = doctor.measured_or_not(torch.device("cuda", 0))
    assert found.verdict is Level.PROBLEM
    assert found.found == "cannot be used: CUDA error: out of memory"


# -- host and disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "verdict", "words"),
    [
        (None, Level.OK, "no control group is tighter"),
        (2**63, Level.OK, "no control group is tighter"),
        (190 * GIB, Level.OK, "a control group leaves 190.00 GiB"),
        (10 * GIB, Level.WARNING, "8.00 GiB per process"),
        (0, Level.PROBLEM, "a control group leaves 0 B"),
    ],
)
def test_a_limit_of_a_control_group(monkeypatch, left, verdict, words):
    leave(monkeypatch, left)
    found = doctor.host_memory(GPU.total_bytes)
    assert found.verdict is verdict
    assert words in found.found
    assert ("limit of the container" in found.advice) == (verdict is not Level.OK)


def test_other_reasons_for_little_host_memory(monkeypatch):
    assert "store='disk'" in doctor.host_memory(1000 * GIB).advice
    monkeypatch.setenv("EBBTIDE_HOST_LIMIT", "2GiB")
    assert "raise EBBTIDE_HOST_LIMIT" in doctor.host_memory(GPU.total_bytes).advice
    assert doctor.host_memory(0).verdict is Level.OK


@pytest.mark.parametrize(
    ("limit", "pinned_bytes", "verdict"),
    [
        (resource.RLIM_INFINITY, GIB, Level.OK),
        (8 * MIB, GIB, Level.OK),
        (2 * GIB, GIB, Level.WARNING),
        (8 * MIB, 0, Level.PROBLEM),
    ],
    ids=["none", "not counted", "not reached", "reached"],
)
def test_a_limit_of_locked_memory(monkeypatch, limit, pinned_bytes, verdict):
    lock(monkeypatch, limit)
    found = doctor.locked_memory([GPU, replace(GPU, pinned_bytes=pinned_bytes)])
    assert found.verdict is verdict
    assert ("ulimit -l unlimited" in found.advice) == (verdict is not Level.OK)


def test_without_a_gpu_nothing_is_pinned(monkeypatch):
    lock(monkeypatch, MIB)
    assert doctor.locked_memory([]).verdict is Level.OK


@pytest.mark.parametrize(("is_needed", "verdict"), [(True, Level.PROBLEM), (False, Level.WARNING)])
def test_a_full_disk(tmp_path, monkeypatch, is_needed, verdict):
    monkeypatch.setattr(ScratchFile, "_spare_bytes", lambda self: 0)
    found = doctor.disk(tmp_path, is_needed)
    assert found.verdict is verdict
    assert "EBBTIDE_DISK_FOLDER" in found.advice


def test_a_folder_in_ram_and_none_at_all(tmp_path, monkeypatch):
    assert "does not exist" in doctor.disk(tmp_path / "nowhere", is_needed=True).advice
    monkeypatch.setattr(disk, "_file_system_of", lambda folder: "tmpfs")
    assert "which is RAM" in doctor.disk(tmp_path, is_needed=True).advice
