"""`ebbtide doctor`: findings about a machine, with a verdict on each and advice."""

import enum
import importlib.metadata
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.table import Table
from rich.text import Text

from ebbtide._cli._output import console_for, write_json
from ebbtide._errors import ConfigError, StoreError
from ebbtide._utils import env
from ebbtide._utils.packages import TORCH_RELEASES, installed_version
from ebbtide._utils.sizes import MIB, format_bytes

if TYPE_CHECKING:
    import torch

    from ebbtide._cli._machine import CopyRates, MeasuredDevice
    from ebbtide._devices.sysfs import Lanes


class Level(str, enum.Enum):
    """Verdict on a finding."""

    OK = "ok"
    WARNING = "warning"
    """ebbtide works, and could work better."""
    PROBLEM = "problem"
    """A part of ebbtide does not work."""


@dataclass(frozen=True)
class Finding:
    """A finding about one part of the machine.

    Attributes:
        subject: the part, in a word or two.
        found: in words.
        verdict: ok, warning or problem.
        advice: a sentence about the remedy, for any verdict but OK.
        figures: numbers behind the words, in bytes and seconds.
    """

    subject: str
    found: str
    verdict: Level = Level.OK
    advice: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])


def doctor(*, disk_dir: Path | None = None, as_json: Annotated[bool, tyro.conf.arg(name="json")] = False) -> int:
    """Say what this machine offers to ebbtide and what to fix: devices, link, host memory, disk, torch, packages.

    Takes some seconds, 1 GiB of host memory at most, and 256 MiB of the disk. The exit status is 1 after a problem, and
    0 after a warning.

    Args:
        disk_dir: folder to look at for parcels on disk. Default: EBBTIDE_DISK_FOLDER, or the system's temporary folder.
        as_json: print JSON: words, verdicts, and figures in bytes and seconds.
    """
    with console_for(as_json=True).status("Measuring ..."):
        findings = list(examine(disk_dir))
    worst = [verdict for verdict in Level if any(each.verdict is verdict for each in findings)][-1]
    if as_json:
        write_json({"ebbtide": installed_version("ebbtide"), "verdict": worst, "findings": list(map(asdict, findings))})
    else:
        console = console_for()
        console.print(_table(findings))
        counts = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Level}
        console.print(", ".join(f"{verdict.value}: {counts[verdict]}" for verdict in Level), highlight=False)
    return 1 if worst is Level.PROBLEM else 0


def examine(disk_dir: Path | None) -> Iterator[Finding]:
    """All findings. `disk_dir`: as of `doctor`."""
    yield Finding("Python", platform.python_version())
    release = torch_release()
    yield release
    yield packages()
    if release.verdict is Level.PROBLEM:
        return  # the other parts of ebbtide might not even import
    import torch

    from ebbtide._cli._machine import MeasuredDevice

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    devices = [] if accelerator is None else [torch.device(accelerator.type, index) for index in range(count)]
    if not devices:
        yield no_accelerator()
    measured: list[MeasuredDevice] = []
    for found in map(measured_or_not, devices):
        if isinstance(found, MeasuredDevice):
            measured.append(found)
            yield from on_device(found)
        else:
            yield found
    yield host_memory(max((each.total_bytes for each in measured), default=0))
    yield locked_memory(measured)
    yield disk(disk_dir or Path(env.disk_folder()), is_needed=not devices or disk_dir is not None)


# -- software ----------------------------------------------------------------------------------------------------------


def torch_release() -> Finding:
    import torch

    first, last = ([int(number) for number in text.split(".")] for text in TORCH_RELEASES)
    own = [int(number) for number in torch.__version__.split(".")[:2]]
    found = f"{torch.__version__}; supported: {' to '.join(TORCH_RELEASES)}"
    if own < first:
        advice = f"Install torch {TORCH_RELEASES[0]} or later; the rest cannot be examined before."
        return Finding("torch", found, Level.PROBLEM, advice)
    if own > last:
        advice = "ebbtide was not tested with this release: compare a few losses with those of EBBTIDE_DISABLE=1."
        return Finding("torch", found, Level.WARNING, advice)
    return Finding("torch", found)


def packages() -> Finding:
    """Packages that ebbtide has integrations for, and whether they are as new as the integrations need."""
    from torch.torch_version import TorchVersion  # compares versions of any package

    if installed_version("ebbtide") is None:
        advice = "Install ebbtide (pip install .): pip then knows which packages fit."
        return Finding("packages", "ebbtide itself is not installed", Level.WARNING, advice)
    found, lines = dict[str, str](), set[str]()
    for requirement in importlib.metadata.requires("ebbtide") or ():
        match = re.match(r"([\w-]+)>=([\w.]+);.*extra == '(\w+)'", requirement)
        if match is None or match[3] in ("dev", "docs"):
            continue
        name, least, extra = match.groups()
        version = installed_version(name)
        if version is not None:
            found[name] = version
            if TorchVersion(version) < least:
                lines.add(f"pip install --upgrade 'ebbtide[{extra}]'")
    words = ", ".join(f"{name} {version}" for name, version in sorted(found.items())) or "no optional ones"
    if lines:
        return Finding("packages", words, Level.WARNING, f"Some are too old for ebbtide: {'; '.join(sorted(lines))}.")
    return Finding("packages", words)


# -- devices -----------------------------------------------------------------------------------------------------------


def no_accelerator() -> Finding:
    import torch

    built_for = torch.accelerator.current_accelerator()
    if built_for is None:
        found, advice = "this torch is built for the CPU", "install a torch that is built for it"
    else:
        found = f"this torch is built for {built_for.type} and finds no device"
        advice = "see whether its driver lists it (nvidia-smi, rocm-smi, xpu-smi), and whether this process may see it"
    words = f"no accelerator: {found}. On the CPU, activations move from RAM to disk"
    return Finding("device", words, Level.WARNING, f"If this machine has a GPU, {advice}.")


def measured_or_not(device: "torch.device") -> "MeasuredDevice | Finding":
    """The figures of an accelerator, or the error of its driver."""
    from ebbtide._cli._machine import measure_device

    try:
        return measure_device(device)
    except RuntimeError as error:  # any driver's
        advice = "See which programs use the device and whether its driver works, or hide it (CUDA_VISIBLE_DEVICES)."
        return Finding(str(device), f"cannot be used: {str(error).splitlines()[0]}", Level.PROBLEM, advice)


def on_device(device: "MeasuredDevice") -> Iterator[Finding]:
    name = device.name
    words = f"{device.product}, {format_bytes(device.total_bytes)}, of which {format_bytes(device.free_bytes)} free"
    yield Finding(name, words, figures={"total_bytes": device.total_bytes, "free_bytes": device.free_bytes})
    yield _link(f"{name} link", device.link, device.lanes)
    yield _pinning(f"{name} pinning", device.pin_s_per_gib)
    yield numa(f"{name} NUMA", device.node)


def _link(subject: str, link: "CopyRates | None", lanes: "Lanes | None") -> Finding:
    if link is None:
        return Finding(
            subject,
            "not measured",
            Level.PROBLEM,
            "Host memory takes no copies: see pinning, host memory and memlock below.",
        )
    found = f"{link}" if lanes is None else f"{link}; PCIe x{lanes.used}"
    if lanes is not None and lanes.used < lanes.most:
        advice = f"The device has x{lanes.most}: move it to a slot with as many lanes, or seat it anew."
        return Finding(subject, found, Level.WARNING, advice, link.figures())
    return Finding(subject, found, figures=link.figures())


def _pinning(subject: str, s_per_gib: float | None) -> Finding:
    from ebbtide._devices.pinned import has_huge_pages

    figures = {"s_per_gib": s_per_gib}
    if s_per_gib is None:
        advice = "Without pinned memory nothing moves: raise the limits of memory below."
        return Finding(subject, "the system refuses to pin host memory", Level.PROBLEM, advice, figures)
    found = f"{s_per_gib:.2f} s per GiB of host memory"
    if not has_huge_pages():
        advice = (
            "Without huge pages pinning takes several times as long: write madvise to "
            "/sys/kernel/mm/transparent_hugepage/enabled."
        )
        return Finding(subject, f"{found}, without huge pages", Level.WARNING, advice, figures)
    return Finding(subject, found, figures=figures)


def numa(subject: str, node: int | None) -> Finding:
    from ebbtide._devices.sysfs import nodes_of_process

    own = nodes_of_process()
    where = f"this process runs on node {', '.join(map(str, own))}" if own else "the node of this process is unknown"
    if node is None:
        return Finding(subject, f"the system does not tell the device's node; {where}")
    found = f"the device is on node {node}; {where}"
    if own and node not in own:
        advice = f"Host memory is far from the device, and copies are slower: start with numactl --cpunodebind={node}."
        return Finding(subject, found, Level.WARNING, advice)
    return Finding(subject, found)


# -- host and disk -----------------------------------------------------------------------------------------------------


def host_memory(device_bytes: int) -> Finding:
    """`device_bytes`: memory of the largest accelerator, 0 without one."""
    from ebbtide._stores._limits import default_host_limit_bytes, free_memory

    (free, group), room_bytes = free_memory(), default_host_limit_bytes()
    is_grouped = group is not None and group < free  # "no limit" is a huge number in version 1
    figures = {"free_bytes": free, "group_bytes": group if is_grouped else None, "room_bytes": room_bytes}
    limit = f"a control group leaves {format_bytes(group or 0)}" if is_grouped else "no control group is tighter"
    found = f"{format_bytes(free)} free, {limit}; ebbtide takes up to {format_bytes(room_bytes)} per process"
    if room_bytes >= max(device_bytes, MIB):
        return Finding("host memory", found, figures=figures)
    if env.host_limit_text() is not None:
        advice = "raise EBBTIDE_HOST_LIMIT"
    elif is_grouped:
        advice = "raise the memory limit of the container or job (docker run --memory, sbatch --mem)"
    else:
        advice = "end other programs, start fewer processes, or let activations wait on disk (store='disk')"
    if room_bytes < MIB:
        return Finding("host memory", found, Level.PROBLEM, f"Nothing can wait there: {advice}.", figures)
    more = f"The device has {format_bytes(device_bytes)}. If a report says 'the store is at its limit', {advice}."
    return Finding("host memory", found, Level.WARNING, more, figures)


def locked_memory(measured: "Sequence[MeasuredDevice]") -> Finding:
    """The limit of locked memory, which some drivers count pinned memory against."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", "no limit", figures={"limit_bytes": None})
    found, figures = f"{format_bytes(limit)} for each process", {"limit_bytes": limit}
    if not measured:
        return Finding("memlock", f"{found}; without an accelerator nothing is pinned", figures=figures)
    if all(each.pinned_bytes > limit for each in measured):
        return Finding("memlock", f"{found}, which the driver does not count pinned memory against", figures=figures)
    advice = "Raise it: ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity."
    verdict = Level.WARNING if all(each.pinned_bytes for each in measured) else Level.PROBLEM
    return Finding("memlock", found, verdict, advice, figures)


def disk(folder: Path, is_needed: bool) -> Finding:
    """`is_needed`: activations will wait there unless the user chooses another store."""
    from ebbtide._cli._machine import link_rates
    from ebbtide._devices.cpu import CpuDevice
    from ebbtide._stores.disk import DiskStore

    bad = Level.PROBLEM if is_needed else Level.WARNING
    ram = CpuDevice()
    try:
        store = DiskStore(ram, folder)
        rates = link_rates(ram, store)
    except (ConfigError, StoreError) as error:
        return Finding("disk", f"{folder} cannot be used", bad, f"{error}.")
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {format_bytes(free)} free"
    if rates is None:
        advice = "No parcel fits beside the room left to other programs: free some, or set EBBTIDE_DISK_FOLDER."
        return Finding("disk", found, bad, advice, {"free_bytes": free})
    cached = "" if store.is_direct else ", through the page cache"
    return Finding("disk", f"{found}; {rates}{cached}", figures={"free_bytes": free, **rates.figures()})


def _table(findings: Sequence[Finding]) -> Table:
    styles = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
    table = Table.grid(padding=(0, 2, 0, 0))
    for each in findings:
        words = Text(each.found)
        if each.advice:
            words.append(f"\n{each.advice}", styles[each.verdict])
        table.add_row(Text(each.verdict.value, styles[each.verdict]), each.subject, words)
    return table
