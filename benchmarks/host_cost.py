"""Host cost: microseconds for each saved tensor (bar E4), and steps of 24 tiny blocks by recipe (bar Z6).

python -m benchmarks.host_cost [--device cuda] [--out benchmarks/results] [--commit HASH]
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ebbtide
from benchmarks.facts import facts
from benchmarks.modes import Context, ebbtide_context

TENSORS = 200
REPEATS = 300
BLOCKS, WIDTH, TOKENS, ROUNDS = 24, 32, 16, 60

HANDLES: dict[str, dict[str, object]] = {
    "keep": {"recipe": "keep"},
    "recompute": {"recipe": "recompute"},
    "selective": {"recipe": "selective"},
    "nothing qualifies": {"mode": "all", "min_bytes": "1GiB"},
}


def host_costs(device: torch.device) -> dict[str, object]:
    """Measure the costs of saved tensors and of steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "moved nothing", as meant
        return {**_per_tensor_costs_us(device), "step_ms": _step_costs_ms(device)}


# -- for each saved tensor ---------------------------------------------------------------------------------------------


def _per_tensor_costs_us(device: torch.device) -> dict[str, float]:
    """The least time per saved tensor in a chain of `exp` with results of 4 KiB, minus the time without hooks."""
    plain = _per_tensor_us(device, contextlib.nullcontext)
    kept = _per_tensor_us(device, lambda: ebbtide_context(min_bytes="1GiB"))
    moved = _per_tensor_us(device, lambda: ebbtide_context(min_bytes=1, window="32KiB", prefetch="32KiB"))
    floor = {"moved_floor_us": min(_bare_move_us(device) for _ in range(REPEATS))} if device.type == "cuda" else {}
    return {"plain_us": plain, "kept_us": kept - plain, "moved_us": moved - plain, **floor}


def _bare_move_us(device: torch.device) -> float:
    """The calls of torch without which no tensor goes out and comes back beside compute: two copies on streams of their
    own, four events, four waits, and new memory. No code of ebbtide runs."""
    compute = torch.accelerator.current_stream(device)
    outbound, inbound = torch.Stream(device), torch.Stream(device)
    events = [torch.Event(device, enable_timing=True) for _ in range(4)]
    t, host = torch.empty(4096, dtype=torch.uint8, device=device), torch.empty(4096, dtype=torch.uint8).pin_memory()
    _synchronize(t)
    start = time.perf_counter()
    for _ in range(TENSORS):
        ready, landed, room, arrived = events
        ready.record(compute)
        outbound.wait_event(ready)
        with outbound:
            host.copy_(t, non_blocking=True)
        landed.record(outbound)
        compute.wait_event(landed)
        back = torch.empty(4096, dtype=torch.uint8, device=device)
        room.record(compute)
        inbound.wait_event(room)
        with inbound:
            back.copy_(host, non_blocking=True)
        arrived.record(inbound)
        compute.wait_event(arrived)
    return (time.perf_counter() - start) * 1e6 / TENSORS


def _per_tensor_us(device: torch.device, context: Context) -> float:
    start_from = torch.randn(1024, device=device, requires_grad=True)
    return min(_one_pass_us(start_from, context) for _ in range(REPEATS)) / TENSORS


def _one_pass_us(start_from: torch.Tensor, context: Context) -> float:
    _synchronize(start_from)
    start = time.perf_counter()
    with context():
        y = start_from * 1
        for _ in range(TENSORS):
            y = y.exp()
        loss = y.sum()
    loss.backward()
    return (time.perf_counter() - start) * 1e6


# -- for a step --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(torch.nn.Module):
    """Blocks whose kernels take next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.call: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x.sum()


def _step_costs_ms(device: torch.device) -> dict[str, float]:
    """Median milliseconds of a step in each mode, in turns; a model for each mode, long after its first steps."""
    models = {name: Model().to(device) for name in ("plain", "checkpoint", *HANDLES)}
    models["checkpoint"].call = lambda block, x: checkpoint(block, x, use_reentrant=False)
    handles = [ebbtide.offload(models[name], verify=0, **settings) for name, settings in HANDLES.items()]
    x = torch.randn(2, TOKENS, WIDTH, device=device, requires_grad=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        for name, model in models.items():
            _step_s(model, x)  # the caches belong to another model until here
            seconds[name].append(min(_step_s(model, x), _step_s(model, x)))
    gc.enable()
    for handle in handles:
        handle.remove()
    return {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}


def _step_s(model: Model, x: torch.Tensor) -> float:
    _synchronize(x)
    start = time.perf_counter()
    model(x).backward()
    return time.perf_counter() - start


def _synchronize(t: torch.Tensor) -> None:
    if t.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    result = {**facts("python -m benchmarks.host_cost", name, options.commit), **host_costs(device)}
    print(json.dumps(result, indent=1))
    if device.type == "cuda":
        (options.out / "host-cost.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
