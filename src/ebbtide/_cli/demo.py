"""`ebbtide demo`: two runs of one training, with and without offloading, side by side.

Each run is a separate process (`_demo_worker`): a Task goes in, a RunResult comes back, as JSON.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from ebbtide._cli._output import console_for, write_json
from ebbtide._errors import ConfigError, EbbtideError
from ebbtide._utils.sizes import KIB, MIB, format_bytes

MODES = ("plain", "offloaded")
"""How workers train: without ebbtide, and with each forward inside `ebbtide.offload_activations`. For `ebbtide bench`
also "checkpointed", each block by torch, and "planned", by `ebbtide.offload` within a budget."""


@dataclass(frozen=True)
class Size:
    """Size of the model and of the batch, and how much of the activations may be on the device.

    Attributes:
        width, layers, heads: of the transformer.
        context, batch: tokens in a sequence, sequences in a batch.
        window_bytes: window and prefetch of the offloaded run.
        min_bytes: smaller saved tensors stay.
        sample_s: time between two samples of the memory curve.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    window_bytes: int
    min_bytes: int
    sample_s: float


# Narrow and long: a block saves about 64 bytes per token and unit of width for 72 * width operations, so a narrow
# model saves most per second of computing, and parameters and optimizer state stay far below the activations.
_FOR_RAM = Size(192, 16, 6, 512, 20, window_bytes=64 * MIB, min_bytes=MIB, sample_s=0.05)
FOR_ACCELERATOR = Size(512, 16, 8, 1024, 8, window_bytes=256 * MIB, min_bytes=MIB, sample_s=0.002)
SMALL = Size(128, 6, 4, 128, 16, window_bytes=4 * MIB, min_bytes=64 * KIB, sample_s=0.005)


@dataclass(frozen=True)
class Task:
    """A training, run once in each mode.

    Attributes:
        device: "cpu", or the type of the accelerator.
        store: as for `offload_activations`.
        steps, seed: equal in both runs, which are compared.
        threads: of the CPU. The number decides the order of sums, and so the bits.
        size: of the model and its batch.
        budget_bytes: of the mode "planned".
    """

    device: str
    store: str
    steps: int
    seed: int
    threads: int
    size: Size
    budget_bytes: int | None = None

    @staticmethod
    def from_json(text: str) -> "Task":
        raw: dict[str, Any] = json.loads(text)
        raw["size"] = Size(**raw["size"])
        return Task(**raw)


@dataclass(frozen=True)
class MovedCounts:
    """Counts of the offloaded run, in bytes and seconds over all steps; zeros in the plain run.

    Attributes:
        activation_bytes: saved by autograd, without parameters and buffers: parcels, and saved tensors that stayed.
        out_bytes, in_bytes: moved to the store, and fetched back.
        stall_forward_s, stall_backward_s: time in which compute waited for copies.
    """

    activation_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    stall_forward_s: float = 0.0
    stall_backward_s: float = 0.0


@dataclass(frozen=True)
class RunResult:
    """Results of one run.

    Attributes:
        losses, loss_bits: of every step; the bits as the hexadecimal of the float32.
        parameters_sha256: of the bytes of all parameters after the last step.
        step_s: time of every step.
        base_bytes: memory before the first step, with parameters, gradients and optimizer state in place.
        peak_bytes: largest memory since then, as the system or the accelerator's allocator counts.
        curve_s, curve_bytes: memory over time, sampled.
        moved: counts of the moves.
    """

    losses: list[float]
    loss_bits: list[str]
    parameters_sha256: str
    step_s: list[float]
    base_bytes: int
    peak_bytes: int
    curve_s: list[float]
    curve_bytes: list[int]
    moved: MovedCounts

    @property
    def above_base_bytes(self) -> int:
        return self.peak_bytes - self.base_bytes


def demo(
    *,
    steps: int = 3,
    folder: Path | None = None,
    out: Path = Path("demo-results"),
    small: bool = False,
    seed: int = 0,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Train a small transformer with and without offloading; compare every bit, the peak memory and the time.

    With an accelerator activations wait in host memory. Without an accelerator they wait on disk, which takes about a
    minute and 3 GiB of memory. The exit status is 1 if a single bit differs, or if the peak above the base (the memory
    before the first step) drops by less than half of the activations.

    Args:
        steps: training steps of each run.
        folder: where activations wait on disk; on a real disk, not a RAM disk. Default: the results' folder, and
            host memory on a machine with an accelerator.
        out: folder for the results: demo.json and memory.png.
        small: a tiny model, done in seconds.
        seed: of parameters and batches.
        as_json: print demo.json, and the table on stderr.
    """
    from ebbtide._reports import pictures  # before the runs: an error if matplotlib is missing

    task = _task(steps, folder, out, small, seed)
    console = console_for(as_json)
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {mode: progress.add_task(mode, total=steps, start=False) for mode in MODES}
        runs: dict[str, RunResult] = {}
        for mode, bar in bars.items():
            progress.start_task(bar)
            runs[mode] = run_worker(task, mode, lambda number, bar=bar: progress.update(bar, completed=number))
    plain, offloaded = runs.values()
    verdict = judge(plain, offloaded)
    results = _results(task, runs, verdict)
    (out / "demo.json").write_text(json.dumps(results, indent=1) + "\n")
    where = "disk" if task.store.startswith("disk") else "host memory"
    pictures.draw_timeline(
        [
            pictures.Curve(label, run.curve_s, run.curve_bytes, run.peak_bytes)
            for label, run in (("plain", plain), (f"offloaded to {where}", offloaded))
        ],
        out / "memory.png",
        title=f"Memory during {steps} training steps: same bits, activations kept or moved to {where}",
        memory="resident memory of the process" if task.device == "cpu" else "allocated device memory",
    )
    check = "\N{CHECK MARK}" if console.encoding.lower().startswith("utf") else "ok:"
    console.print(_table(task, plain, offloaded, verdict, check))
    console.print(str(verdict), style="bold red" if verdict.faults else "bold green", highlight=False)
    console.print(f"Details: {out / 'demo.json'}; memory over time: {out / 'memory.png'}", highlight=False)
    if as_json:
        write_json(results)
    return verdict.exit_status


def _task(steps: int, folder: Path | None, out: Path, small: bool, seed: int) -> Task:
    import torch

    from ebbtide._stores import DiskStore

    if steps < 1:
        raise ConfigError(f"--steps {steps}: expected 1 or more")
    _make_folder("--out", out)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device, store, size = ("cpu", "", _FOR_RAM) if accelerator is None else (accelerator.type, "host", FOR_ACCELERATOR)
    if accelerator is None or folder is not None:
        folder = folder or out
        _make_folder("--folder", folder)
        try:
            DiskStore.check_folder(folder)
        except ConfigError as error:
            raise ConfigError(f"--folder {folder}: {error}") from error
        store = f"disk:{folder}"
    threads = min(8, os.cpu_count() or 1)  # the model is too small for more
    return Task(device, store, steps, seed, threads, SMALL if small else size)


def _make_folder(option: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be made a folder ({error.strerror}). Name another one") from error


def _results(task: Task, runs: dict[str, RunResult], verdict: "Verdict") -> dict[str, Any]:
    import torch

    return {
        "machine": {"system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__},
        "task": asdict(task),
        "runs": {mode: asdict(run) for mode, run in runs.items()},
        "verdict": {**asdict(verdict), "saved_share": verdict.saved_share, "exit_status": verdict.exit_status},
    }


# -- the processes -----------------------------------------------------------------------------------------------------

_ENVIRONMENT = {
    # glibc raises the threshold of blocks with pages of their own to the largest block freed so far; memory freed
    # below the threshold stays resident. With a fixed threshold every large tensor goes back to the system when
    # freed, and resident memory is memory in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    # The measured steps follow the plan, however fast this machine is.
    "EBBTIDE_WAIT": "1",
    # cuBLAS would pick its scratch memory, and with it the order of sums, at run time.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def run_worker(task: Task, mode: str, report_step: Callable[[int], None]) -> RunResult:
    """Run `task` in a separate process.

    Args:
        task: the training.
        mode: of the training, see MODES.
        report_step: called with the number of every finished step.

    Raises:
        EbbtideError: the process did not finish; with the last lines of stderr.
    """
    outcome: dict[str, Any] | None = None
    # stderr into a file: a pipe without a reader would block the worker once the pipe is full.
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(  # noqa: S603 (our own interpreter and module)
            [sys.executable, "-m", "ebbtide._cli._demo_worker", mode, json.dumps(asdict(task))],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        ) as worker,
    ):
        assert worker.stdout is not None
        try:
            for message in map(json.loads, worker.stdout):
                if isinstance(message, int):
                    report_step(message)
                else:
                    outcome = {**message, "moved": MovedCounts(**message["moved"])}
        except BaseException:
            worker.kill()  # interrupted: without a reader the worker would go on for nothing
            raise
        status = worker.wait()
        if outcome is None or status != 0:
            errors.seek(0)
            last_lines = "".join(errors.readlines()[-15:])
            end = f"ended with exit status {status}"
            if status == -signal.SIGKILL:
                end = "was killed, most likely for lack of memory: try --small"
            raise EbbtideError(f"the {mode} run {end}\n{last_lines}".rstrip())
    return RunResult(**outcome)


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison.

    Attributes:
        activation_bytes: of one step, as the offloaded run counted them.
        saved_bytes: by how much the peak above the base dropped.
        faults: claims that did not hold, in words.
    """

    activation_bytes: int
    saved_bytes: int
    faults: tuple[str, ...]

    @property
    def saved_share(self) -> float:
        return self.saved_bytes / self.activation_bytes if self.activation_bytes else 0.0

    @property
    def exit_status(self) -> int:
        return 1 if self.faults else 0

    def __str__(self) -> str:
        if self.faults:
            return f"FAILED: {'; '.join(self.faults)}"
        return (
            f"Losses and parameters are equal to the bit, and the peak above the base is "
            f"{format_bytes(self.saved_bytes)} lower: {self.saved_share:.0%} of the "
            f"{format_bytes(self.activation_bytes)} of activations of a step."
        )


def judge(plain: RunResult, offloaded: RunResult) -> Verdict:
    """Compare bits and peaks of the two runs."""
    activation_bytes = offloaded.moved.activation_bytes // len(offloaded.losses)
    saved_bytes = plain.above_base_bytes - offloaded.above_base_bytes
    faults: list[str] = []
    pairs = zip(plain.loss_bits, offloaded.loss_bits, strict=True)
    differing = [number for number, (one, other) in enumerate(pairs, 1) if one != other]
    if differing:
        faults.append(f"the losses differ from step {differing[0]} on")
    elif plain.parameters_sha256 != offloaded.parameters_sha256:
        faults.append("the losses are equal, but the parameters after the last step differ")
    if offloaded.moved.out_bytes == 0:
        faults.append("nothing was moved")
    elif saved_bytes < activation_bytes / 2:
        faults.append(
            f"the peak dropped by {format_bytes(saved_bytes)}, less than half of the "
            f"{format_bytes(activation_bytes)} of activations"
        )
    return Verdict(activation_bytes, saved_bytes, tuple(faults))


def _table(task: Task, plain: RunResult, offloaded: RunResult, verdict: Verdict, check: str) -> Table:
    """One row per measure, one column per run, and the comparison. `check` marks equal bits."""
    size, steps, runs, moved = task.size, task.steps, (plain, offloaded), offloaded.moved
    batch = f"{size.batch} x {size.context} bytes a step"
    title = (
        f"Byte-level transformer, {size.layers} blocks of width {size.width}, {batch}\n{task.device} -> {task.store}"
    )
    columns = (Column(mode, justify="right") for mode in MODES)
    table = Table("", *columns, "", title=title, title_justify="left", title_style="bold")
    for number in range(steps):
        bits = [run.loss_bits[number] for run in runs]
        losses = [f"{run.losses[number]:.4f}" for run in runs]
        table.add_row(f"loss, step {number + 1}", *map(" ".join, zip(losses, bits, strict=True)), _equal(bits, check))
    hashes = [run.parameters_sha256 for run in runs]
    table.add_row("parameters, hash", *(each[:10] for each in hashes), _equal(hashes, check))
    table.add_section()
    above = [format_bytes(run.above_base_bytes) for run in runs]
    table.add_row("memory before", *(format_bytes(run.base_bytes) for run in runs))
    table.add_row("peak memory", *(format_bytes(run.peak_bytes) for run in runs))
    table.add_row("peak above before", *above, f"{format_bytes(verdict.saved_bytes)} saved")
    table.add_row("activations/step", "", format_bytes(verdict.activation_bytes), f"{verdict.saved_share:.0%} saved")
    table.add_row("moved out/step", "", format_bytes(moved.out_bytes / steps))
    table.add_row("fetched back/step", "", format_bytes(moved.in_bytes / steps))
    table.add_section()
    plain_s, offloaded_s = (median(run.step_s) for run in runs)
    table.add_row("median step time", _time(plain_s), _time(offloaded_s), f"{offloaded_s / plain_s:.2f}x")
    table.add_row("stall/step", "", _time((moved.stall_forward_s + moved.stall_backward_s) / steps))
    return table


def _equal(bits: list[str], check: str) -> str:
    return f"[green]{check} same bits[/]" if bits[0] == bits[1] else "[red]DIFFERENT[/]"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
