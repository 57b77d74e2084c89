"""A run of the demo in a separate process, for a peak memory of the run alone.

`python -m ebbtide._cli._demo_worker MODE TASK` trains and writes lines of JSON: the number of each finished step, and
the outcome.
"""

import functools
import gc
import hashlib
import json
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

# Loaded before the base is read.
from ebbtide import EbbtideError, OffloadActivations, OffloadHandle, Stats, offload, offload_activations
from ebbtide._cli.demo import MovedCounts, RunResult, Size, Task
from ebbtide._utils.sizes import KIB


class TransformerBlock(nn.Module):
    """Causal self-attention and an MLP; each half reads a normalised stream and adds to the raw stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))

    def _attention(self, x: Tensor) -> Tensor:  # a method, because local names would keep memory through the MLP
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ByteTransformer(nn.Module):
    """Bytes in, logits of each next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.positions = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        blocks = (TransformerBlock(size.width, size.heads) for _ in range(size.layers))
        self.layers = nn.Sequential(*blocks, nn.LayerNorm(size.width), nn.Linear(size.width, 256))

    def forward(self, text: Tensor) -> Tensor:
        return self.layers(self.bytes(text) + self.positions)


class Training:
    """A model, its optimizer and its text, a step at a time."""

    def __init__(self, task: Task) -> None:
        self._device = torch.device(task.device)
        self._context = task.size.context
        self._text = _python_sources()
        self._random = torch.Generator().manual_seed(task.seed)
        self.model = ByteTransformer(task.size).to(self._device)
        # Fused: otherwise thousands of short parallel loops, which crawl where another program uses the cores.
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, offloading: AbstractContextManager[object], rows: int) -> Tensor:
        """Forward inside `offloading`, backward, update; returns the mean cross entropy of each next byte."""
        starts = torch.randint(len(self._text) - self._context, (rows, 1), generator=self._random)
        batch = self._text[starts + torch.arange(self._context + 1)].long().to(self._device)
        # Gradients stay allocated, and count for the base and not for the peak above the base.
        self._optimizer.zero_grad(set_to_none=False)
        with offloading:
            loss = functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # else the step would be timed before its kernels have run
        return loss.detach()


def _python_sources() -> Tensor:
    """Bytes of the *.py files of the standard library: real text on every machine with Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:4_000_000]
    if not text:
        raise EbbtideError(f"the demo reads the source files of Python's standard library: {str(folder)!r} has none")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class MemoryMeter:
    """Memory filled by training, in bytes.

    On the CPU the resident memory of the process, without pages of files, which are the system's cache; on an
    accelerator the memory its allocator has handed out. A context samples `now_bytes` in a thread, every `interval_s`.
    """

    def __init__(self, device: str, interval_s: float) -> None:
        self.seconds: list[float] = []
        self.nbytes: list[int] = []
        self._process = psutil.Process() if device == "cpu" else None
        self._interval_s = interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="ebbtide-demo-sampler", daemon=True)
        if self._process is None:
            torch.accelerator.reset_peak_memory_stats()

    def now_bytes(self) -> int:
        return torch.accelerator.memory_allocated() if self._process is None else self._process.memory_info().rss

    def peak_bytes(self) -> int:
        """The largest so far, as the system or the allocator counted: samples would miss short peaks."""
        if self._process is None:
            return torch.accelerator.max_memory_allocated()
        status = Path("/proc/self/status")
        if status.exists():
            rows = dict(line.split(":", 1) for line in status.read_text().splitlines())
            return int(rows["VmHWM"].split()[0]) * KIB
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * KIB

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        began, is_last = time.perf_counter(), False
        while True:
            self.seconds.append(round(time.perf_counter() - began, 4))
            self.nbytes.append(self.now_bytes())
            if is_last:
                return
            is_last = self._over.wait(self._interval_s)


def run(task: Task, mode: str, report_step: Callable[[int], None]) -> RunResult:
    """Train `task`; `report_step` is called with the number of every finished step."""
    torch.manual_seed(task.seed)
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor costs time and says nothing about a program without errors.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    training = Training(task)
    _warm_up(training, task.threads)
    size, memory = task.size, MemoryMeter(task.device, task.size.sample_s)
    base_bytes = memory.now_bytes()
    offloading = _prepare(training.model, task, mode)
    context = offloading if isinstance(offloading, OffloadActivations) else nullcontext()
    losses: list[Tensor] = []
    step_s: list[float] = []
    with memory:
        for number in range(1, task.steps + 1):
            began = time.perf_counter()
            losses.append(training.step(context, rows=size.batch))
            step_s.append(time.perf_counter() - began)
            report_step(number)
    digest = hashlib.sha256()
    for parameter in training.model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return RunResult(
        losses=[loss.item() for loss in losses],
        loss_bits=[f"0x{struct.pack('>f', loss.item()).hex()}" for loss in losses],
        parameters_sha256=digest.hexdigest(),
        step_s=step_s,
        base_bytes=base_bytes,
        peak_bytes=memory.peak_bytes(),
        curve_s=memory.seconds,
        curve_bytes=memory.nbytes,
        moved=MovedCounts() if offloading is None else _moved(offloading.stats()),
    )


def _prepare(model: ByteTransformer, task: Task, mode: str) -> OffloadActivations | OffloadHandle | None:
    """Have the steps of `model` run by `mode`; the context or the handle of ebbtide, if any."""
    size = task.size
    if mode == "offloaded":
        window = size.window_bytes
        return offload_activations(store=task.store, window=window, prefetch=window, min_bytes=size.min_bytes)
    if mode == "planned":
        return offload(model, budget=task.budget_bytes, store=task.store, min_bytes=size.min_bytes)
    if mode == "checkpointed":
        for block in model.layers:
            if isinstance(block, TransformerBlock):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    else:
        assert mode == "plain", mode
    return None


def _warm_up(training: Training, threads: int) -> None:
    """Train one row without ebbtide, so that gradients, optimizer state and threads exist before the base is read.

    On one thread first. MKL chooses vector kernels in the first call, and two threads that make the first call
    at once can get different kernels: the first torch.sqrt of a process was wrong by 2e-4 in its second half in one of
    some 100 plain runs.
    """
    for number in (1, threads):
        torch.set_num_threads(number)
        training.step(nullcontext(), rows=1)
    gc.collect()


def _moved(stats: Stats) -> MovedCounts:
    return MovedCounts(
        activation_bytes=stats.parcels.nbytes + stats.kept_bytes,
        out_bytes=stats.out.nbytes,
        in_bytes=stats.inbound.nbytes,
        stall_forward_s=stats.stall_forward_s,
        stall_backward_s=stats.stall_backward_s,
    )


def _send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _send(asdict(run(Task.from_json(sys.argv[2]), sys.argv[1], _send)))
