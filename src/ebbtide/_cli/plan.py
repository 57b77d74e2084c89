"""`ebbtide plan`: the plan of a profile, and the time of a step by the plan."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ebbtide._cli._plan_profile import WhatIf, budget_of, measure_model, measure_script
from ebbtide._config import check_one_goal, checked_slowdown
from ebbtide._errors import ConfigError
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import format_bytes


def plan(
    profile: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    model: str | None = None,
    batch: str | None = None,
    loss: str | None = None,
    script: Path | None = None,
    script_arguments: str = "",
    save_profile: Path | None = None,
    budget: str | None = None,
    max_slowdown: float | None = None,
    link: float | None = None,
    tokens: int | None = None,
    scale: float | None = None,
    host_limit: str | None = None,
    reserve: str | None = None,
    graphs: int | None = None,
    save: Path | None = None,
    pareto: Annotated[bool, tyro.conf.arg(aliases=["--front"])] = False,
    points: int = 16,
    picture: Path | None = None,
    store: str | None = None,
    min_bytes: str | None = None,
    regions: tuple[str, ...] = (),
) -> int:
    """Plan from a profile: which regions keep, move or recompute what backward needs, and the time of a step.

    The profile is a file (no GPU is needed), or is measured: of a model and a batch, or in a training script,
    `ebbtide plan --script train.py -- its arguments`, which ends with the measured profile.

    Args:
        profile: the file of a profile.
        model: package.module:function that makes the model to measure, on its device and in training mode.
        batch: package.module:function that makes what the model is called with: a mapping, a tuple or one tensor.
        loss: package.module:function that makes a loss of the model's output. Default: the output's loss, or sum.
        script: a training script with ebbtide.offload(model) in it. The script runs until the fourth step.
        script_arguments: of the script, as one text, like the arguments behind "--".
        save_profile: a file for the profile.
        budget: Peak of device memory to stay under: bytes, text like "40GiB", or a share of the device memory: 0.8
            or "80%".
        max_slowdown: Largest slowdown of a step as a share, 0.05 for 5 %: the planner keeps, moves and recomputes for
            the smallest peak. Default: 0.01, by moving alone; not beside a budget.
        link: what if the link carried so many GB/s each way.
        tokens: what if a batch had so many tokens: elements of the largest tensor that the model is called with.
        scale: what if a batch had so many times the measured tokens.
        host_limit: what if the store took so much at most, "64GiB".
        reserve: memory in use before the step besides, "9GiB": the optimizer's state, if the profile has none.
        graphs: forwards before the first backward: of a pipeline's stage, or of one loss.
        save: a file for the plan, for offload(model, plan=Plan.load(file)).
        pareto: print time against memory, from the smallest budget to the peak of keeping everything.
        points: how many budgets of the curve.
        picture: a file for a picture of the curve (png, svg, pdf).
        store: Where parcels wait: "host" (pinned memory), "disk", "disk:/folder" or "mock". Default: "host" for
            accelerators, "disk" for a model on the CPU of a machine without an accelerator. For --model.
        min_bytes: Saved tensors of smaller storages stay on the device. Default: 1MiB. For --model.
        regions: Names, patterns or classes of the modules to plan for. Default: the repeated blocks and the norm
            behind. For --model.
    """
    what_if = WhatIf(link, tokens, scale, host_limit, reserve, graphs)
    check_one_goal(budget, checked_slowdown(max_slowdown))
    _check_files({"--save": save, "--save-profile": save_profile, "--picture": picture}, points)
    if (profile is not None) + (model is not None) + (script is not None) != 1:
        raise ConfigError("write one of: the file of a profile, --model with --batch, --script")
    if model is None:
        _check_no_model(batch=batch, loss=loss, store=store, min_bytes=min_bytes, regions=regions or None)
    if script is None and script_arguments:
        raise ConfigError(f"there is no script to take {script_arguments!r}: write --script train.py, or leave it out")
    if profile is not None:
        measured = Profile.load(profile)
    elif model is not None:
        measured = measure_model(model, batch, loss, store, min_bytes, host_limit, regions)
    else:
        assert script is not None
        measured = measure_script(script, script_arguments)
    if save_profile is not None:
        _write("--save-profile", save_profile, measured.save)
    goal = budget if max_slowdown is None else max_slowdown
    _answer(measured, what_if, goal, save, points if pareto or picture else None, picture)
    return 0


def _answer(
    measured: Profile,
    what_if: WhatIf,
    goal: str | float | None,
    save: Path | None,
    points: int | None,
    picture: Path | None,
) -> None:
    """Print plans of a profile; `points` of the curve, if any. `goal`: a budget as text, or a largest slowdown."""
    # The planner is a third of the time of --help.
    from ebbtide._cli._plan_pareto import Solvers, pareto_table

    console = Console()
    if not console.is_terminal:  # a file or a pipe
        console = Console(width=160)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    profile, notes = what_if.applied_to(measured)
    solvers, of = Solvers(profile), profile.made_for
    budget, max_slowdown = (goal, None) if isinstance(goal, str) else (None, goal)
    limit, plain = budget_of(budget, profile), solvers.plain
    say(
        f"{of.get('model', 'a model')} on {of.get('device', 'a device')}, {len(profile.regions)} regions, "
        f"{profile.tokens} tokens: {plain.step_s * 1e3:.1f} ms at a peak of {format_bytes(plain.peak_bytes)} with "
        f"everything kept; the smallest budget is {format_bytes(solvers.solver.smallest_budget())}."
    )
    for note in notes:
        say(note)
    if not profile.has_recomputation and (goal is not None or points is not None):
        say(
            "This profile was measured without a budget and has no times of recomputation: its plans keep and move "
            "only, and offload(model, budget=...) refuses it. Measure a profile with a budget, by --model or by "
            "--script."
        )
    if points is None or goal is not None or save is not None:
        budget_bytes = None if limit is None else limit(profile.device_bytes or 0)
        planned = solvers.solver.solve(budget_bytes, max_slowdown=max_slowdown)
        planned = replace(planned, budget="" if limit is None else str(limit))
        say(f"\n{planned}")
        if save is not None:
            _write("--save", save, planned.save)
            say(f"Saved: {save}, for offload(model, plan=Plan.load({str(save)!r})).")
    if points is None:
        return
    rows = solvers.rows(points)
    console.print()
    console.print(pareto_table(rows, profile.plain_s))
    say("only moving, only recomputing: times the plain step, of the fastest plan that does nothing else.")
    if picture is not None:
        from ebbtide._reports.pictures import pareto

        curves = {
            "planned: keep, move, recompute": [(row.budget_bytes, row.predicted.step_s) for row in rows],
            "only moving": solvers.only_moving(points),
            "only recomputing": solvers.only_recomputing(points),
        }
        title = " on ".join(of[key] for key in ("model", "device") if key in of)
        limits = {"budget": None if limit is None else limit(profile.device_bytes or 0), "device": profile.device_bytes}
        known = {name: nbytes for name, nbytes in limits.items() if nbytes}
        figure = pareto(curves, {}, known, (plain.peak_bytes, plain.step_s), title)
        _write("--picture", picture, lambda path: figure.savefig(path))
        say(f"Picture: {picture}")


def _check_files(files: dict[str, Path | None], points: int) -> None:
    """Before a model is measured. Raises ConfigError."""
    for option, path in files.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"{option} {path}: expected a file, in a folder that is there")
    picture, endings = files["--picture"], (".png", ".svg", ".pdf")
    if picture is not None and picture.suffix.lower() not in endings:
        raise ConfigError(f"--picture {picture}: expected a name that ends in {', '.join(endings)}")
    if points < 2:
        raise ConfigError(f"--points {points}: expected 2 or more")


def _check_no_model(**options: object) -> None:
    """Raises ConfigError for options of measuring a model."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a model that is measured here: write --model with it, or leave it "
                "out. A file says what was measured, and a script's settings belong into its own offload(...)"
            )


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror})") from error
