"""Measure the figures without an accelerator: random programs on the simulator, mutations caught, observers, the demo.

    python -m benchmarks.without_gpu [--seeds 1200] [--out benchmarks/results]

tests/ must be on the path: `PYTHONPATH=src:tests:. python -m benchmarks.without_gpu`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch
from engine.test_races import MUTATIONS
from support import explore

from benchmarks import bars
from benchmarks.facts import facts
from benchmarks.observers import observer_costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    about = facts("python -m benchmarks.without_gpu", "2 CPU cores, no accelerator")
    races = {
        "programs": options.seeds,
        "clean": sum(explore(seed) is None for seed in range(options.seeds)),
        "mutations": len(MUTATIONS),
        "caught": sum(_is_caught(mutate, options.seeds) for mutate in MUTATIONS),
    }
    (options.out / "races.json").write_text(json.dumps({**about, **races}, indent=1) + "\n")
    (options.out / "demo.json").write_text(json.dumps({**about, **_demo()}, indent=1) + "\n")
    observed = observer_costs(json.loads((options.out / "A.json").read_text()))
    (options.out / "observers.json").write_text(json.dumps({**about, **observed}, indent=1) + "\n")
    (options.out / "bars.json").write_text(json.dumps(bars.judge(options.out), indent=1) + "\n")


def _is_caught(mutate, seeds: int) -> bool:
    patches = []

    def patch(owner, name, value):
        patches.append(mock.patch.object(owner, name, value))
        patches[-1].start()

    mutate(patch)
    try:
        return any(_fails(seed) for seed in range(seeds))
    finally:
        for started in reversed(patches):
            started.stop()


def _fails(seed: int) -> bool:
    try:
        return explore(seed) is not None
    except (AssertionError, RuntimeError, IndexError):
        return True


def _demo() -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        command = [sys.executable, "-m", "ebbtide._cli", "demo", "--out", folder]
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        report = json.loads((Path(folder) / "demo.json").read_text())
    runs = {
        name: {key: value for key, value in run.items() if not key.startswith("curve")}
        for name, run in report["runs"].items()
    }
    return {"status": status, "verdict": report["verdict"], "runs": runs}


if __name__ == "__main__":
    main()
