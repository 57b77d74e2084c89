"""The entry point for models: `offload` and the handle of a model."""

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from ebbtide._config import (
    Budget,
    Mode,
    Names,
    OffloadConfig,
    check_recipe_or_plan,
    check_without_keep_last,
    checked_slowdown,
    make_config,
    planner_decides,
)
from ebbtide._devices import device_for
from ebbtide._engine.process import PROCESS
from ebbtide._engine.stats import Stats
from ebbtide._errors import ConfigError, EbbtideWarning, ModuleError
from ebbtide._events import Listener
from ebbtide._model.attach import Attachment
from ebbtide._model.hooks import HANDLE
from ebbtide._model.placement import is_on_meta
from ebbtide._model.planning import Goal, Planning
from ebbtide._model.regions import WHOLE, choose_recipes
from ebbtide._plans import Plan, Recipe, RecipeLike, RegionPlan
from ebbtide._profiling.profile import Profile
from ebbtide._reports.html import plan_table
from ebbtide._reports.run import Run, RunFile
from ebbtide._reports.stats_text import stats_text
from ebbtide._stores import serves
from ebbtide._types import StoreFactory
from ebbtide._utils import env
from ebbtide._utils.distributed import check_group
from ebbtide._utils.torch_private import buffers_of, named_modules, parameters_of


class OffloadHandle:
    """Figures and plan of a model under `offload`, and the way back.

    A handle is a context manager: `remove` runs at the end of the block:

        with ebbtide.offload(model) as handle:
            train(model)

    A copy of the model (`copy.deepcopy`, a pickle) is a plain model without a handle: apply `offload` to the copy as
    well if the copy trains. A handle cannot be copied.
    """

    # Internal accessors, also for tests: `_attachment` has the hooks, the sessions and the controller of `_planning`.

    def __init__(self, module: torch.nn.Module, config: OffloadConfig, engines: Any, context: Any) -> None:
        self._run_file: RunFile | None = None
        self._attachment = Attachment(module, config, engines, context)
        self._planning: Planning | None = None

    def __enter__(self) -> "OffloadHandle":
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()

    @property
    def regions(self) -> dict[str, torch.nn.Module]:
        """Module of each region, by name: the repeated blocks, and regions added by recipes and plans."""
        return self._attachment.regions

    def stats(self) -> Stats:
        """Totals since `offload`; budget, prediction and measurement of the current plan."""
        attachment = self._attachment
        stats = attachment.context.recorder.read(attachment.engines)
        plan, controller = attachment.plan, attachment.controller
        stats.budget_bytes = plan.budget_bytes if controller is None else controller.user_budget_bytes
        if plan.predicted is not None:
            stats.predicted_step_s, stats.predicted_peak_bytes = plan.predicted.step_s, plan.predicted.peak_bytes
        if controller is not None:
            step_s, peak_bytes = controller.measured
            stats.measured_step_s = step_s or None
            stats.measured_peak_bytes = peak_bytes or stats.measured_peak_bytes
        return stats

    def report(self) -> str:
        """The figures of `stats` as a table."""
        return stats_text(self.stats())

    def save(self, path: str | Path) -> None:
        """Write plan, profile, figures and steps as JSON, for `ebbtide report FILE`, also after `remove`.

        Raises:
            ConfigError: no file can be written at `path`.
            PlanError: the plan chooses operators by a function, which a file cannot hold.
        """
        self._run().save(path)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with an Event for everything that happens to parcels. Returns a function to end the calls."""
        return self._attachment.context.recorder.listeners.add(listener)

    def remove(self) -> None:
        """Undo `offload`. Graphs in flight still run backward. A second call does nothing."""
        attachment = self._attachment
        attachment.optimizers.stop()
        attachment.remove()
        if handle_of(attachment.module) is self:
            del vars(attachment.module)[HANDLE]
        if self._run_file is not None:
            self._run_file.write(self._run)  # last: reading a failed device raises

    def __del__(self) -> None:
        if self._run_file is not None:
            self._run_file.write(self._run)

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Recipe of each region in the plan, by name. All further regions are offloaded by the options of `offload`."""
        return {name: region.recipe for name, region in self._attachment.plan.regions.items()}

    def set_recipe(self, recipe: RecipeLike | Mapping[Names, RecipeLike] | None) -> None:
        """Give regions new recipes from the next forward on; backward follows the recipes of its forward.

        After an error nothing is changed, and a planner goes on planning; otherwise planning ends.

        Args:
            recipe: one for all repeated blocks, or one per name or pattern (see `offload`). Replaces all former
                recipes. None: all regions are offloaded.

        Raises:
            ConfigError: `recipe` is no recipe.
            ModuleError: a name without a module, or the handle was removed.
        """
        attachment = self._attachment
        self._check_installed("set_recipe()")
        if recipe is not None:
            check_without_keep_last("recipe", attachment.config.keep_last)
        recipes, regions = choose_recipes(attachment.module, attachment.blocks, recipe)
        attachment.follow_plan(Plan({name: RegionPlan(chosen) for name, chosen in recipes.items()}), regions)
        self._end_planning()

    @property
    def plan(self) -> Plan:
        """Recipe of each region, and when parcels leave and come back.

        Before a planner has a plan: the recipes of the first steps; `status` names the step under measurement.
        """
        plan = self._attachment.plan
        return plan if self._planning is None else self._planning.describe(plan)

    @property
    def is_plan_frozen(self) -> bool:
        """Whether the plan stays as it is until something changes, such as the batch size or the memory before a step.

        False while a planner measures, compares and corrects: those steps, 20 to 90 as a rule, say little of the speed
        and the peak of later ones. True for plans and recipes of the user, after `remove`, and under
        `EBBTIDE_DISABLE=1`.
        """
        controller = self._attachment.controller
        if self._planning is None or env.is_disabled() or not self._attachment.is_installed:
            return True
        return controller is not None and controller.is_plan_frozen

    def set_plan(self, plan: Plan) -> None:
        """Follow `plan` from the next forward on; backward follows the plan of its forward. Planning ends.

        Raises:
            ConfigError: `plan` is no Plan.
            ModuleError: a region without a module, or the handle was removed. After an error nothing is changed.
        """
        attachment = self._attachment
        self._check_installed("set_plan()")
        check_without_keep_last("plan", attachment.config.keep_last)
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"plan={plan!r}: expected an ebbtide.Plan; recipes by name are for recipe=")
        attachment.apply_plan(dataclasses.replace(plan, status="") if plan.status else plan)
        self._end_planning()
        missing = [b for b in attachment.blocks if not any(_is_nested(b, name) for name in plan.regions)]
        if plan.predicted is not None and missing:  # a planner names every region that the plan was made for
            warnings.warn(
                f"the plan says nothing of {len(missing)} of {len(attachment.blocks)} repeated blocks of "
                f"{type(attachment.module).__name__} ({', '.join(missing[:3])}, ...): their saved tensors stay, and "
                "the prediction does not hold. If the plan was made for another model, make a plan for this model",
                EbbtideWarning,
                stacklevel=2,
            )

    def replan(self) -> None:
        """Plan again from the measured steps, for another state of the machine; a frozen plan is open to corrections
        again. Among several ranks, a call on one rank has all ranks plan again when they meet next. Does nothing before
        the first plan. Raises ModuleError if nothing plans, or the handle was removed."""
        self._check_installed("replan()")
        controller = self._attachment.controller
        if controller is None:
            raise ModuleError("replan() on a handle whose plan the user has set: apply offload() again for a planner")
        controller.replan()

    @property
    def profile(self) -> Profile | None:
        """Measured bytes and seconds of a step, at the speed of the latest steps; a new object at each call.

        None before the measurement, and without a planner.
        """
        controller = self._attachment.controller
        return None if controller is None else controller.profile

    def __repr__(self) -> str:
        """Model class, goal and state: `<OffloadHandle of Llama, budget 40GiB, measuring step 2 of 3>`."""
        attachment, planning = self._attachment, self._planning
        goal, state = f"mode {attachment.config.mode}", "installed"
        if planning is not None:
            goal = str(planning.goal) or goal
            state = planning.status.rpartition(": ")[2] or "planned"
        elif self.recipes:
            actions = {recipe.action for recipe in self.recipes.values()}
            goal = f"recipe {actions.pop()}" if len(actions) == 1 else f"recipes of {len(self.recipes)} regions"
        if not attachment.is_installed:
            state = "off" if attachment.config.mode == "off" else "removed"
        return f"<OffloadHandle of {type(attachment.module).__name__}, {goal}, {state}>"

    def _repr_html_(self) -> str:
        """The plan as a table, for notebooks."""
        return plan_table(self.plan)

    def __reduce__(self) -> NoReturn:
        self._attachment.__reduce__()

    def _install(self) -> None:
        self._attachment.install()
        vars(self._attachment.module)[HANDLE] = self  # wrappers may forward attribute writes

    def _run(self) -> Run:
        """The run up to now."""
        attachment, profile = self._attachment, self.profile
        stats, made_for = self.stats(), attachment.made_for()
        tuner = None if attachment.controller is None else attachment.controller.tuner
        if tuner is None or profile is None:
            return Run.of(stats, made_for, self.plan, profile)
        steps, changes = tuple(tuner.history.steps), tuple(tuner.history.changes)
        return Run.of(stats, made_for, self.plan, profile.scaled(tuner.tokens), steps, changes, tuner.timeline)

    def _report_at_exit(self) -> None:
        """Have the report written that EBBTIDE_REPORT asks for."""
        path, run = env.report_path(), weakref.WeakMethod(self._run)
        if path is not None and not env.is_disabled():
            self._run_file = RunFile(path, lambda: None if (read := run()) is None else read())

    def _check_installed(self, call: str) -> None:
        if not self._attachment.is_installed:
            raise ModuleError(f"{call} on a handle that was removed, or has mode='off': apply offload() again")

    def _end_planning(self) -> None:
        attachment = self._attachment
        self._planning = attachment.controller = attachment.plan_step = attachment.start_when_placed = None
        attachment.optimizers.stop()


def offload(
    module: torch.nn.Module,
    *,
    mode: Mode | None = None,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    include: Names | list[Names] | tuple[Names, ...] | None = (),
    exclude: Names | list[Names] | tuple[Names, ...] | None = (),
    keep_last: int = 0,
    regions: Names | list[Names] | tuple[Names, ...] | None = (),
    recipe: RecipeLike | Mapping[Names, RecipeLike] | None = None,
    plan: Plan | None = None,
    profile: Profile | str | Path | None = None,
    on_oom: Literal["raise", "replan"] = "raise",
    verify: int | None = None,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    store: str | StoreFactory | None = None,
    window: int | str | None = None,
    prefetch: int | str | None = None,
    min_bytes: int | str = "1MiB",
    host_limit: int | str | None = None,
) -> OffloadHandle:
    """Move the saved tensors of a model out of device memory until backward needs them.

    Loss and gradients equal those of the plain run, bit for bit; names and `state_dict` are unchanged:

        handle = ebbtide.offload(model)                     # the smallest peak for a step at most 1 % slower
        handle = ebbtide.offload(model, max_slowdown=0.05)  # ... at most 5 % slower, with recomputation too
        handle = ebbtide.offload(model, budget="40GiB")     # the fastest step with a peak below 40 GiB
        handle = ebbtide.offload(model, mode="all", include=["layers.*.mlp"])
        ...  # train as before
        print(handle.plan, handle.report())
        handle.remove()

    Args:
        module: a model, before or after compile(), fully_shard, DDP or PEFT. For a model wholly on the meta device,
            devices are checked and the plan is made in the first forward after to_empty() or loading weights.
        mode: "auto": a planner decides what moves. "all": all saved tensors move. "off": none. Default: "auto", unless
            another setting says what moves and how (include, exclude, keep_last, recipe, plan, window, prefetch).
        budget: Peak of device memory to stay under: bytes, text like "40GiB", or a share of the device memory: 0.8
            or "80%". The planner keeps, moves and recomputes for the fastest step.
        max_slowdown: Largest slowdown of a step as a share, 0.05 for 5 %: the planner keeps, moves and recomputes for
            the smallest peak. Default: 0.01, by moving alone; not beside a budget.
        include: Names, patterns ("layers.*.mlp") or classes of modules: only tensors saved in the forward of these
            move, also where a later module saves the same memory. Of nested modules the innermost decides.
        exclude: Names, patterns or classes of modules: tensors saved in the forward of these stay.
        keep_last: Number of last blocks whose saved tensors stay: backward needs these at once.
        regions: Names, patterns or classes of the modules to plan for. Default: the repeated blocks and the norm
            behind.
        recipe: "keep", "offload", "recompute" or "selective", for all repeated blocks or by name or pattern. Also a
            `Recipe`, or a mapping: in {"layers.*": "recompute", "layers.0": "keep"} later patterns override earlier
            ones, and a pattern without a block makes regions of the matching modules. `handle.set_recipe` changes
            recipes between steps.
        plan: Plan to follow instead of a recipe (as a trainer argument: the path of a plan file). `handle.set_plan`
            changes the plan between steps.
        profile: Profile of this model on this device, or the path of a profile file, written if missing or of another
            model. With a profile (`handle.profile`) no step is measured. A profile file is of one model, device, torch
            and settings; the first rank writes JSON. Changes of the model's code or of autocast go unseen: delete the
            file then.
        on_oom: If the device runs out of memory: "raise" the error, or also "replan" for less than the budget. Default:
            raise. The error is raised in either case.
        verify: Compare recomputation with forward once in so many forwards; 0: never. Verified are also the first
            forwards of each batch size and training mode. A region that differs is kept from then on, and its gradients
            come from the tensors saved in forward; a verified forward moves all tensors of recomputed regions. Default:
            a planner verifies its first forward.
        process_group: Ranks that agree on a plan within a budget, or share a profile file. Default: all ranks of the
            job. Write the ranks of data, sharded and tensor parallelism together, such as `mesh["dp"].get_group()`; all
            must run the same number of steps. For a stage of a pipeline: the ranks of the stage; default: this rank, if
            the pipeline covers the job. Stages that share a rank share a budget.
        store: Where parcels wait: "host" (pinned memory), "disk", "disk:/folder" or "mock". Default: "host" for
            accelerators, "disk" for a model on the CPU of a machine without an accelerator. Also a function that makes
            a store for a device.
        window: Most bytes on their way out whose device memory is not released yet; beyond the limit compute waits.
            Default: 512MiB. A plan has windows of its own.
        prefetch: Most bytes brought back before backward needs them. Default: 512MiB. Tensors needed to recompute a
            region come together, even beyond the limit. A plan has windows of its own.
        min_bytes: Saved tensors of smaller storages stay on the device. Default: 1MiB.
        host_limit: Most host memory to take; tensors beyond the limit stay on the device. Default: 80 % of free memory,
            divided among the processes of the host.

    Returns:
        A handle with figures, plan and `remove()`; also a context manager.

    Raises:
        ConfigError: an impossible setting, a profile file in a missing folder, or a budget for a pipeline stage of
            unknown ranks (raised in the first step if the stage is made later).
        ModuleError: a part of the module is on the meta device, the module or a module inside has a handle already, or
            a name matches no module.
        PlanError: no regions to plan for, a profile of another model, a file without a profile, a rank that does not
            come to agree, or no plan within the budget (raised in the first planned step without a profile; a warning
            for a larger batch later).
        DeviceError: the module is on a device without streams.
    """
    check_recipe_or_plan(recipe, plan, keep_last)
    is_planned = planner_decides(
        mode, budget, max_slowdown, profile, regions, on_oom, process_group,
        include=include, exclude=exclude, keep_last=keep_last, window=window, prefetch=prefetch,
        recipe=recipe, plan=plan,
    )  # fmt: skip
    mode = mode or ("auto" if is_planned else "all")
    config = make_config(
        mode=mode, include=include, exclude=exclude, keep_last=keep_last, store=store, window=window,
        prefetch=prefetch, min_bytes=min_bytes, host_limit=host_limit, verify=verify,
    )  # fmt: skip
    goal = Goal(None if budget is None else Budget(budget), checked_slowdown(max_slowdown))
    check_group(process_group)
    _check_module(module)
    handle = OffloadHandle(module, config, PROCESS.engines(config), PROCESS.new_context(config))
    attachment = handle._attachment
    planning = Planning(attachment, goal, regions, profile, on_oom == "replan", process_group) if is_planned else None

    def start() -> None:
        _check_device(module, config)
        if planning is not None:
            planning.start()

    with contextlib.ExitStack() as undo:
        undo.callback(handle.remove)  # after an error no hook stays behind
        if config.mode != "off":
            handle._install()
            handle.set_recipe(recipe) if plan is None else handle.set_plan(plan)
        handle._planning = planning
        if is_on_meta(module):
            attachment.start_when_placed = start
        else:
            start()
        if config.mode != "off":
            handle._report_at_exit()
        undo.pop_all()
    return handle


def handle_of(module: torch.nn.Module) -> OffloadHandle | None:
    """The handle of `module`, until `remove`."""
    return module.__dict__.get(HANDLE)


def _check_module(module: torch.nn.Module) -> None:
    """Raises ModuleError for anything but a module, and for a module that has a handle already."""
    if not isinstance(module, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModuleError(
            f"offload({type(module).__name__}): expected a torch.nn.Module. Around other code write "
            "`with ebbtide.offload_activations():`"
        )
    for fqn, inner in named_modules(module):
        if HANDLE in inner.__dict__:
            raise ModuleError(
                f"offload() is already applied to {fqn or type(module).__name__!r}: keep the first handle, "
                "or call its remove() before applying it with other settings"
            )


def _check_device(module: torch.nn.Module, config: OffloadConfig) -> None:
    devices = {t.device for t in (*parameters_of(module), *buffers_of(module))}
    if any(device.type == "meta" for device in devices):
        raise ModuleError(
            f"a part of {type(module).__name__} is on the meta device: materialise it first, by to_empty() or loading "
            "weights"
        )
    if devices and not any(serves(config.store, device) for device in devices):
        for device in devices:
            device_for(device)  # raises DeviceError for a device without support
        raise ModuleError(
            f"store={config.store!r} frees nothing for {type(module).__name__} on {sorted(map(str, devices))}: for a "
            "model on the CPU write store='disk' or 'disk:/folder'"
        )


def _is_nested(name: str, other: str) -> bool:
    """Whether one of the two modules is the other, or a part of the other."""
    return WHOLE in (name, other) or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")
