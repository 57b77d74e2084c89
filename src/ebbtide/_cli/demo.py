"""`ebbtide demo`: the same training with and without offloading, side by side."""

import json
import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ebbtide._cli._demo_process import run_worker
from ebbtide._cli._demo_task import FOR_ACCELERATOR, FOR_RAM, SMALL, Mode, Outcome, Task
from ebbtide._cli._demo_verdict import Verdict, judge, verdict_table
from ebbtide._errors import ConfigError
from ebbtide._reports.timeline import Curve, draw_timeline
from ebbtide._stores import DiskStore

_MOST_THREADS = 8


def demo(
    *,
    steps: int = 3,
    folder: Path | None = None,
    out: Path = Path("demo-results"),
    small: bool = False,
    seed: int = 0,
) -> int:
    """Train a small transformer with and without offloading; compare every bit, the peak memory and the time.

    With an accelerator activations wait in host memory. Without one they wait on disk, which takes about a minute and
    3 GiB of memory. The exit status is 1 if a single bit differs, or if the peak above what was in memory before drops
    by less than half of the activations.

    Args:
        steps: training steps of each run.
        folder: where activations wait on disk; on a real disk, not a RAM disk. Default: the results' folder, and
            host memory on a machine with an accelerator.
        out: folder for the results: demo.json and memory.png.
        small: a tiny model, done in seconds.
        seed: of parameters and batches.
    """
    task = _task(steps, folder, out, small, seed)
    console = Console()
    with _progress(console, steps) as progress:
        plain, offloaded = (_run(progress, task.in_mode(mode)) for mode in Mode)
    verdict = judge(plain, offloaded)
    _write_json(out / "demo.json", task, plain, offloaded, verdict)
    _draw(out / "memory.png", task, plain, offloaded)
    check = "\N{CHECK MARK}" if console.encoding.lower().startswith("utf") else "ok:"
    console.print(verdict_table(plain, offloaded, verdict, title=_title(task), check=check))
    console.print(str(verdict), style="bold red" if verdict.faults else "bold green", highlight=False)
    console.print(f"Details: {out / 'demo.json'}; memory over time: {out / 'memory.png'}", highlight=False)
    return verdict.exit_status


def _task(steps: int, folder: Path | None, out: Path, small: bool, seed: int) -> Task:
    if steps < 1:
        raise ConfigError(f"--steps {steps}: expected 1 or more")
    _make_folder(out, "--out")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device, store, size = "cpu", _disk(folder or out), FOR_RAM
    else:
        device, store, size = accelerator.type, _disk(folder) if folder else "host", FOR_ACCELERATOR
    return Task(
        mode=Mode.PLAIN,
        device=device,
        store=store,
        steps=steps,
        seed=seed,
        threads=min(_MOST_THREADS, os.cpu_count() or 1),
        size=SMALL if small else size,
    )


def _disk(folder: Path) -> str:
    _make_folder(folder, "--folder")
    try:
        DiskStore.check_folder(folder)
    except ConfigError as error:
        raise ConfigError(f"--folder {folder}: {error}") from error
    return f"disk:{folder}"


def _make_folder(path: Path, option: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be made a folder ({error.strerror}). Name another one") from error


@contextmanager
def _progress(console: Console, steps: int) -> Generator[Progress]:
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for mode in Mode:
            progress.add_task(mode.value, total=steps, start=False)
        yield progress


def _run(progress: Progress, task: Task) -> Outcome:
    bar = progress.task_ids[list(Mode).index(task.mode)]
    progress.start_task(bar)
    return run_worker(task, lambda number: progress.update(bar, completed=number))


def _title(task: Task) -> str:
    size = task.size
    return (
        f"Byte-level transformer, {size.layers} blocks of width {size.width}, {size.batch} x {size.context} bytes "
        f"a step\n{task.device} -> {task.store}"
    )


def _draw(path: Path, task: Task, plain: Outcome, offloaded: Outcome) -> None:
    where = "disk" if task.store.startswith("disk") else "host memory"
    labels = ("plain", f"offloaded to {where}")
    curves = [
        Curve(label, run.curve_s, run.curve_bytes, run.peak_bytes)
        for label, run in zip(labels, (plain, offloaded), strict=True)
    ]
    draw_timeline(
        curves,
        path,
        title=f"Memory during {task.steps} training steps: same bits, activations kept or moved to {where}",
        memory="resident memory of the process" if task.device == "cpu" else "allocated device memory",
    )


def _write_json(path: Path, task: Task, plain: Outcome, offloaded: Outcome, verdict: Verdict) -> None:
    path.write_text(json.dumps(_results(task, plain, offloaded, verdict), indent=1) + "\n")


def _results(task: Task, plain: Outcome, offloaded: Outcome, verdict: Verdict) -> dict[str, Any]:
    return {
        "machine": {"system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__},
        "task": {name: value for name, value in asdict(task).items() if name != "mode"},
        "runs": {mode.value: asdict(run) for mode, run in zip(Mode, (plain, offloaded), strict=True)},
        "verdict": {**asdict(verdict), "saved_share": verdict.saved_share, "exit_status": verdict.exit_status},
    }
