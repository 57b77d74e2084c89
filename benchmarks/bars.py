"""Bars: limits for measured figures, judged from the result files. A figure beyond its bar is reported as well.

python -m benchmarks.bars    judge the committed files
"""

import functools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

GIB = 2**30


class Bar(NamedTuple):
    """A figure with its upper limit `bar`; with `is_floor`, its lower limit."""

    id: str
    figure: float
    bar: float
    unit: str
    is_floor: bool = False

    @property
    def holds(self) -> bool:
        return self.figure >= self.bar if self.is_floor else self.figure <= self.bar


def judge(folder: Path) -> dict[str, dict[str, Any]]:
    """Judge every bar with figures in `folder`. Returns a mapping by id."""
    judged: dict[str, dict[str, Any]] = {}
    models = [path.stem.removeprefix("zoo-") for path in sorted(folder.glob("zoo-*.json"))]
    zoo = {f"zoo-{model}": functools.partial(_zoo, model) for model in models}
    for name, bars_of in {**_JUDGES, **zoo}.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        facts = {key: result[key] for key in ("command", "device", "versions", "commit", "date")}
        for bar in bars_of(result):
            judged[bar.id] = {
                "figure": round(bar.figure, 4), "bar": bar.bar, "is_floor": bar.is_floor, "unit": bar.unit,
                "holds": bar.holds, **facts,
            }  # fmt: skip
    return dict(sorted(judged.items()))


def _eager(result: dict[str, Any]) -> Iterator[Bar]:
    modes = result["modes"]
    ours, plain = modes["ebbtide"], modes["nothing"]
    yield Bar("E1", _over_bound(result), 1.03, "x max(plain step, 2 x distinct bytes / link rate)")
    yield Bar("E1-peak", ours["act_peak_gib"], 7.0, "GiB of activations at the peak")
    yield Bar("E3", result["nothing_qualifies_ratio"], 1.005, "x plain step, nothing qualifies")
    steady = result["steady"]
    yield Bar("E5-pinned", steady["new_pinned_allocations"], 0, "pinned allocations after warm-up")
    yield Bar("E5-syncs", float(not steady["is_quiet"]), 0, "steps that synchronised the host")
    yield Bar("E5-memory", steady["memory_drift_bytes"], 0, "bytes of drift from step to step")
    freed = (plain["act_peak_gib"] - ours["act_peak_gib"]) * GIB
    yield Bar("E6", freed / ours["one_step"]["out_bytes"], 0.99, "freed / moved", is_floor=True)


def _pipelines(result: dict[str, Any]) -> Iterator[Bar]:
    for name, modes in result.items():
        by_hand = modes.get("attention's core and qkv", {}) if ", rank " in name else {}
        if "of_plain" not in by_hand:  # not of a rank, or from before modes took turns
            continue
        rank, is_interleaved = name[-1], name.startswith("Interleaved1F1B")
        bar, most = (f"M1-rank{rank}", 1.003) if is_interleaved else (f"M2-{name[:-8]}-rank{rank}", 1.01)
        yield Bar(bar, by_hand["of_plain"], most, "x plain step, core attention and qkv moved")
        if not is_interleaved:
            continue
        drop = (modes["plain"]["peak_gib"] - by_hand["peak_gib"]) / by_hand["away_gib"]
        yield Bar(f"M1-drop-rank{rank}", drop, 0.99, "of what is in host memory at most", is_floor=True)
        yield Bar(f"M3-rank{rank}", modes["no budget"]["of_plain"], 1.01, "x plain step, no budget")
        off = by_hand["peak_gib"] - modes["no budget"]["peak_gib"]
        yield Bar(f"M3-off-rank{rank}", off, 0.0, "GiB more off the peak than by hand", is_floor=True)


def _megatron(result: dict[str, Any]) -> Iterator[Bar]:
    for words, modes in result["gpt"].items():
        if "Megatron" not in modes:  # a plan
            continue
        ours, theirs = modes["ebbtide"], modes["Megatron"]
        yield Bar(f"N5b {words}", time_ratio(ours, theirs), 1.0, "x the step with Megatron's own offloading")
        for kind in ("active", "allocated"):
            peaks = ours[f"peak_{kind}_gib"] / theirs[f"peak_{kind}_gib"]
            yield Bar(
                f"N5b-{kind} {words}", peaks, 1.0, f"x the {kind} memory at the peak of Megatron's own offloading"
            )
        others = sum(not mode["gradients are plain's"] for mode in modes.values())
        yield Bar(f"N5b-bits {words}", others, 0, "modes whose gradients are not plain's")
    multihot = result["multihot"]
    yield Bar("N6-bits", multihot["cases"] - multihot["equal"], 0, f"of {multihot['cases']} cases unlike Megatron's")
    yield Bar("N6", multihot["ebbtide_ms"] / multihot["Megatron_ms"], 1.0, "x Megatron's milliseconds, both ways")
    waits = result["waits"]
    stalls = {name: each["moved"]["of_plain"] - 1 for name, each in waits.items()}
    more = stalls["mixture, without waits"] - stalls["dense"]
    yield Bar("N7", more, 0.0, "of a step lost to moves beyond what the dense layers lose, without waits")
    named = {wait["line"] for wait in waits["mixture"]["waits of a step"]}
    # Of backward torch names the line of its own that runs it.
    by_torch = {line for line in waits["mixture"]["waiting lines, by torch"] if not line.startswith("autograd/")}
    yield Bar("N7-named", len(by_torch - named), 0, "waiting lines that torch names and the detector does not")


def _megatron_pipeline(result: dict[str, Any]) -> Iterator[Bar]:
    for name, modes in result["pipeline"].items():
        rank, ours = name.replace(" ", ""), modes["ebbtide"]
        yield Bar(f"M6-{rank}", ours["of_plain"], 1.003, "x plain step, core attention and qkv moved")
        drop = (modes["plain"]["peak_active_gib"] - ours["peak_active_gib"]) / ours["away_gib"]
        yield Bar(f"M6-drop-{rank}", drop, 0.99, "of what is in host memory at most", is_floor=True)


_SHARDS = {"fsdp2": ("M4", "FSDP2"), "tp": ("M5", "tensor and sequence parallelism")}


def _shards(result: dict[str, Any]) -> Iterator[Bar]:
    for name, ranks in result.items():
        parts = name.split(", ")
        layout = parts[0] if len(parts) == 3 else "fsdp2"  # the only one in earlier files
        if layout not in _SHARDS or not name.endswith("tokens"):
            continue
        tokens = int(name.split()[-2])
        bar, words = _SHARDS[layout]
        if "no budget" in ranks[0]:
            slowest = max(
                2 * r["no budget"]["step_ms"] / (r["plain"]["step_ms"] + r["plain again"]["step_ms"]) for r in ranks
            )
            yield Bar(f"{bar}-{len(ranks)}-no-budget-{tokens}", slowest, 1.01, f"x plain {words}, {tokens} tokens")
        pairs = [(each["a plan at checkpointing's peak"], each["checkpoint"]) for each in ranks]
        slowest = max(plan["step_ms"] / theirs["step_ms"] for plan, theirs in pairs)
        if tokens == 32768:
            yield Bar(f"{bar}-{len(ranks)}", slowest, 0.87, f"x {words} with checkpointing, at its peak")
        over = max(max(plan["peaks_gib"]) - theirs["peak_gib"] for plan, theirs in pairs)
        unit = "GiB above the budget, the worst step of any rank"
        yield Bar(f"M8-{layout}-{len(ranks)}-{tokens}", over, 0.0, unit)


def _compiled_llama(result: dict[str, Any]) -> Iterator[Bar]:
    for bar, run, most, what in (
        ("C1", result["checkpointing"]["plan"], 1.17, "at checkpointing's peak"),
        ("C2", result["within 12 GiB"], 1.09, "within 12 GiB of activations"),
        ("C3", result["within 5.95 GiB"], 1.21, "within 5.95 GiB of activations"),
    ):
        yield Bar(bar, run["step_ms"] / result["plain"]["step_ms"], most, f"x compiled plain, {what}")
    yield from _compiled_points("Llama", result)


def _compiled_points(model: str, result: dict[str, Any]) -> Iterator[Bar]:
    rivals = [each for name, each in result.items() if name.startswith("budget ")]
    times = [each["plan"]["step_ms"] / each["step_ms"] for each in rivals]
    yield Bar(f"C4-{model}-worst", max(times), 1.0, "x the knob alone at its peak")
    yield Bar(f"C4-{model}", statistics.geometric_mean(times), 0.96, "x the knob alone at its peak, geometric mean")
    over = [
        _total_gib(each["plan"], "most_gib") - _total_gib(each, "peak_gib")
        for each in (result["checkpointing"], *rivals)
    ]
    within = [(float(name.split()[1]), run) for name, run in result.items() if name.startswith("within ")]
    over += [run["most_gib"] - gib for gib, run in within]
    yield Bar(f"C7-{model}", max(over), 0.0, "GiB above the budget, the worst step of any plan, measured steps too")
    slowdown = result["no budget"]["step_ms"] / result["plain"]["step_ms"]
    yield Bar(f"C5-{model}", slowdown, 1.01, "x compiled plain, no budget")


def _total_gib(steps: dict[str, Any], peak: str) -> float:
    return steps["base_bytes"] / GIB + steps[peak]


def _compiled(result: dict[str, Any]) -> Iterator[Bar]:
    yield Bar("E2", _over_bound(result), 1.03, "x max(plain step, 2 x distinct bytes / link rate)")
    yield Bar("E2-peak", result["modes"]["ebbtide"]["act_peak_gib"], 6.9, "GiB of activations at the peak")


def _host_cost(result: dict[str, Any]) -> Iterator[Bar]:
    yield Bar("E4-kept", result["kept_us"], 3.0, "us per kept saved tensor")
    yield Bar("E4-moved", result["moved_us"], 50.0, "us per moved saved tensor, out and in")
    steps = result["step_ms"]
    for mode, to, limit in (
        ("keep", "plain", 1.03),
        ("nothing qualifies", "plain", 1.03),
        ("recompute", "checkpoint", 1.0),
        ("selective", "checkpoint", 1.5),
    ):
        yield Bar(f"Z6-{mode}", steps[mode] / steps[to], limit, f"x {to} step: 24 tiny blocks")


def _observers(result: dict[str, Any]) -> Iterator[Bar]:
    shares = result["shares"]
    yield Bar(
        "S-observed",
        shares["events"] + shares["stats"],
        0.01,
        "of a step of Llama A: a listener, and stats() each step",
    )
    yield Bar("S-idle", shares["idle"], 0.001, "of a step of Llama A: events without a listener")


def _zoo(model: str, result: dict[str, Any]) -> Iterator[Bar]:
    points = result["points"]
    runs = [*points, result["no budget"], result["at most 5 % slower"]]
    worst = max(_of_rival(point, result) for point in points)
    yield Bar(f"Z1 {model}", worst, 1.0, "x the step of the fewest blocks checkpointed, at the worst budget")
    yield Bar(f"Z2 {model}", sum(point["steps_over"] for point in points), 0, "steps over the budget")
    yield Bar(f"Z3 {model}", max(map(_first_steps_s, runs)), 3.0, "s more for the first 20 steps")
    yield Bar(f"Z3-later {model}", max(run["slowest_later"] for run in runs), 1.3, "x the median: the slowest step")
    predicted = [run for run in runs if run["predicted_ms"] is not None]
    off = max((abs(run["predicted_ms"] / run["step_ms"] - 1) for run in predicted), default=0.0)
    yield Bar(f"Z4 {model}", off, 0.05, "of a step: error of the predicted time, at the worst budget")
    if "base_gib" in result:
        pairs = [(each["predicted_peak_bytes"], each["peak_gib"]) for each in points if each["predicted_peak_bytes"]]
        off = max((abs(own / (gib + result["base_gib"]) / GIB - 1) for own, gib in pairs), default=0.0)
        yield Bar(f"Z4-peak {model}", off, 0.02, "of the peak: error of the predicted peak, at the worst budget")
    for bar, goal, most in (("Z5", "no budget", 1.01), ("Z5-slower", "at most 5 % slower", 1.055)):
        yield Bar(f"{bar} {model}", _of_rival(result[goal], result), most, f"x plain step: {goal}")
    if all("solving_s" in run for run in runs):
        yield Bar(f"Z7 {model}", max(run["solving_s"] for run in runs), 2.0, "s of one core to plan for a goal")


def _of_rival(run: dict[str, Any], result: dict[str, Any]) -> float:
    """A step over a step of the rival. In files from before both took turns, the medians of all steps."""
    if "of_rival" in run:
        return float(run["of_rival"])
    rival_ms = run["rival"]["step_ms"] if "rival" in run else result["plain_ms"]
    return float(run["step_ms"] / rival_ms)


def _first_steps_s(run: dict[str, Any]) -> float:
    """With pinning, unless more than 16 GiB were pinned. Files before pinning was measured have no figures for it."""
    is_large = run.get("pinned_gib", 0.0) > 16
    return run["first_steps_cost_s"] - (run["pinning_s"] if is_large else 0.0)


def _races(result: dict[str, Any]) -> Iterator[Bar]:
    yield Bar(
        "E7-clean", result["clean"], 1000, "random programs equal to their twins and free of races", is_floor=True
    )
    yield Bar("E7-caught", result["caught"] / result["mutations"], 1.0, "of the mutations caught", is_floor=True)


def _soak(result: dict[str, Any]) -> Iterator[Bar]:
    steps = f"of a soak of {result['steps']} steps"
    yield Bar("K-mismatches", result["mismatches"], 0, f"rounds that differ from their twins, {steps}")
    yield Bar("K-growth", sum(grown > 0 for grown in result["growth"].values()), 0, f"counters that grow, {steps}")


def _demo(result: dict[str, Any]) -> Iterator[Bar]:
    runs = result["runs"]
    same = [runs[name]["loss_bits"] for name in ("plain", "offloaded")]
    yield Bar(
        "E8", result["verdict"]["saved_share"], 0.5, "of a step's activations off the resident peak", is_floor=True
    )
    yield Bar("E8-bits", float(same[0] != same[1]), 0, "runs of the demo whose losses differ")


def _recipes(result: dict[str, Any]) -> Iterator[Bar]:
    modes = result["modes"]
    ours, inputs_kept, checkpoint = modes["recompute"], modes["recompute, inputs kept"], modes["checkpoint"]
    yield Bar("R3", time_ratio(ours, checkpoint), 1.01, "x checkpointing's step: recompute, inputs offloaded")
    lower_gib = min(checkpoint["act_peak_gib"], inputs_kept["act_peak_gib"]) - ours["act_peak_gib"]
    share = lower_gib / result["inputs_but_the_last_gib"]
    yield Bar("R3-peak", share, 0.95, "of the inputs' bytes off the peak", is_floor=True)
    kept, torchs = modes["selective kept"], modes["torch selective"]
    yield Bar("R4", time_ratio(kept, torchs), 1.02, "x torch's selective checkpointing, the same operators kept")
    yield Bar(
        "R4-peak", kept["act_peak_gib"] / torchs["act_peak_gib"], 1.0, "x the peak of torch's selective checkpoint"
    )
    for bar, recipe in (("R5", "selective"), ("R5-recompute", "recompute")):
        yield Bar(bar, result[f"captured, {recipe}"]["ratio"], 1.01, f"x the eager step: one captured graph, {recipe}")


def _long_recipes(result: dict[str, Any]) -> Iterator[Bar]:
    modes = result["modes"]
    checkpoint = modes["checkpoint"]
    for bar, mode, step, peak in (("R1", "selective", 0.90, 0.85), ("R2", "selective, feed-forward too", 0.85, 1.0)):
        yield Bar(bar, time_ratio(modes[mode], checkpoint), step, f"x checkpointing's step: {mode}")
        share = modes[mode]["act_peak_gib"] / checkpoint["act_peak_gib"]
        yield Bar(f"{bar}-peak", share, peak, "x checkpointing's peak")


def _unslowed(result: dict[str, Any]) -> Iterator[Bar]:
    modes, released = result["modes"], result["steady"]["auto"]
    plain, auto = modes["nothing"], modes["auto"]
    yield Bar("P1", time_ratio(auto, plain), 1.005, "x plain step: no budget")
    carried = released["forward_s"] * result["link"]["out_gb_per_s"] * 1e9
    yield Bar("P1-moved", released["released_bytes"] / carried, 0.95, "of the link's bytes in a forward", True)
    freed = (plain["act_peak_gib"] - auto["act_peak_gib"]) * GIB
    if released["released_bytes"] > 0:
        yield Bar("P1-peak", freed / released["released_bytes"], 0.99, "of the released bytes, off the peak", True)
    yield Bar("P1-packed", result["packed"]["ratio"]["median"], 1.01, "x plain step: a new shape every step")


def _plans(result: dict[str, Any]) -> Iterator[Bar]:
    modes = result["modes"]
    plain = modes["nothing"]
    roomy = modes["40 GiB"]
    yield Bar("P2", time_ratio(roomy, plain), 1.002, "x plain step: all fits the budget")
    yield Bar("P2-moved", result["plans"]["40 GiB"]["moved_gib"], 0, "GiB moved: all fits the budget")
    for bar, key, most in (("P3", "checkpoint's peak", 1.19), ("P3-17", "17 GiB", 1.12), ("P3-24", "24 GiB", 1.06)):
        yield Bar(bar, time_ratio(modes[key], plain), most, f"x plain step: budget of {key}")
        over = modes[key]["act_peak_gib"] / result["budgets_gib"][key]
        yield Bar(f"{bar}-peak", over, 1.0, "x the budget")


def _long_plans(result: dict[str, Any]) -> Iterator[Bar]:
    modes, key = result["modes"], "checkpoint's peak"
    yield Bar("P4", time_ratio(modes[key], modes["checkpoint"]), 0.85, "x checkpointing's step, planned at its peak")
    yield Bar("P4-peak", modes[key]["act_peak_gib"] / result["budgets_gib"][key], 1.0, "x the budget")


def _compiled_plans(result: dict[str, Any]) -> Iterator[Bar]:
    modes, key = result["modes"], "checkpoint's peak"
    yield Bar("P5", time_ratio(modes[key], modes["nothing"]), 1.25, "x compiled plain step, at checkpointing's peak")
    yield Bar("P5-peak", modes[key]["act_peak_gib"] / result["budgets_gib"][key], 1.0, "x the budget")


def _predictions(name: str, result: dict[str, Any]) -> Iterator[Bar]:
    rows = result["predictions"]
    for key, unit, most in (("ms", "step time", 0.05), ("peak_gib", "peak", 0.03)):
        errors = [abs(row[f"predicted_{key}"] / row[f"measured_{key}"] - 1) for row in rows]
        yield Bar(f"P6-{name}-{key.partition('_')[0]}", max(errors), most, f"largest error of the {unit}, {name}")


def _sft(result: dict[str, Any]) -> Iterator[Bar]:
    modes = result["modes"]
    ours, trls = modes["checkpoint, ebbtide"], modes["checkpoint, TRL's offloading"]
    yield Bar("T1", time_ratio(ours, modes["checkpoint"]), 1.02, "x checkpointing's step, TRL's option after install")
    yield Bar("T1-peak", ours["peak_gib"] / trls["peak_gib"], 1.0, "x the peak of TRL's offloading")
    unequal = result["steps_compared"] - result["equal_losses"]
    yield Bar("T1-bits", unequal, 0, "losses that differ from checkpointing's, of 20 steps")


def _sft_adapter(result: dict[str, Any]) -> Iterator[Bar]:
    ours, plain = result["modes"]["auto"], result["modes"]["nothing"]
    yield Bar("T2", time_ratio(ours, plain), 1.005, "x plain step, LoRA: no budget")
    yield Bar("T2-moved", ours["moved_bytes_in_a_step"], 1, "bytes moved in a step", is_floor=True)


def _wan(result: dict[str, Any]) -> Iterator[Bar]:
    modes = result["modes"]
    for bar, mode, regions in (
        ("T3", "three quarters, by parts", "regions=attention, feed-forward"),
        ("T3-blocks", "three quarters", "regions by default"),
    ):
        # Peaks of the device, with parameters and gradients.
        peaks = [result["base_gib"] + modes[key]["act_peak_gib"] for key in (mode, "nothing")]
        share = time_ratio(modes[mode], modes["nothing"])
        yield Bar(bar, share, 1.02, f"x plain step: budget of three quarters of its peak, {regions}")
        yield Bar(f"{bar}-peak", 1 - peaks[0] / peaks[1], 0.25, "of the plain peak saved", is_floor=True)


def time_ratio(mode: dict[str, Any], base: dict[str, Any]) -> float:
    """Return the step time of `mode` over the step time of `base`.

    For modes measured in turns, the median of the ratios of turns: turns near in time had equal clocks. A mode may have
    had more turns than the base.
    """
    turns = list(zip(mode.get("turns_ms", ()), base.get("turns_ms", ()), strict=False))
    if turns:
        return statistics.median(ours / plain for ours, plain in turns)
    return mode["step_ms"]["median"] / base["step_ms"]["median"]


def _over_bound(result: dict[str, Any]) -> float:
    link = result["link"]  # rates differ between machines: measured in the run itself
    ours, plain = result["modes"]["ebbtide"], result["modes"]["nothing"]
    nbytes = ours["one_step"]["parcels_bytes"]
    bound_ms = (nbytes / link["out_gb_per_s"] + nbytes / link["in_gb_per_s"]) / 1e6
    return ours["step_ms"]["median"] / max(plain["step_ms"]["median"], bound_ms)


_JUDGES = {
    "A": _eager,
    "pipelines": _pipelines,
    "pipelines-others": _pipelines,
    "megatron": _megatron,
    "megatron-pipeline": _megatron_pipeline,
    "fsdp2": _shards,
    "shards-2": _shards,
    "shards-4": _shards,
    "compiled-Llama-A": _compiled_llama,
    "compiled-ViT-L": functools.partial(_compiled_points, "ViT"),
    "compiled-SD3": functools.partial(_compiled_points, "DiT"),
    "A-compiled": _compiled,
    "A-recipes": _recipes,
    "B-32k-recipes": _long_recipes,
    "A-unslowed": _unslowed,
    "A-plans": _plans,
    "A-compiled-plans": _compiled_plans,
    "B-32k-plans": _long_plans,
    "A-predictions": lambda result: _predictions("A", result),
    "B-32k-predictions": lambda result: _predictions("B", result),
    "MoE-predictions": lambda result: _predictions("MoE", result),
    "ViT-predictions": lambda result: _predictions("ViT", result),
    "T1": _sft,
    "T2": _sft_adapter,
    "T3": _wan,
    "host-cost": _host_cost,
    "observers": _observers,
    "races": _races,
    "soak": _soak,
    "demo": _demo,
}


if __name__ == "__main__":
    RESULTS = Path(__file__).parent / "results"
    (RESULTS / "bars.json").write_text(json.dumps(judge(RESULTS), indent=1) + "\n")
