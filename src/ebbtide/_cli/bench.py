"""`ebbtide bench`: copies, pinning and host costs of this machine, and a toy model in three trainings."""

import dataclasses
import os
import platform
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Column, Table

from ebbtide._cli._output import console_for, write_json
from ebbtide._cli.demo import FOR_ACCELERATOR, SMALL, RunResult, Task, run_worker
from ebbtide._errors import ConfigError
from ebbtide._utils import env
from ebbtide._utils.packages import installed_version
from ebbtide._utils.sizes import format_bytes

if TYPE_CHECKING:
    import torch

    from ebbtide._cli._machine import CopyRates, HostCosts


@dataclasses.dataclass(frozen=True)
class Figures:
    """All figures of a machine.

    Attributes:
        device: that trains, and where activations wait.
        link: between device and store; None: the store has no room.
        pin_s_per_gib: None: refused, or nothing is pinned because the CPU trains.
        task: the toy model.
        runs: of the toy, by mode.
    """

    device: str
    link: "CopyRates | None"
    pin_s_per_gib: float | None
    costs: "HostCosts"
    task: Task
    runs: dict[str, RunResult]

    @property
    def has_same_bits(self) -> bool:
        return len({(tuple(run.loss_bits), run.parameters_sha256) for run in self.runs.values()}) == 1


def bench(
    *,
    steps: int | None = None,
    disk_dir: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Measure this machine: copies, pinning, host time of a saved tensor, and a toy model in three trainings.

    The toy is a small transformer, trained plain, with checkpointed blocks, and with ebbtide: on an accelerator within
    the peak of the checkpointed training, on the CPU with all activations on disk. Figures of a CPU say nothing about
    a GPU. The exit status is 1 if the trainings differ in a single bit.

    Args:
        steps: of each training; the later half is timed. Default: 40, or 6 on the CPU.
        disk_dir: folder where activations wait if the CPU trains. Default: EBBTIDE_DISK_FOLDER, or the system's
            temporary folder.
        as_json: print JSON, in bytes and seconds.
    """
    if steps is not None and steps < 2:
        raise ConfigError(f"--steps {steps}: expected 2 or more")
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    with console_for(as_json=True).status("Measuring ...") as status:

        def run(task: Task, mode: str) -> RunResult:
            return run_worker(task, mode, lambda number: status.update(f"Training {mode}, step {number} ..."))

        if accelerator is None:
            figures = _on_cpu(run, steps or 6, disk_dir or Path(env.disk_folder()))
        else:
            figures = _on_accelerator(run, torch.device(accelerator.type, 0), steps or 40)
    if as_json:
        write_json(_as_dict(figures))
    else:
        _show(figures)
    return 0 if figures.has_same_bits else 1


def _on_cpu(run: Callable[[Task, str], RunResult], steps: int, folder: Path) -> Figures:
    import torch

    from ebbtide._cli._machine import host_costs, link_rates
    from ebbtide._devices.cpu import CpuDevice
    from ebbtide._stores import DiskStore

    ram = CpuDevice()
    link = link_rates(ram, DiskStore(ram, folder))
    # One thread: a second one waits where another program has the core, and takes many times as long.
    task = Task("cpu", f"disk:{folder}", steps, seed=0, threads=1, size=SMALL)
    runs = {mode: run(task, mode) for mode in ("plain", "checkpointed", "offloaded")}
    return Figures("CPU", link, None, host_costs(torch.device("cpu")), task, runs)


def _on_accelerator(run: Callable[[Task, str], RunResult], device: "torch.device", steps: int) -> Figures:
    from ebbtide._cli._machine import host_costs, measure_device

    measured = measure_device(device)
    task = Task(device.type, "host", steps, seed=0, threads=min(8, os.cpu_count() or 1), size=FOR_ACCELERATOR)
    runs = {mode: run(task, mode) for mode in ("plain", "checkpointed")}
    task = dataclasses.replace(task, budget_bytes=runs["checkpointed"].peak_bytes)
    runs["planned"] = run(task, "planned")
    return Figures(measured.product, measured.link, measured.pin_s_per_gib, host_costs(device), task, runs)


def _settled_s(run: RunResult) -> float:
    """Seconds of a step, after plans are made and corrected."""
    return median(run.step_s[len(run.step_s) // 2 :])


def _as_dict(figures: Figures) -> dict[str, Any]:
    import torch

    return {
        "ebbtide": installed_version("ebbtide"),
        "machine": {"system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__},
        "device": figures.device,
        "link": None if figures.link is None else figures.link.figures(),
        "pin_s_per_gib": figures.pin_s_per_gib,
        "host_s_per_saved_tensor": figures.costs._asdict(),
        "task": dataclasses.asdict(figures.task),
        "runs": {
            mode: {"step_s": _settled_s(run), "peak_bytes": run.peak_bytes, "above_base_bytes": run.above_base_bytes}
            for mode, run in figures.runs.items()
        },
        "has_same_bits": figures.has_same_bits,
    }


def _show(figures: Figures) -> None:
    console, task = console_for(), figures.task
    size, plain_s = task.size, _settled_s(figures.runs["plain"])

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    pinning = "" if figures.pin_s_per_gib is None else f"; {figures.pin_s_per_gib:.2f} s to pin 1 GiB"
    say(f"{figures.device} -> {task.store}: {figures.link or 'no room in the store'}{pinning}.")
    costs = ", ".join(f"{seconds * 1e6:.1f} us {name}" for name, seconds in figures.costs._asdict().items())
    say(f"Host time for each saved tensor, forward and backward: {costs}.")
    table = Table(
        "training",
        *(Column(name, justify="right") for name in ("step", "x plain", "peak", "above the base")),
        title=f"Transformer, {size.layers} blocks of width {size.width}, {size.batch} x {size.context} bytes a step",
        title_justify="left",
        title_style="bold",
    )
    budget = "" if task.budget_bytes is None else f" within {format_bytes(task.budget_bytes)}"
    names = {"planned": f"ebbtide{budget}", "offloaded": "ebbtide, all on disk"}
    for mode, run in figures.runs.items():
        step_s = _settled_s(run)
        peaks = map(format_bytes, (run.peak_bytes, run.above_base_bytes))
        table.add_row(names.get(mode, mode), f"{step_s * 1e3:.1f} ms", f"{step_s / plain_s:.2f}", *peaks)
    console.print(table)
    say("All losses and parameters are equal to the bit." if figures.has_same_bits else "FAILED: the bits differ.")
    if figures.device == "CPU":
        say("There is no accelerator: figures of a CPU say nothing about a GPU.")
