"""A pipeline of two ranks: plain, and with saved tensors moved by an attached schedule, in turns.

    torchrun --nproc-per-node 2 -m benchmarks.pipelines [--schedules Interleaved1F1B ...] [--layers 2] [--out FILE]
        [--commit HASH]
    python -m benchmarks.pipelines [--rank 0] ...

8 microbatches of 4096 tokens, in each stage a few layers of a Llama 8B. Without torchrun one rank runs alone: a fake
process group stands for the other, nothing is sent, and receive buffers hold random numbers.
"""

import argparse
import contextlib
import gc
import inspect
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import ebbtide
from benchmarks.facts import facts
from benchmarks.measure import all_frozen
from ebbtide._utils.sizes import GIB

RANKS, MICROBATCHES, TURNS = 2, 8, 6
STEPS = 2  # of a turn
WARM_UP_STEPS = 4  # the clocks of a cool GPU fall by a percent
MOST_PLANNED = 60  # steps until plans are made, corrected and frozen
TOKENS, HIDDEN, HEADS, KV_HEADS, FFN = 4096, 4096, 32, 8, 14336

_CORE_AND_QKV = ["layers.*.core", "layers.*.qkv"]
# A budget is a share of what activations take at the peak of the plain step.
MODES: dict[str, dict[str, Any]] = {
    # Either way the bytes of a layer, not of a graph.
    "attention's core and qkv": {"include": _CORE_AND_QKV, "window": "128MiB", "prefetch": "128MiB"},
    "everything": {"mode": "all"},
    "everything, 2 GiB either way": {"mode": "all", "window": "2GiB", "prefetch": "2GiB"},
    "no budget": {},
    "half of the activations": {"budget": 0.5},
    "a quarter of the activations": {"budget": 0.25},
}


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HIDDEN // HEADS * (HEADS + 2 * KV_HEADS)
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.core = nn.Linear(HIDDEN, width, bias=False), Core()
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.norm(x)).view(batch, tokens, HEADS + 2 * KV_HEADS, -1).transpose(1, 2)
        attention = self.core(*heads.split([HEADS, KV_HEADS, KV_HEADS], 1))
        x = x + self.out(attention.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        return x + self.feed_forward(self.norm2(x))

    def feed_forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(y)) * self.up(y))


class Stage(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Rank:
    """The stages of a rank, and their schedule."""

    def __init__(self, name: str, rank: int, layers: int, device: torch.device) -> None:
        from torch.distributed import pipelining

        cls: Any = getattr(pipelining, f"Schedule{name}")
        is_v = name in ("ZBVZeroBubble", "DualPipeV")
        looped = [rank, 2 * RANKS - 1 - rank if is_v else RANKS + rank]
        self.numbers = [rank] if name in ("GPipe", "1F1B") else looped
        self.total = RANKS * len(self.numbers)
        torch.manual_seed(0)
        with torch.device(device):
            self.modules = [Stage(layers).bfloat16() for _ in self.numbers]
            like = torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16)
            self.x, self.target = torch.randn(2, MICROBATCHES, TOKENS, HIDDEN, dtype=torch.bfloat16)
        self.stages: list[Any] = []
        for module, number in zip(self.modules, self.numbers, strict=True):
            shapes: dict[str, Any] = {"input_args": (like.requires_grad_(number > 0),), "output_args": (like * 1,)}
            if "input_grads" in inspect.signature(pipelining.PipelineStage).parameters:  # from torch 2.12 on
                shapes["input_grads"] = (like.detach(),) if number > 0 else None
                shapes["output_grads"] = (like.detach(),) if number < self.total - 1 else None
            self.stages.append(pipelining.PipelineStage(module, number, self.total, device, **shapes))
        stages: Any = self.stages if len(self.stages) > 1 else self.stages[0]
        self.schedule = cls(stages, MICROBATCHES, loss_fn=lambda out, to: (out.float() - to).square().mean())

    def share(self, other: "Rank") -> None:
        """Compute with the parameters and gradients of `other`."""
        for module, twin in zip(self.modules, other.modules, strict=True):
            for p, q in zip(module.parameters(), twin.parameters(), strict=True):
                p.data, p.grad = q.data, q.grad

    def step(self) -> None:
        for module in self.modules:
            module.zero_grad(set_to_none=False)
        last = {"target": self.target, "losses": []} if self.total - 1 in self.numbers else {}
        self.schedule.step(*([self.x] if 0 in self.numbers else []), **last, return_outputs=False)

    def fill_buffers(self) -> None:
        """Random numbers for what other ranks would send. After the first step, which makes the buffers."""
        torch.manual_seed(0)
        for stage in self.stages:
            infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
            for buffer in (getattr(info, "buffer", None) for each in infos for info in each):
                if buffer is not None:
                    buffer.data.normal_()

    def checksum(self) -> int:
        bits = (p.grad.view(torch.int16) for module in self.modules for p in module.parameters() if p.grad is not None)
        return sum(int(each.sum(dtype=torch.int64)) for each in bits)


def measure(name: str, rank: int, layers: int, device: torch.device, modes: Sequence[str]) -> dict[str, Any]:
    own, twin = Rank(name, rank, layers, device), Rank(name, rank, layers, device)
    own.step()
    twin.share(own)
    twin.step()
    if _is_alone():
        own.fill_buffers()
        twin.fill_buffers()
    for _ in range(WARM_UP_STEPS):
        twin.step()
    plain = _Turns(twin)
    plain.run()
    found: dict[str, Any] = {"plain": plain.figures()}
    for mode in modes:
        settings = MODES[mode]
        with contextlib.ExitStack() as undo:
            if "budget" in settings:
                before = torch.cuda.memory_allocated()
                settings = {"budget": int(before + settings["budget"] * found["plain"]["peak_gib"] * GIB)}
            handles = [undo.enter_context(ebbtide.offload(module, **settings)) for module in own.modules]
            undo.callback(ebbtide.pipeline.attach(own.schedule).remove)
            is_planned = not settings.keys() - {"budget"}
            for k in range(MOST_PLANNED):
                own.step()
                if k >= 2 and (not is_planned or all_frozen(handles)):
                    break
            found[mode] = _in_turns(own, twin, handles)
            if "budget" in settings:
                found[mode]["budget_gib"] = (settings["budget"] - before) / GIB
        gc.collect()
        ebbtide.release_memory()
    return found


class _Turns:
    """Steps of one pipeline, `STEPS` a turn."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.turns_ms: list[float] = []  # the mean of each
        self._times_ms: list[float] = []
        self._peaks: list[int] = []

    def run(self) -> None:
        base = torch.cuda.memory_allocated()
        for _ in range(STEPS):
            if not _is_alone():
                dist.barrier()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began_s = time.perf_counter()
            self.rank.step()
            torch.cuda.synchronize()
            self._times_ms.append((time.perf_counter() - began_s) * 1e3)
            self._peaks.append(torch.cuda.max_memory_allocated() - base)
        self.turns_ms.append(statistics.mean(self._times_ms[-STEPS:]))

    def figures(self) -> dict[str, Any]:
        return {"step_ms": statistics.median(self._times_ms), "peak_gib": max(self._peaks) / GIB}


def _in_turns(own: Rank, twin: Rank, handles: list[ebbtide.OffloadHandle]) -> dict[str, Any]:
    """Turns of `own` between turns of the plain `twin`."""
    mine, plain, ratios = _Turns(own), _Turns(twin), list[float]()
    before = [handle.stats() for handle in handles]
    plain.run()
    for _ in range(TURNS):
        mine.run()
        plain.run()
        ratios.append(2 * mine.turns_ms[-1] / sum(plain.turns_ms[-2:]))
    pairs = [(handle.stats(), each) for handle, each in zip(handles, before, strict=True)]
    twin.step()
    checksum = twin.checksum()
    own.step()
    moved: dict[str, Any] = {
        **mine.figures(), "of_plain": statistics.median(ratios), "ratios": ratios, "plain_ms": plain.turns_ms,
        "gradients are equal": own.checksum() == checksum,
    }  # fmt: skip
    for name in ("out", "inbound", "misses"):
        nbytes = sum(getattr(now, name).nbytes - getattr(then, name).nbytes for now, then in pairs)
        moved[f"{name}_gib"] = nbytes / (TURNS * STEPS) / GIB
    moved["away_gib"] = most_away(own.step, own.modules, handles) / GIB
    base = torch.cuda.memory_allocated()
    predicted = [plan.predicted for plan in (handle.plan for handle in handles) if plan.predicted is not None]
    if predicted:
        moved["predicted_graph_ms"] = [each.step_s * 1e3 for each in predicted]
        moved["predicted_peak_gib"] = [(each.peak_bytes - base) / GIB for each in predicted]
        moved["recipes"] = [_recipes(handle) for handle in handles]
    return moved


def most_away(step: Callable[[], None], modules: Sequence[nn.Module], handles: Sequence[ebbtide.OffloadHandle]) -> int:
    """Bytes in host memory at the end of a forward, the most in one more step: what has left, or is on its way."""
    away = [0]
    hooks = [
        module.register_forward_hook(lambda *_, handle=handle: away.append(handle.stats().host_bytes))
        for module, handle in zip(modules, handles, strict=True)
    ]
    step()
    for hook in hooks:
        hook.remove()
    return max(away)


def _is_alone() -> bool:
    return "WORLD_SIZE" not in os.environ


def _recipes(handle: ebbtide.OffloadHandle) -> dict[str, int]:
    return dict(Counter(str(region.recipe) for region in handle.plan.regions.values()))


@contextlib.contextmanager
def _group(rank: int, device: torch.device) -> Iterator[None]:
    receive = dist.recv
    if _is_alone():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        dist.recv = lambda t, **_: t.fill_(1)  # every stage knows its shapes
    else:
        dist.init_process_group("nccl", device_id=device)
    yield
    dist.recv = receive
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="*", default=["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "1F1B"])
    parser.add_argument("--rank", type=int, default=0, choices=range(RANKS), help="of a rank that runs alone")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--layers", type=int, default=2, help="of a stage")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pipelines.json")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    rank = options.rank if _is_alone() else int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    command = f"python -m benchmarks.pipelines --layers {options.layers}"
    if not _is_alone():
        command = command.replace("python", f"torchrun --nproc-per-node {RANKS}", 1)
    result: dict[str, Any] = facts(command, torch.cuda.get_device_name(), options.commit)
    result["kind"] = "a rank alone" if _is_alone() else f"{RANKS} ranks on {RANKS} devices"
    with _group(rank, device):
        for name in options.schedules:
            own = {f"{name}, rank {rank}": measure(name, rank, options.layers, device, options.modes)}
            found: list[Any] = [own]
            if not _is_alone():
                found = [None] * RANKS
                dist.all_gather_object(found, own)
            for each in found:
                result.update(each)
            if rank == 0 or _is_alone():
                print(json.dumps(found, indent=1), flush=True)
                options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
