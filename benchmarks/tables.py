"""Generate the tables of the README and of pages in docs/ from committed files.

Figures come from benchmarks/results, releases of trainers from the files that pin them.

python -m benchmarks.tables           write them
python -m benchmarks.tables --check   fail if a table differs from its files
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bars import time_ratio

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
TARGETS = ROOT / "docs" / "targets.md"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
HIGHLIGHTS = ("A-plans",)
NAMES = {
    "nothing": "nothing",
    "checkpoint": "checkpoint every layer",
    "save_on_cpu": "torch `save_on_cpu(pin_memory=True)`",
    "trl": "TRL `OffloadActivations`",
    "torchtune": "torchtune `OffloadActivations`",
    "ebbtide": "**ebbtide, everything moved**",
    "torch selective": "torch selective checkpointing, attention and matmuls kept",
    "recompute": "**recompute**, inputs offloaded",
    "recompute, inputs kept": "**recompute**, inputs kept",
    "selective kept": "**selective**, attention and matmuls kept",
    "selective": "**selective**, attention and its projections offloaded",
    "selective, feed-forward too": "**selective**, feed-forward matmuls of 12 blocks offloaded too",
    "checkpoint's peak": "**a plan** for the budget that checkpointing needs",
    "17 GiB": "**a plan** for 17 GiB of activations",
    "24 GiB": "**a plan** for 24 GiB of activations",
    "40 GiB": "**a plan** for 40 GiB of activations: all fits",
    "auto": "**a plan** without a budget",
    "three quarters": "**a plan** for three quarters of the plain peak",
    "three quarters, by parts": "**a plan** for three quarters, regions: attention and feed-forwards",
    "checkpoint, TRL's offloading": "checkpoint every layer, TRL's `activation_offloading=True`",
    "checkpoint, ebbtide": 'checkpoint every layer, `activation_offloading=True` **after `ebbtide.compat.install("trl")`**',
    "all that the link carries": "**a plan** that moves as much as the link carries in a forward",
    "bare copies": "nothing, and bare copies of the bytes that the plan without a budget moves",
    "bare copies, 95 %": "nothing, and bare copies of 95 % of the link's bytes in a forward",
}
TITLES = {
    "everything": {
        "A": "Llama 1B shapes, batch 4 x 4096, bf16, eager",
        "A-compiled": "Llama 1B shapes, batch 4 x 4096, bf16, each layer compiled",
        "B": "Llama 8B shapes (16 layers), batch 1 x 8192, bf16, eager",
    },
    "recipes": {
        "A-recipes": "Recipes: Llama 1B shapes, batch 4 x 4096, bf16, eager",
        "B-32k-recipes": "Recipes: Llama 8B shapes (16 layers), batch 1 x 32768, bf16, eager",
    },
    "plans": {
        "A-plans": "Plans: Llama 1B shapes, batch 4 x 4096, bf16, eager",
        "A-unslowed": "Plans without a budget: Llama 1B shapes, batch 4 x 4096, bf16, eager",
        "A-compiled-plans": "Plans: Llama 1B shapes, batch 4 x 4096, bf16, each layer compiled",
        "B-32k-plans": "Plans: Llama 8B shapes (16 layers), batch 1 x 32768, bf16, eager",
        "MoE-plans": "Plans: 12 layers of 8 experts, batch 4 x 4096, bf16, eager",
        "ViT-plans": "Plans: ViT-L/16, batch 128, bf16, eager",
    },
    "trainers": {
        "T1": "TRL's SFT: Qwen3 1.7B shapes, batch 2 x 8192, bf16, eager",
        "T2": "TRL's SFT with LoRA: Qwen3 1.7B shapes, batch 2 x 8192, bf16, eager, no checkpointing",
        "T3": "diffusers' Wan: 1.3B shapes, 16384 tokens of video, bf16, eager",
    },
}
"""By group of tables in docs/measured.md: title of each result file."""

TRAINERS = ("transformers", "trl", "accelerate", "peft", "bitsandbytes", "torchao", "lightning", "diffusers")
"""Packages of constraints.txt that train."""

PREDICTED = {
    "A": "Llama 1B shapes",
    "B-32k": "Llama 8B shapes (16 layers)",
    "MoE": "12 layers of 8 experts",
    "ViT": "ViT-L/16",
}


def main() -> None:
    pages = {
        README: {"highlights": results_table({name: TITLES["plans"][name] for name in HIGHLIGHTS})},
        MEASURED: {
            **{group: results_table(titles) for group, titles in TITLES.items()},
            "predictions": predictions_table(),
        },
        TARGETS: {"bars": bars_table()},
        COMPATIBILITY: {"releases": releases_table()},
    }
    for page, tables in pages.items():
        before = after = page.read_text()
        for name, table in tables.items():
            after = _put(after, name, table)
        if "--check" not in sys.argv[1:]:
            page.write_text(after)
        elif before != after:
            sys.exit(f"{page.name}: a table differs from the committed files: run python -m benchmarks.tables")


def results_table(titles: Mapping[str, str]) -> str:
    """One table for each result file that exists."""
    found = ((title, _load(name)) for name, title in titles.items())
    return "\n\n".join(_modes_table(title, result) for title, result in found if result is not None)


def _modes_table(title: str, result: dict[str, Any]) -> str:
    versions, modes = result["versions"], result["modes"]
    base = "nothing" if "nothing" in modes else "checkpoint"
    rows = [
        f"{title} ({result['device']}, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"commit {result['commit']}; medians of {modes[base]['step_ms']['n']} steps)",
        "",
        f"| mode | step ms | x {'plain' if base == 'nothing' else base} | {_peak(modes[base])[0]}, GiB |",
        "|---|---|---|---|",
    ]
    for mode, figures in modes.items():
        if "failed" in figures:
            rows.append(f"| {NAMES[mode]} | fails: {figures['failed'].split(':')[0]} | | |")
            continue
        step = figures["step_ms"]["median"]
        ratio = time_ratio(figures, modes[base])
        rows.append(f"| {NAMES[mode]} | {step:.1f} | {ratio:.2f} | {_peak(figures)[1]:.2f} |")
    return "\n".join(rows)


def _peak(figures: dict[str, Any]) -> tuple[str, float]:
    """Return the kind of peak, and GiB."""
    if "peak_gib" in figures:
        return "peak of the device", figures["peak_gib"]
    return "peak of activations", figures["act_peak_gib"]


def bars_table() -> str:
    bars = _load("bars") or {}
    rows = ["| target | measured | bound | unit | met | commit |", "|---|---|---|---|---|---|"]
    for name, bar in bars.items():
        most = f"{'at least' if bar['is_floor'] else 'at most'} {bar['bar']:g}"
        holds = "yes" if bar["holds"] else "**no**"
        rows.append(f"| {name} | {bar['figure']:g} | {most} | {bar['unit']} | {holds} | {bar['commit']} |")
    return "\n".join(rows)


def predictions_table() -> str:
    """Write predicted against measured figures of plans on the Pareto curve of each workload."""
    rows = [
        "| workload | predicted ms | measured ms | off by | predicted peak, GiB | measured peak, GiB | off by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in PREDICTED.items():
        for row in (_load(f"{name}-predictions") or {}).get("predictions", ()):
            step, peak = (
                (row["predicted_ms"], row["measured_ms"]),
                (row["predicted_peak_gib"], row["measured_peak_gib"]),
            )
            rows.append(
                f"| {title} | {step[0]:.1f} | {step[1]:.1f} | {_off(*step)} | {peak[0]:.2f} | {peak[1]:.2f} | "
                f"{_off(*peak)} |"
            )
    return "\n".join(rows)


def releases_table() -> str:
    """The trainers' releases that the tests run with, and whether a trainer needs an environment of its own."""
    suite = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    rows = [(name, suite[name], "the suite's") for name in TRAINERS]
    for path in sorted((ROOT / "tests" / "trainers").glob("*.txt")):
        pinned = next(line for line in path.read_text().splitlines() if not line.startswith("#"))  # the trainer, first
        rows.append((*pinned.split("=="), "its own"))
    return "\n".join(
        ["| package | release | environment |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def _off(predicted: float, measured: float) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _put(text: str, name: str, table: str) -> str:
    """Replace the text between the markers of `name` with `table`."""
    start, end = f"<!-- {name}: generated -->\n", f"\n<!-- /{name} -->"
    head, rest = text.split(start)
    _, tail = rest.split(end)
    return head + start + table + end + tail


if __name__ == "__main__":
    main()
