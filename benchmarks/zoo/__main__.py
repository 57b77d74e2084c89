"""Measure plans of zoo models online, as a user runs them, against checkpointing of the fewest blocks that fit.

    python -m benchmarks.zoo [--models Whisper-large SD3] [--shares 0 0.25 0.5 0.75] [--steps 60] [--out FOLDER]
        [--commit HASH]

One file per model: zoo-NAME.json, and zoo-NAME.part until the model is complete. A share is the way of the budget from
checkpointing's peak to the plain peak.
"""

import argparse
import gc
import json
from pathlib import Path

import torch

import ebbtide
from benchmarks.facts import facts
from benchmarks.zoo.compare import measure_model
from benchmarks.zoo.models import ZOO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--shares", nargs="*", type=float, default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each final plan")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--commit", default=None, help="commit of the measured code, if the tree is no git repository")
    options = parser.parse_args()
    device = torch.device("cuda")
    for name in options.models:
        shares = " ".join(map(str, options.shares))
        command = f"python -m benchmarks.zoo --models {name!r} --shares {shares} --steps {options.steps}"
        about = facts(command, torch.cuda.get_device_name(), options.commit)
        part = options.out / f"zoo-{name.replace(' ', '-')}.part"
        for result in measure_model(name, device, options.shares, options.steps):
            part.write_text(json.dumps({**about, **result}, indent=1) + "\n")
        print(name, part.read_text(), flush=True)
        part.rename(part.with_suffix(".json"))
        ebbtide.release_memory()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
