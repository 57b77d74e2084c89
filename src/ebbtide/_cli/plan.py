"""`ebbtide plan`: what would be kept, moved and run again within a budget, and what a step would take."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ebbtide._cli._plan_front import Ways
from ebbtide._cli._plan_sources import ModelSource, ScriptSource
from ebbtide._cli._plan_what_if import WhatIf, parse_budget
from ebbtide._errors import ConfigError
from ebbtide._profiling.profile import Profile
from ebbtide._reports.pareto_table import front_table
from ebbtide._utils.sizes import format_bytes

_PICTURES = (".png", ".svg", ".pdf")
_WIDTH = 160  # of a file or a pipe
_NONE_RUNS_AGAIN = (
    "This profile was measured without a budget and does not say what it takes to run a region again: its plans keep "
    "and move only, and offload(model, budget=...) refuses it. Measure one with a budget, by --model or by --script."
)


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
    link: float | None = None,
    tokens: int | None = None,
    scale: float | None = None,
    host_limit: str | None = None,
    reserve: str | None = None,
    graphs: int | None = None,
    save: Path | None = None,
    front: bool = False,
    points: int = 16,
    picture: Path | None = None,
    store: str | None = None,
    min_bytes: str | None = None,
    regions: tuple[str, ...] = (),
) -> int:
    """Plan from a profile: which regions keep, move or run again what backward needs, and what a step takes then.

    The profile is a file (no GPU is needed), or is measured here: of a model and a batch, or in a training script,
    `ebbtide plan --script train.py -- its arguments`, which ends as soon as there is one.

    Args:
        profile: the file of a profile.
        model: package.module:function that makes the model to measure, on its device and in training mode.
        batch: package.module:function that makes what the model is called with: a mapping, a tuple or one tensor.
        loss: package.module:function that makes a loss of the model's output. Default: its loss, or the sum of it.
        script: a training script with ebbtide.offload(model) in it. It runs until its fourth step.
        script_arguments: of the script, as one text; the same as what is written behind "--".
        save_profile: a file for the profile.
        budget: peak of device memory to stay under, "40GiB", or a share of the device's memory, "0.8". Default: move
            what makes the step no slower.
        link: what if the link carried so many GB/s each way.
        tokens: what if a batch had so many tokens: elements of the largest tensor that the model is called with.
        scale: what if it had so many times as many as measured.
        host_limit: what if the store took so much at most, "64GiB".
        reserve: what is there before the step besides, "9GiB": the optimizer's state, if it was not measured.
        graphs: forwards whose backward is still to come at once: those of a pipeline's stage, or of one loss.
        save: a file for the plan, for offload(model, plan=Plan.load(file)).
        front: time against memory, from the smallest budget to what keeping everything needs.
        points: how many budgets of it.
        picture: a file for its picture (png, svg, pdf).
        store: where activations wait while a model is measured: "host", "disk:/folder".
        min_bytes: smaller storages stay, while a model is measured. Default: 1MiB.
        regions: names or patterns of the modules that are planned one by one, while a model is measured.
    """
    what_if = WhatIf(link, tokens, scale, host_limit, reserve, graphs)
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
        measured = ModelSource(model, batch, loss, store, min_bytes, host_limit, regions).profile()
    else:
        assert script is not None
        measured = ScriptSource(script, script_arguments).profile()
    if save_profile is not None:
        _write("--save-profile", save_profile, measured.save)
    _Answer(measured, what_if).give(budget, save, points if front or picture else None, picture)
    return 0


class _Answer:
    """Prints what is planned from a profile."""

    def __init__(self, measured: Profile, what_if: WhatIf) -> None:
        console = Console()
        self._console = console if console.is_terminal else Console(width=_WIDTH)
        self._profile = what_if.of(measured)
        self._ways = Ways.of(self._profile)
        self._notes = what_if.notes(measured)

    def give(self, budget: str | None, save: Path | None, points: int | None, picture: Path | None) -> None:
        budget_bytes = parse_budget(budget, self._profile)
        self._say(self._headline())
        for note in self._notes:
            self._say(note)
        if not self._profile.has_second_runs and (budget is not None or points is not None):
            self._say(_NONE_RUNS_AGAIN)
        if points is None or budget is not None or save is not None:
            self._plan(budget_bytes, save)
        if points is not None:
            self._front(points, picture)

    def _headline(self) -> str:
        profile, plain = self._profile, self._ways.plain()
        of = profile.made_for
        return (
            f"{of.get('model', 'a model')} on {of.get('device', 'a device')}, {len(profile.regions)} regions, "
            f"{profile.tokens} tokens: {plain.step_s * 1e3:.1f} ms at a peak of {format_bytes(plain.peak_bytes)} with "
            f"everything kept; the smallest budget is {format_bytes(self._ways.solver.smallest_budget())}."
        )

    def _plan(self, budget_bytes: int | None, save: Path | None) -> None:
        planned = self._ways.solver.solve(budget_bytes)
        self._say(f"\n{planned}")
        if save is not None:
            _write("--save", save, planned.save)
            self._say(f"Saved: {save}, for offload(model, plan=Plan.load({str(save)!r})).")

    def _front(self, points: int, picture: Path | None) -> None:
        rows = self._ways.rows(points)
        self._console.print()
        title = "Time against memory: the fastest step at each budget"
        self._console.print(front_table(rows, self._profile.plain_s, title))
        self._say("only moving, only running again: times plain of the fastest plan that does nothing else.")
        if picture is not None:
            self._draw([(row.budget_bytes, row.step_s) for row in rows], points, picture)
            self._say(f"Picture: {picture}")

    def _draw(self, planned: list[tuple[int, float]], points: int, path: Path) -> None:
        from ebbtide._reports.pareto_plot import FrontLine, draw_front

        ways = {
            "planned: keep, move, run again": planned,
            "only moving": self._ways.only_moving(points),
            "only running again": self._ways.only_again(points),
        }
        lines = [FrontLine(name, [b for b, _ in line], [s for _, s in line]) for name, line in ways.items()]
        plain = self._ways.plain()
        title = self._profile.made_for.get("model", "")
        _write("--picture", path, lambda to: draw_front(lines, plain.peak_bytes, plain.step_s, to, title=title))

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _check_files(files: dict[str, Path | None], points: int) -> None:
    """Before anything is measured. Raises ConfigError."""
    for option, path in files.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"{option} {path}: expected a file, in a folder that is there")
    picture = files["--picture"]
    if picture is not None and picture.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--picture {picture}: expected a name that ends in {', '.join(_PICTURES)}")
    if points < 2:
        raise ConfigError(f"--points {points}: expected 2 or more")


def _check_no_model(**options: object) -> None:
    """Raises ConfigError for those that say how a model is measured: here is none."""
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
