"""`ebbtide plan`: the plan of a profile, and the time of a step by the plan."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from ebbtide._cli._output import check_files, console_for, write_file, write_json
from ebbtide._cli._plan_profile import WhatIf, budget_of, measure_model, measure_script
from ebbtide._config import SETTINGS, Budget, check_one_goal, checked_slowdown
from ebbtide._errors import ConfigError
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import format_bytes

if TYPE_CHECKING:
    from ebbtide._cli._plan_pareto import ParetoRow, Solvers


def _help_of(name: str, more: str = "") -> object:
    return tyro.conf.arg(help=f"{SETTINGS[name]}{more}")


@dataclass(frozen=True)
class MeasureOptions:
    """In place of a file: what to measure.

    Attributes:
        model: package.module:function that makes the model to measure, on its device and in training mode.
        batch: package.module:function that makes what the model is called with: a mapping, a tuple or one tensor.
        loss: package.module:function that makes a loss of the model's output. Default: the output's loss, or sum.
        store, min_bytes, regions: as for `offload`, for --model.
        script: a training script with ebbtide.offload(model) in it. The script runs until the fourth step.
        script_arguments: of the script, as one text, like the arguments behind "--".
        save_profile: a file for the profile.
    """

    model: str | None = None
    batch: str | None = None
    loss: str | None = None
    store: Annotated[str | None, _help_of("store", " For --model.")] = None
    min_bytes: Annotated[str | None, _help_of("min_bytes", " For --model.")] = None
    regions: Annotated[tuple[str, ...], _help_of("regions", " For --model.")] = ()
    script: Path | None = None
    script_arguments: str = ""
    save_profile: Path | None = None

    def measured(self, host_limit: str | None, output: TextIO) -> Profile:
        """`output`: of a script."""
        if self.model is None:
            assert self.script is not None
            return measure_script(self.script, self.script_arguments, output)
        return measure_model(self.model, self.batch, self.loss, self.store, self.min_bytes, host_limit, self.regions)


@dataclass(frozen=True)
class GoalOptions:
    """One of two; without either, moving alone makes the peak small.

    Attributes:
        budget, max_slowdown: as for `offload`.
    """

    budget: Annotated[str | None, _help_of("budget")] = None
    max_slowdown: Annotated[float | None, _help_of("max_slowdown")] = None


@dataclass(frozen=True)
class CurveOptions:
    """Time against memory.

    Attributes:
        pareto: print time against memory, from the smallest budget to the peak of keeping everything.
        points: how many budgets of the curve.
        picture: a file for a picture of the curve (png, svg, pdf).
    """

    pareto: Annotated[bool, tyro.conf.arg(aliases=["--front"])] = False
    points: int = 16
    picture: Path | None = None

    @property
    def is_wanted(self) -> bool:
        return self.pareto or self.picture is not None


def plan(
    profile: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    measure: Annotated[MeasureOptions, tyro.conf.OmitArgPrefixes],
    goal: Annotated[GoalOptions, tyro.conf.OmitArgPrefixes],
    what_if: Annotated[WhatIf, tyro.conf.OmitArgPrefixes],
    curve: Annotated[CurveOptions, tyro.conf.OmitArgPrefixes],
    save: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Plan from a profile: which regions keep, move or recompute what backward needs, and the time of a step.

    The profile is a file (no GPU is needed), or is measured: of a model and a batch, or in a training script,
    `ebbtide plan --script train.py -- its arguments`, which ends with the measured profile.

    Args:
        profile: the file of a profile.
        save: a file for the plan, for offload(model, plan=Plan.load(file)).
        as_json: print JSON, in bytes and seconds: the plan as in its file, and the curve.
    """
    what_if.check()
    check_one_goal(goal.budget, checked_slowdown(goal.max_slowdown))
    files = {"--save": save, "--save-profile": measure.save_profile, "--picture": curve.picture}
    check_files(files)
    if curve.points < 2:
        raise ConfigError(f"--points {curve.points}: expected 2 or more")
    if (profile is not None) + (measure.model is not None) + (measure.script is not None) != 1:
        raise ConfigError("write one of: the file of a profile, --model with --batch, --script")
    if measure.model is None:
        _check_no_model(measure)
    if measure.script is None and measure.script_arguments:
        raise ConfigError(
            f"there is no script to take {measure.script_arguments!r}: write --script train.py, or leave it out"
        )
    output = sys.stderr if as_json else sys.stdout
    measured = measure.measured(what_if.host_limit, output) if profile is None else Profile.load(profile)
    if measure.save_profile is not None:
        write_file("--save-profile", measure.save_profile, measured.save)
    _answer(measured, what_if, goal, save, curve, as_json)
    return 0


def _answer(
    measured: Profile, what_if: WhatIf, goal: GoalOptions, save: Path | None, curve: CurveOptions, as_json: bool
) -> None:
    """Print plans of a profile, as text or as JSON, and write their files."""
    # The planner is a third of the time of --help.
    from ebbtide._cli._plan_pareto import Solvers, pareto_table

    console = console_for(as_json)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    profile, notes = what_if.applied_to(measured)
    solvers, of = Solvers(profile), profile.made_for
    limit, plain = budget_of(goal.budget, profile), solvers.plain
    result: dict[str, Any] = {
        "made_for": of,
        "tokens": profile.tokens,
        "plain": {"step_s": plain.step_s, "peak_bytes": plain.peak_bytes},
        "smallest_budget_bytes": solvers.solver.smallest_budget(),
        "notes": notes,
    }
    say(
        f"{of.get('model', 'a model')} on {of.get('device', 'a device')}, {len(profile.regions)} regions, "
        f"{profile.tokens} tokens: {plain.step_s * 1e3:.1f} ms at a peak of {format_bytes(plain.peak_bytes)} with "
        f"everything kept; the smallest budget is {format_bytes(solvers.solver.smallest_budget())}."
    )
    for note in notes:
        say(note)
    if not profile.has_recomputation and (goal != GoalOptions() or curve.is_wanted):
        say(
            "This profile was measured without a budget and has no times of recomputation: its plans keep and move "
            "only, and offload(model, budget=...) refuses it. Measure a profile with a budget, by --model or by "
            "--script."
        )
    if not curve.is_wanted or goal != GoalOptions() or save is not None:
        budget_bytes = None if limit is None else limit(profile.device_bytes or 0)
        planned = solvers.solver.solve(budget_bytes, max_slowdown=goal.max_slowdown)
        planned = replace(planned, budget="" if limit is None else str(limit))
        result["plan"] = asdict(planned)
        say(f"\n{planned}")
        if save is not None:
            write_file("--save", save, planned.save)
            say(f"Saved: {save}, for offload(model, plan=Plan.load({str(save)!r})).")
    if curve.is_wanted:
        rows = solvers.rows(curve.points)
        result["curve"] = [row.figures() for row in rows]
        console.print()
        console.print(pareto_table(rows, profile.plain_s))
        say("only moving, only recomputing: times the plain step, of the fastest plan that does nothing else.")
        if curve.picture is not None:
            _draw(solvers, rows, limit, curve.picture)
            say(f"Picture: {curve.picture}")
    if as_json:
        write_json(result)


def _draw(solvers: "Solvers", rows: "Sequence[ParetoRow]", limit: Budget | None, picture: Path) -> None:
    from ebbtide._reports.pictures import pareto

    profile, plain = solvers.solver.profile, solvers.plain
    curves = {
        "planned: keep, move, recompute": [(row.budget_bytes, row.predicted.step_s) for row in rows],
        "only moving": solvers.only_moving(len(rows)),
        "only recomputing": solvers.only_recomputing(len(rows)),
    }
    title = " on ".join(profile.made_for[key] for key in ("model", "device") if key in profile.made_for)
    limits = {"budget": None if limit is None else limit(profile.device_bytes or 0), "device": profile.device_bytes}
    known = {name: nbytes for name, nbytes in limits.items() if nbytes}
    figure = pareto(curves, {}, known, (plain.peak_bytes, plain.step_s), title)
    write_file("--picture", picture, lambda path: figure.savefig(path))


def _check_no_model(measure: MeasureOptions) -> None:
    """Raises ConfigError for options of measuring a model."""
    for name in ("batch", "loss", "store", "min_bytes", "regions"):
        if getattr(measure, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a model that is measured here: write --model with it, or leave it "
                "out. A file says what was measured, and a script's settings belong into its own offload(...)"
            )
