"""One run of the demo in a process of its own, so that its peak memory is its own.

`python -m ebbtide._cli._demo_worker TASK` trains and writes lines of JSON: one per step, and the outcome.
"""

import contextlib
import gc
import hashlib
import json
import struct
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide._cli._demo_memory import AcceleratorMemory, Memory, ResidentMemory, Sampler
from ebbtide._cli._demo_model import ByteTransformer, Text, next_byte_loss
from ebbtide._cli._demo_task import Mode, Moved, Outcome, Task
from ebbtide._context import OffloadActivations
from ebbtide._engine.stats import Stats
from ebbtide.types import Reason

_WEIGHTS = {Reason.PARAMETER, Reason.AUTOCAST_WEIGHT, Reason.BUFFER}


def run(task: Task, tell_step: Callable[[int], None]) -> Outcome:
    """Train as the task says; `tell_step` is called with the number of every step that is done."""
    _fix_the_bits(task)
    training = Training(task)
    _warm_up(training, task.threads)
    memory = _memory_of(task)
    base_bytes = memory.now_bytes()
    door = _door(task)
    losses: list[Tensor] = []
    step_s: list[float] = []
    with Sampler(memory, task.size.sample_s) as sampler:
        for number in range(1, task.steps + 1):
            began = time.perf_counter()
            losses.append(training.step(door or contextlib.nullcontext(), rows=task.size.batch))
            step_s.append(time.perf_counter() - began)
            tell_step(number)
    return Outcome(
        losses=[loss.item() for loss in losses],
        loss_bits=[_bits_of(loss) for loss in losses],
        parameters_sha256=_hash_of(training.model),
        step_s=step_s,
        base_bytes=base_bytes,
        peak_bytes=memory.peak_bytes(),
        curve_s=sampler.seconds,
        curve_bytes=sampler.nbytes,
        moved=Moved() if door is None else _count(door.stats()),
    )


class Training:
    """A model, its optimizer and its text, a step at a time."""

    def __init__(self, task: Task) -> None:
        self._device = torch.device(task.device)
        self._context = task.size.context
        self._text = Text(task.seed)
        self.model = ByteTransformer(task.size).to(self._device)
        # Fused: the other way are thousands of short parallel loops, which crawl where another program wants the cores.
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, door: AbstractContextManager[object], rows: int) -> Tensor:
        """Forward inside `door`, backward, update; returns the loss."""
        batch = self._text.batch(rows, self._context).to(self._device)
        # Gradients stay where they are, so that they are in the base and not in the peak above it.
        self._optimizer.zero_grad(set_to_none=False)
        with door:
            loss = next_byte_loss(self.model, batch)
        loss.backward()
        self._optimizer.step()
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # or the step's time would be that of launching it
        return loss.detach()


def _warm_up(training: Training, threads: int) -> None:
    """One row, without ebbtide in both modes: gradients, optimizer state and threads are there before the base is read.

    On one thread first. MKL chooses its vector kernels in their first call, and two threads that make it at once can
    get different ones: torch.sqrt, the first time in a process, was wrong by 2e-4 in its second half in one plain run
    of some 100.
    """
    for number in (1, threads):
        torch.set_num_threads(number)
        training.step(contextlib.nullcontext(), rows=1)
    gc.collect()


def _fix_the_bits(task: Task) -> None:
    torch.manual_seed(task.seed)
    torch.use_deterministic_algorithms(True)
    # It would write into every new tensor, which costs time and says nothing about a program that works.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _memory_of(task: Task) -> Memory:
    return ResidentMemory() if task.device == "cpu" else AcceleratorMemory()


def _door(task: Task) -> OffloadActivations | None:
    if task.mode is Mode.PLAIN:
        return None
    window_bytes = task.size.window_bytes
    return ebbtide.offload_activations(
        store=task.store, window=window_bytes, prefetch=window_bytes, min_bytes=task.size.min_bytes
    )


def _count(stats: Stats) -> Moved:
    stayed = sum(tally.nbytes for reason, tally in stats.kept.items() if reason not in _WEIGHTS)
    return Moved(
        activation_bytes=stats.parcels.nbytes + stayed,
        out_bytes=stats.out.nbytes,
        in_bytes=stats.inbound.nbytes,
        stall_forward_s=stats.stall_forward_s,
        stall_backward_s=stats.stall_backward_s,
    )


def _bits_of(loss: Tensor) -> str:
    return f"0x{struct.pack('>f', loss.item()).hex()}"


def _hash_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tell(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train what the first argument asks for."""
    outcome = run(Task.from_json(sys.argv[1]), lambda number: _tell({"step": number}))
    _tell({"outcome": asdict(outcome)})


if __name__ == "__main__":
    main()
