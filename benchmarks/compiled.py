"""Measure compiled blocks: torch's memory budget alone, checkpointing, inductor's offloading, and plans at their peaks.

    python -m benchmarks.compiled [--models "Llama A" ViT-L SD3] [--budgets 0 0.1 0.2 0.5 0.75]
        [--within 12 5.95] [--steps 40] [--backend inductor] [--tiny] [--out FOLDER] [--commit HASH]

One file per model: compiled-NAME.json. Each block is compiled by itself. A plan has the peak of a rival as its budget:
torch's memory budget (the fraction behind --budgets) or checkpointing, or --within GiB of activations. --tiny runs
small models on a CPU.
"""

import argparse
import contextlib
import functools
import json
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

import ebbtide
from benchmarks.facts import facts
from benchmarks.measure import Step, one_step
from benchmarks.modes import HOST_LIMIT
from benchmarks.turns import tidy
from benchmarks.zoo.models import ZOO, built
from ebbtide._model.regions import find_regions
from ebbtide._utils.sizes import GIB

WARM_UP = 3  # steps: the first compiles
MOST = 90  # steps from `offload` on that compile, measure, plan, compare and correct

Loss = Callable[[], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["Llama A", "ViT-L", "SD3"], choices=list(ZOO))
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.0, 0.1, 0.2, 0.5, 0.75])
    parser.add_argument("--within", nargs="*", type=float, default=[], help="further budgets of plans, in GiB")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each mode")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    for name in options.models:
        budgets, within = (" ".join(map(str, each)) for each in (options.budgets, options.within))
        command = f"python -m benchmarks.compiled --models {name!r} --budgets {budgets} --steps {options.steps}"
        command += f" --within {within}" if within else ""
        about = facts(command, "CPU" if options.tiny else torch.cuda.get_device_name(), options.commit)
        rivals = Rivals(name, device, options.backend, options.steps, options.tiny)
        result = measure_model(rivals, options.budgets, options.within)
        file = options.out / f"compiled-{name.replace(' ', '-')}.json"
        file.write_text(json.dumps({**about, **result}, indent=1) + "\n")
        print(name, json.dumps(result, indent=1), flush=True)


def measure_model(rivals: "Rivals", budgets: Sequence[float], within: Sequence[float] = ()) -> dict[str, object]:
    """Each rival, and behind each a plan that has the rival's peak as its budget; and plans `within` so many GiB."""
    plain = rivals.run()
    modes: dict[str, Callable[[], dict[str, Any]]] = {"checkpointing": functools.partial(rivals.run, checkpoints=True)}
    for budget in budgets:
        modes[f"budget {budget:g}"] = functools.partial(rivals.run, {"activation_memory_budget": budget})
    if rivals.device.type == "cuda" and hasattr(config, "enable_activation_offloading"):
        modes["inductor's offloading"] = functools.partial(rivals.run, offloading())
    found: dict[str, object] = {"plain": plain, "no budget": rivals.planned()}
    found["at most 5 % slower"] = rivals.planned(max_slowdown=0.05)
    for name, mode in modes.items():
        try:
            rival = mode()
        except BackendCompilerFailed as error:  # inductor's offloading on torch 2.11: record_stream lacks an argument
            found[name] = {"failed": str(error).splitlines()[0]}
            continue
        found[name] = {**rival, "plan": rivals.planned(rival["peak_gib"])}
    return found | {f"within {gib:g} GiB": rivals.planned(gib) for gib in within}


def offloading() -> dict[str, Any]:
    """torch's settings for offloading inside of a graph; torch itself marks no node."""

    def mark(graph_module: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        for node in graph_module.graph.nodes:
            node.meta["should_offload"] = node.op == "call_function"
        return graph_module

    names = ("enable_activation_offloading", "activation_offload_separate_stream", "activation_offload_sink_wait")
    settings = {name: True for name in (*names, "activation_reload_prefetch") if hasattr(config, name)}
    return {**settings, "joint_custom_pass": mark}


class Rivals:
    """Runs of one model, each on a new model with newly compiled blocks."""

    def __init__(self, name: str, device: torch.device, backend: str, count: int, tiny: bool) -> None:
        self.device = device
        self._name = name
        self._backend = backend
        self._count = count
        self._tiny = tiny

    def run(self, settings: Mapping[str, Any] | None = None, *, checkpoints: bool = False) -> dict[str, Any]:
        """Steps compiled with `settings` of the compiler, or with every block in a checkpoint."""
        with self._compiled(checkpoints) as (model, loss_of), config.patch(dict(settings or {})):
            return self._steps(model, loss_of, WARM_UP)

    def planned(self, peak_gib: float | None = None, **goal: Any) -> dict[str, Any]:
        """Steps of the final plan, with the partitions that the plan gives to the blocks. `peak_gib`: the budget, above
        the memory from before the step."""
        with self._compiled() as (model, loss_of):
            one_step(model, loss_of, contextlib.nullcontext)  # compiles, and allocates gradients
            if peak_gib is not None:  # steps without a device have no peaks: every budget fits
                is_cuda = self.device.type == "cuda"
                goal["budget"] = torch.cuda.memory_allocated() + int(peak_gib * GIB) if is_cuda else 64 * GIB
            handle = ebbtide.offload(model, host_limit=HOST_LIMIT, **goal)
            found = self._steps(model, loss_of, MOST, lambda: handle.is_plan_frozen)
            predicted, stats = handle.plan.predicted, handle._attachment.partitions
            found |= {
                "is_frozen": handle.is_plan_frozen,
                "predicted_ms": None if predicted is None else predicted.step_s * 1e3,
                "predicted_peak_bytes": None if predicted is None else predicted.peak_bytes,
                "moved_gib": 0.0 if predicted is None else predicted.moved_bytes / GIB,
                "recipes": [str(region.recipe) for region in handle.plan.regions.values()],
                "variants": stats.compilations,
                "variants_s": stats.seconds,
            }
            handle.remove()
        return found

    @contextlib.contextmanager
    def _compiled(self, checkpoints: bool = False) -> Generator[tuple[torch.nn.Module, Loss], None, None]:
        torch._dynamo.reset()  # holds the model before
        ebbtide.release_memory()
        tidy()
        model, loss_of = built(self._name, self.device, tiny=self._tiny)
        for block in find_regions(model).values():
            if checkpoints:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            block.compile(backend=self._backend)
        yield model, loss_of

    def _steps(
        self, model: torch.nn.Module, loss_of: Loss, most: int, is_frozen: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        early: list[Step] = []
        while len(early) < most and not is_frozen():
            early.append(one_step(model, loss_of, contextlib.nullcontext))
        base_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        steps = [one_step(model, loss_of, contextlib.nullcontext) for _ in range(self._count)]
        typical_ms = statistics.median(step.step_ms for step in steps)
        return {
            "step_ms": typical_ms,
            "peak_gib": _peak(steps) / GIB,
            "most_gib": _peak([*early, *steps]) / GIB,
            "base_bytes": base_bytes,
            "first_steps": len(early),
            "first_steps_cost_s": sum(step.step_ms - typical_ms for step in early) / 1e3,
            "loss": steps[-1].loss,
        }


def _peak(steps: Sequence[Step]) -> int:
    return max(step.act_peak_bytes for step in steps)


if __name__ == "__main__":
    main()
