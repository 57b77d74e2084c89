"""Cost of observing: listeners and `stats()` as shares of a step of Llama A, 1B shapes (bars S-events, S-stats, S-idle).

python -m benchmarks.observers [--out benchmarks/results] [--commit HASH]

The CPU of this machine takes the times, least of many; parcels and step time are of the committed run of Llama A
(A.json: everything moved, on a GPU). Two runs with and without a listener would differ by more than the listener costs.
"""

import argparse
import json
import platform
import time
import timeit
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch

import ebbtide
from benchmarks.facts import facts
from benchmarks.host_cost import TOKENS, WIDTH, Model
from ebbtide._engine.stats import StatsRecorder
from ebbtide._engine.timetable import Site
from ebbtide._events import EventKind

CALLS, REPEATS, STEPS = 1000, 300, 30


def observer_costs(run: dict[str, object]) -> dict[str, object]:
    """Measure the costs of observers. `run`: result of Llama A, for its parcels and the plain step."""
    modes: dict = run["modes"]
    parcels, step_ms = modes["ebbtide"]["one_step"]["parcels_count"], modes["nothing"]["step_ms"]["median"]
    recorder = StatsRecorder()
    idle_us = _call_us("if parcel.recorder.listeners.all: raise", recorder) - _call_us("pass", recorder)
    recorder.listeners.add(lambda event: None)
    event_us = _call_us("parcel.recorder.listeners.tell(SENT, site, 1)", recorder)
    per_parcel, small_parcels, stats_us = _step()
    return {
        "event_us": event_us,
        "idle_us": idle_us,
        "stats_us": stats_us,
        "stats_after_parcels": small_parcels,
        "events_per_parcel": per_parcel,
        "of": {"commit": run["commit"], "device": run["device"], "parcels": parcels, "plain_step_ms": step_ms},
        "shares": {
            "events": parcels * per_parcel * event_us / 1e3 / step_ms,
            "idle": parcels * per_parcel * idle_us / 1e3 / step_ms,
            "stats": stats_us / 1e3 / step_ms,
        },
    }


def _call_us(code: str, recorder: StatsRecorder) -> float:
    """The least time of `code`, of many."""
    names = {"parcel": SimpleNamespace(recorder=recorder), "SENT": EventKind.SENT, "site": Site("layers.10", 0, 10)}
    return min(timeit.repeat(code, globals=names, number=CALLS, repeat=REPEATS)) * 1e6 / CALLS


def _step() -> tuple[float, int, float]:
    """Events per parcel, parcels of a step of 24 tiny blocks, and the least microseconds of `stats()` after a step."""
    model, x = Model(), torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    kinds: Counter[EventKind] = Counter()
    with ebbtide.offload(model, mode="all", store="mock", min_bytes=1, window=1, prefetch="32KiB") as handle:
        model(x).backward()  # learns the order
        before, took_s = handle.stats(), []
        stop = handle.subscribe(lambda event: kinds.update([event.kind]))
        for _ in range(STEPS):
            model(x).backward()
            start = time.perf_counter()
            after = handle.stats()
            took_s.append(time.perf_counter() - start)
        stop()
    parcels = after.parcels.count - before.parcels.count
    return kinds.total() / parcels, parcels // STEPS, min(took_s) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run = json.loads((options.out / "A.json").read_text())
    device = f"CPU ({platform.machine()}), no accelerator"
    result = {**facts("python -m benchmarks.observers", device, options.commit), **observer_costs(run)}
    print(json.dumps(result, indent=1))
    (options.out / "observers.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
