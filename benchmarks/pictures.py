"""Draw the pictures of the documentation, from the committed profiles and the planner's simulator.

python -m benchmarks.pictures

The pictures of a report are taken by Chromium, which has to be installed.
"""

import dataclasses
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ebbtide._cli._plan_pareto import Solvers
from ebbtide._engine.stats import Stats
from ebbtide._planner.options import Option, option_for
from ebbtide._planner.simulate import Outcome, Windows, simulate, windows_within
from ebbtide._plans import Plan, Recipe
from ebbtide._profiling.profile import Profile
from ebbtide._reports.page import run_page
from ebbtide._reports.run import Run
from ebbtide._utils.sizes import GIB

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
PROFILES = ROOT / "benchmarks" / "results" / "profiles"
BUDGET = 20 * GIB
WORKLOADS = {
    "ViT": "ViT-L/16, batch 128",
    "MoE": "12 layers of 8 experts, 4 x 4096",
    "A": "Llama 1B shapes, 4 x 4096",
    "B-32k": "Llama 8B shapes, 1 x 32768",
}
GREY, BLUE, ORANGE, GREEN = "#8a8a8a", "#2a7fc0", "#d1661f", "#3a8f3a"

# Text stays text, and a second run writes equal files. Grey is legible on white and on black.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ebbtide", "font.family": "sans-serif"})
mpl.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY))
mpl.rcParams.update({"axes.edgecolor": GREY, "axes.spines.top": False, "axes.spines.right": False})


def memory_of_a_step() -> None:
    """Memory over a step: all kept, all recomputed, and by a plan."""
    profile = Profile.load(PROFILES / "A.json")
    solvers = Solvers(profile)
    curves = {
        "everything kept": (outcome_of(profile, solvers.solver.keeping_all(), 2**60), GREY),
        f"plan for {BUDGET // GIB} GiB": (outcome_of(profile, solvers.solver.solve(BUDGET), BUDGET), BLUE),
        "every block recomputed": (outcome_with(profile, Recipe("recompute", inputs="keep")), ORANGE),
    }
    figure, axes = new("time (ms)", "device memory (GiB)")
    for label, (outcome, colour) in curves.items():
        times = [moment.seconds * 1e3 for moment in outcome.curve]
        gib = [moment.nbytes / GIB for moment in outcome.curve]
        axes.plot(times, gib, color=colour, label=f"{label}: {outcome.step_s * 1e3:.0f} ms, {max(gib):.1f} GiB")
        axes.axvline(outcome.forward_s * 1e3, color=colour, linewidth=0.6, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right")
    save(figure, "memory_of_a_step")


def outcome_of(profile: Profile, plan: Plan, budget_bytes: int) -> Outcome:
    choice = [option_for(region, plan.regions[region.name].recipe) for region in profile.regions]
    return simulate(profile, choice, widest(profile, choice, budget_bytes))


def outcome_with(profile: Profile, recipe: Recipe) -> Outcome:
    choice = [option_for(region, recipe) for region in profile.regions]
    return simulate(profile, choice, widest(profile, choice, 2**60))


def widest(profile: Profile, choice: Sequence[Option], budget_bytes: int) -> Windows:
    windows = windows_within(profile, choice, budget_bytes)
    assert windows is not None
    return windows


def seconds_of_a_block() -> None:
    """What a block's activations cost: forward's seconds to recompute, or the link's seconds to carry."""
    figure, axes = new("ms for one block", "")
    for row, name in enumerate(WORKLOADS):
        profile = Profile.load(PROFILES / f"{name}.json")
        region = profile.regions[len(profile.regions) // 2]
        bars = (
            ("forward and backward of the block", region.forward_s + region.backward_s, GREY),
            ("recompute its forward", region.recompute_s, ORANGE),
            ("move its activations out", region.saved_bytes / profile.link.out, BLUE),
        )
        for place, (label, seconds, colour) in enumerate(bars):
            y = row + 0.25 * (place - 1)
            axes.barh(y, seconds * 1e3, 0.22, color=colour, label=label if row == 0 else None)
            axes.annotate(f"{seconds * 1e3:.1f}", (seconds * 1e3, y), (3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(WORKLOADS)), list(WORKLOADS.values()))
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="upper right")
    save(figure, "seconds_of_a_block")


def lanes_of_a_step() -> None:
    """A schematic step of four blocks: the last block's tensors stay, all others travel."""
    blocks, forward, backward, copy = 4, 1.0, 2.0, 1.0
    end = blocks * forward
    figure, axes = new("time", "", height=2.6)
    for block in range(blocks):
        bar(axes, "compute", block * forward, forward, f"F{block + 1}", GREY)
        bar(axes, "compute", end + (blocks - 1 - block) * backward, backward, f"B{block + 1}", GREY)
    for block in range(blocks - 1):
        bar(axes, "outbound lane", (block + 1) * forward, copy, f"out {block + 1}", BLUE)
        starts = end + (blocks - 1 - block) * backward
        bar(axes, "inbound lane", starts - copy, copy, f"in {block + 1}", GREEN)
    axes.axvline(end, color=GREY, linewidth=0.6, linestyle=":")
    axes.invert_yaxis()
    axes.set_xticks([])
    save(figure, "lanes_of_a_step")


def bar(axes: Axes, lane: str, start: float, length: float, text: str, colour: str) -> None:
    axes.barh(lane, length, 0.6, left=start, color=colour, alpha=0.85, edgecolor="white")
    axes.text(start + length / 2, lane, text, ha="center", va="center", color="white", fontsize=9)


def time_against_memory() -> None:
    """The fastest step at each budget, by all actions, by moving alone and by recomputing alone."""
    profile = Profile.load(PROFILES / "A.json")
    solvers = Solvers(profile)
    mixed = [(row.budget_bytes, row.predicted.step_s) for row in solvers.rows(24)]
    figure, axes = new("budget (GiB)", "predicted step (ms)")
    for label, points, colour in (
        ("keep, move, recompute", mixed, BLUE),
        ("keep, recompute", solvers.only_recomputing(24), ORANGE),
        ("keep, move", solvers.only_moving(24), GREEN),
    ):
        axes.plot([nbytes / GIB for nbytes, _ in points], [s * 1e3 for _, s in points], color=colour, label=label)
    # Plans that only move take several times as long at small budgets, and leave the picture.
    axes.set_ylim(0.97 * solvers.plain.step_s * 1e3, 1.3 * solvers.plain.step_s * 1e3)
    axes.legend(frameon=False)
    save(figure, "time_against_memory")


def page_of_a_run() -> None:
    """The page of `ebbtide report` at desk and phone width, for a plan without steps."""
    profile = Profile.load(PROFILES / "A.json")
    plan = dataclasses.replace(Solvers(profile).solver.solve(BUDGET), budget=f"{BUDGET // GIB}GiB")
    run = Run.of(Stats(budget_bytes=BUDGET), profile.made_for, plan, profile)
    with tempfile.NamedTemporaryFile("w", suffix=".html") as page:
        page.write(run_page(run))
        page.flush()
        for name, size, scheme in (("report_light", "1280,1370", 1), ("report_phone_dark", "420,1370", 0)):
            command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            command += [f"--window-size={size}", f"--blink-settings=preferredColorScheme={scheme}"]
            subprocess.run([*command, f"--screenshot={PICTURES / name}.png", page.name], check=True)


def new(x: str, y: str, height: float = 3.6) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def save(figure: Figure, name: str) -> None:
    figure.savefig(PICTURES / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    memory_of_a_step()
    seconds_of_a_block()
    lanes_of_a_step()
    time_against_memory()
    page_of_a_run()
