"""Measure every figure of the README and of bars.json in one run on one machine with an accelerator.

    python -m benchmarks.run [--workloads A A-compiled B] [--recipes A B-32k] [--plans A A-compiled B-32k MoE ViT]
        [--unslowed A] [--predictions A B-32k MoE ViT] [--trainers T1 T2 T3] [--steps 5] [--out benchmarks/results]
        [--commit HASH]

All modes of a workload run in one process on one model: else ratios mean nothing.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

import ebbtide
from benchmarks import bars
from benchmarks.facts import facts
from benchmarks.host_cost import host_costs
from benchmarks.measure import link_rate, one_step, steps
from benchmarks.modes import MODES, available, ebbtide_context, nothing_qualifies, prepared
from benchmarks.planning import measure_plans
from benchmarks.predictions import measure_predictions
from benchmarks.recipes import measure_recipes
from benchmarks.steady import steady_state
from benchmarks.trainers import TRAINERS
from benchmarks.unslowed import measure_unslowed
from benchmarks.workloads import PLANNED, WORKLOADS, Workload, build


def main() -> None:
    os.environ["EBBTIDE_WAIT"] = "1"  # steps are measured by plans; benchmarks.zoo measures how plans come
    options = _options()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda")
    about = facts(" ".join(["python -m benchmarks.run", *_arguments()]), torch.cuda.get_device_name(), options.commit)
    link = link_rate()
    results: dict[str, dict[str, object]] = {"link": {**about, **link}}
    results["host-cost"] = {**about, **host_costs(device)}
    _write(options.out, results)
    for name in options.workloads:
        results[name] = {**about, "link": link, **_measure(WORKLOADS[name], device, options.steps)}
        _write(options.out, results)
        _clean()
    for name in options.recipes:
        results[f"{name}-recipes"] = {**about, "link": link, **measure_recipes(WORKLOADS[name], device, options.steps)}
        _write(options.out, results)
        _clean()
    for name in options.plans:
        results[f"{name}-plans"] = {**about, "link": link, **measure_plans(name, device, options.steps)}
        _write(options.out, results)
        _clean()
    for name in options.unslowed:
        measured, profile = measure_unslowed(name, device, options.steps, link["out_gb_per_s"])
        results[f"{name}-unslowed"] = {**about, "link": link, **measured}
        _write(options.out, results, {f"{name}-unslowed": profile})
        _clean()
    for name in options.predictions:
        rows, profile = measure_predictions(name, device, options.steps)
        results[f"{name}-predictions"] = {**about, "link": link, "predictions": rows}
        _write(options.out, results, {name: profile})
        _clean()
    for name in options.trainers:
        results[name] = {**about, "link": link, **TRAINERS[name].measure(device, options.steps)}
        _write(options.out, results)
        _clean()


def _clean() -> None:
    ebbtide.release_memory()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*", default=["A", "A-compiled", "B"], choices=sorted(WORKLOADS))
    parser.add_argument("--recipes", nargs="*", default=["A", "B-32k"], choices=sorted(WORKLOADS))
    plans = ["A", "A-compiled", "B-32k", "MoE", "ViT"]
    parser.add_argument("--plans", nargs="*", default=plans, choices=sorted(PLANNED))
    trainers = [name for name, trainer in TRAINERS.items() if trainer.is_available]
    parser.add_argument("--trainers", nargs="*", default=trainers, choices=sorted(TRAINERS))
    parser.add_argument("--unslowed", nargs="*", default=["A"], choices=sorted(PLANNED))
    parser.add_argument("--predictions", nargs="*", default=["A", "B-32k", "MoE", "ViT"], choices=sorted(PLANNED))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    return parser.parse_args()


def _arguments() -> list[str]:
    """Return the arguments of the command line without --out and --commit."""
    arguments = sys.argv[1:]
    for option in ("--out", "--commit"):
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return arguments


def _measure(workload: Workload, device: torch.device, count: int) -> dict[str, object]:
    model, loss_of = build(workload, device)
    modes: dict[str, object] = {}
    for mode in filter(available, MODES):
        print(f"{workload.name}: {mode}", flush=True)
        modes[mode] = _measure_mode(mode, model, loss_of, count)
        print(f"  {modes[mode]}", flush=True)
    return {
        "modes": modes,
        "nothing_qualifies_ratio": _ratio_when_nothing_qualifies(model, loss_of),
        "steady": steady_state(model, loss_of, ebbtide_context),
    }


def _measure_mode(mode, model, loss_of, count) -> dict[str, object]:
    with prepared(mode, model) as context:
        try:
            measured = steps(model, loss_of, context, count)
        except (RuntimeError, AssertionError, ValueError) as error:  # another library that fails on the workload
            if mode == "ebbtide":
                raise
            return {"failed": f"{type(error).__name__}: {error}"[:300]}
        summary = measured.summary()
        if mode == "ebbtide":
            before = context().stats()
            one_step(model, loss_of, context)
            torch.cuda.synchronize()
            summary["one_step"] = _difference(before, context().stats())
        return summary


def _difference(before: ebbtide.Stats, after: ebbtide.Stats) -> dict[str, float]:
    """Return the counts of one step of the steady state."""
    names = ("parcels", "out", "inbound", "shared", "forwarded", "misses", "freed_nothing")
    step = {f"{name}_bytes": getattr(after, name).nbytes - getattr(before, name).nbytes for name in names}
    step |= {f"{name}_count": getattr(after, name).count - getattr(before, name).count for name in names}
    seconds = ("stall_forward_s", "stall_backward_s")
    return step | {name: getattr(after, name) - getattr(before, name) for name in seconds}


def _ratio_when_nothing_qualifies(model, loss_of, pairs: int = 40) -> float:
    """Measure the median step with hooks that keep everything over the median plain step, in turns."""
    times: dict[str, list[float]] = {"plain": [], "hooked": []}
    with warnings.catch_warnings(), prepared("nothing", model) as plain:
        warnings.simplefilter("ignore")
        for _ in range(pairs):
            times["plain"].append(one_step(model, loss_of, plain).step_ms)
            times["hooked"].append(one_step(model, loss_of, nothing_qualifies).step_ms)
    return statistics.median(times["hooked"][2:]) / statistics.median(times["plain"][2:])


def _write(
    folder: Path, results: dict[str, dict[str, object]], profiles: Mapping[str, ebbtide.Profile] = MappingProxyType({})
) -> None:
    # Profiles serve `ebbtide plan`, which needs no accelerator.
    (folder / "profiles").mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, profile in profiles.items():
        profile.save(folder / "profiles" / f"{name}.json")
    (folder / "bars.json").write_text(json.dumps(bars.judge(folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
