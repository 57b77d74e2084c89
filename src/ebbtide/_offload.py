"""The door with a model: regions get names, patterns choose, recipes say what is done, one handle watches it all."""

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from ebbtide._config import Mode, Names, OffloadConfig, as_names, make_config
from ebbtide._control.controller import PlanController
from ebbtide._control.ranks import Agree, agreement, refuse_pipeline
from ebbtide._control.tuner import bucket_of
from ebbtide._devices import device_for
from ebbtide._engine.context import HookContext, RegionCall
from ebbtide._engine.engine import Engine
from ebbtide._engine.engines import Engines
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._engine.process import PROCESS
from ebbtide._engine.stats import Stats
from ebbtide._errors import ConfigError, EbbtideWarning, ModuleError, PlanError
from ebbtide._events import Listener
from ebbtide._model.batches import tokens_of
from ebbtide._model.hooks import HANDLE, ModuleHook, OpScopeHook, RegionHook, RootHook, Session
from ebbtide._model.optimizers import Optimizers
from ebbtide._model.placement import PlacementCache, is_on_meta, made_for, memory_of
from ebbtide._model.regions import (
    choose_recipes,
    find_named,
    find_norm,
    find_planned,
    find_regions,
    names_of,
    refuse_nested,
)
from ebbtide._plans import Plan, Recipe, RecipeLike, RegionPlan
from ebbtide._profiling.files import Profiles, count_compiled, store_name
from ebbtide._profiling.profile import Profile
from ebbtide._recompute import torch_checkpoint
from ebbtide._recompute.compiled import compiler_id
from ebbtide._recompute.expensive import AnyDear
from ebbtide._recompute.ops import ExpensiveOps
from ebbtide._recompute.verify import Schedule
from ebbtide._reports.stats_text import stats_text
from ebbtide._settings import (
    Budget,
    check_none_kept,
    check_one_says_what_is_done,
    given,
    is_left_to_planner,
)
from ebbtide._stores import serves
from ebbtide._utils import env
from ebbtide._utils.distributed import check_group
from ebbtide._utils.torch_private import (
    buffers_of,
    graph_task_id,
    is_inside_checkpoint,
    modules_of,
    named_modules,
    parameters_of,
)
from ebbtide.types import Reason, RecomputeRecorder, StepRecorder, StoreFactory, Unable


class OffloadHandle:
    """What `offload` returns: figures, and the way back.

    A copy of the module (`copy.deepcopy`, a pickle) is a plain one, with no handle: apply `offload` to the copy as well
    if the copy trains. The handle itself cannot be copied.
    """

    def __init__(self, module: torch.nn.Module, config: OffloadConfig, engines: Engines, scope: HookContext) -> None:
        self._module = module
        self._config = config
        self._engines = engines
        self._scope = scope
        self._sessions = threading.local()
        self._was_entered = False
        self._knows_buffers = False
        self._weights_at: tuple[int, ...] | None = None
        self._told = False
        self._root_mark: RootHook | None = None
        self._marks: dict[torch.nn.Module, RegionHook] = {}
        self._trails: list[OpScopeHook] = []
        self._former_marks: list[RegionHook] = []
        self._plan = Plan({})
        self._dear: dict[tuple[object, ...], ExpensiveOps] = {}
        self._blocks = find_regions(module)
        self._norm = find_norm(module, self._blocks)
        self._home = PlacementCache(module)
        self._optimizers = Optimizers()
        self._control: PlanController | None = None
        self._budget: Budget | None = None
        self._plan_with_others: Callable[[], None] | None = None
        self._may_be_a_stage = False
        self._start: Callable[[], None] | None = None
        self._schedule = Schedule(config.verify)
        self._tokens = 0
        self.regions = dict(self._blocks)
        """Module of each region, by name: the repeated blocks, and what recipes and plans have made one."""

    def stats(self) -> Stats:
        """Totals since `offload`; budget, prediction and measurement of the current plan."""
        stats = self._scope.ledger.read(self._engines)
        plan, control = self._plan, self._control
        stats.budget_bytes = plan.budget_bytes if control is None else control.asked_bytes
        if plan.predicted is not None:
            stats.predicted_step_s, stats.predicted_peak_bytes = plan.predicted.step_s, plan.predicted.peak_bytes
        if control is not None:
            step_s, peak_bytes = control.measured
            stats.measured_step_s = step_s or None
            stats.measured_peak_bytes = peak_bytes or stats.measured_peak_bytes
        return stats

    def report(self) -> str:
        """The figures of `stats` as a table."""
        return stats_text(self.stats())

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with an Event for whatever happens to parcels; what is returned ends it."""
        return self._scope.ledger.listeners.add(listener)

    def remove(self) -> None:
        """Undo `offload`. Graphs under way still run backward."""
        self._optimizers.end()
        for mark in self._all_marks():
            mark.remove()
        self._root_mark = None
        self._former_marks += self._marks.values()
        self._marks.clear()
        self._trails.clear()
        if handle_of(self._module) is self:
            del vars(self._module)[HANDLE]

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each region that has one, by name. The others are offloaded as the other settings say."""
        return {name: region.recipe for name, region in self._plan.regions.items()}

    def set_recipe(self, recipe: RecipeLike | Mapping[Names, RecipeLike] | None) -> None:
        """What is done with the regions from the next forward on; backward goes by what its forward went by.

        Args:
            recipe: one for all repeated blocks, or one per name or pattern (see `offload`), whatever the recipes were
                before. None: all are offloaded.

        Raises:
            ConfigError: no recipe.
            ModuleError: a name that means nothing.

        Nothing is changed then: what was set holds, and a planner goes on planning.
        """
        self._check_installed("set_recipe()")
        if recipe is not None:
            check_none_kept("recipe", self._config.keep_last)
        recipes, regions = choose_recipes(self._module, self._blocks, recipe)
        self._follow(Plan({name: RegionPlan(chosen) for name, chosen in recipes.items()}), regions)
        self._take_from_planner()

    @property
    def plan(self) -> Plan:
        """What is done with each region, and when what travels leaves and comes back.

        Before the planner has a plan, the recipes of the first steps; `status` names the step that is measured.
        """
        if self._control is not None:
            budget = "" if self._budget is None else str(self._budget)
            return dataclasses.replace(self._plan, budget=budget, status=self._control.status)
        if self._start is not None and self._config.mode == "auto":
            return dataclasses.replace(self._plan, status="no plan yet: the weights are on the meta device")
        return self._plan

    def set_plan(self, plan: Plan) -> None:
        """Go by `plan` from the next forward on; backward goes by what its forward went by.

        Raises ConfigError for what is no plan, ModuleError for a region that the module does not have; nothing is
        changed then.
        """
        self._check_installed("set_plan()")
        check_none_kept("plan", self._config.keep_last)
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"plan={plan!r}: expected an ebbtide.Plan; recipes by name are for recipe=")
        self.apply_plan(dataclasses.replace(plan, status="") if plan.status else plan)
        self._take_from_planner()
        self._warn_of_blocks_without(plan)

    def _warn_of_blocks_without(self, plan: Plan) -> None:
        """Of a planner's plan: it names what it was made for."""
        others = [block for block in self._blocks if not any(_is_one_inside(block, name) for name in plan.regions)]
        if plan.predicted is not None and others:
            warnings.warn(
                f"the plan says nothing of {len(others)} of {len(self._blocks)} repeated blocks of "
                f"{type(self._module).__name__} ({', '.join(others[:3])}, ...): what they save stays, and what was "
                "predicted does not hold. If it was made for another model, make one for this",
                EbbtideWarning,
                stacklevel=3,
            )

    def _take_from_planner(self) -> None:
        """Somebody else says what is done."""
        self._control = self._start = None
        self._optimizers.end()

    def apply_plan(self, plan: Plan, size: int = 0) -> None:
        """What its planner says: as `set_plan`, unchecked, and the planner goes on planning. Plans for batches of
        another `size` learn their own order."""
        self._scope.turn_to(size)
        is_same = plan.regions.keys() == self._plan.regions.keys()  # a planner changes plans often, and names never
        self._follow(plan, self.regions if is_same else find_planned(self._module, self._blocks, plan))

    def _check_installed(self, call: str) -> None:
        if self._root_mark is None:
            raise ModuleError(f"{call} on a handle that was removed, or has mode='off': apply offload() again")

    def _follow(self, plan: Plan, regions: dict[str, torch.nn.Module]) -> None:
        trails = self._find_trails(plan, regions)
        former, self.regions = self.regions, regions
        for trail in self._trails:
            trail.remove()
        self._trails = [OpScopeHook(self, module, pattern) for module, pattern in trails]
        was_none = not (plan.regions or self._plan.regions)
        self._plan = plan
        if not was_none:
            for name, module in {**former, **regions}.items():
                self._wrap(name, module, plan.recipe_of(name))

    def _wrap(self, name: str, module: torch.nn.Module, recipe: Recipe | None) -> None:
        dear = None if recipe is None or recipe.action != "selective" else self.expensive_ops(recipe)
        patterns = () if dear is None else dear.modules
        modules = {p: frozenset(map(compiler_id, find_named(module, (p,), "@"))) for p in patterns}
        self._mark(module).wrap_forward(name, recipe, dear, modules)

    def _find_trails(self, plan: Plan, regions: dict[str, torch.nn.Module]) -> list[tuple[torch.nn.Module, str]]:
        """The modules that operator classes are limited to, and by which pattern; each pair once."""
        trails: dict[tuple[torch.nn.Module, str], None] = {}
        for name, region in plan.regions.items():
            recipe = region.recipe
            for pattern in self.expensive_ops(recipe).modules if recipe.action == "selective" else ():
                modules = find_named(regions[name], (pattern,), f"the recipe of {name}: @")
                trails.update(dict.fromkeys((module, pattern) for module in modules))
        return list(trails)

    def _mark(self, module: torch.nn.Module) -> RegionHook:
        if module not in self._marks:
            self._marks[module] = RegionHook(self, module, None, False)
        return self._marks[module]

    def _all_marks(self) -> list[ModuleHook]:
        root = [] if self._root_mark is None else [self._root_mark]
        return [*self._marks.values(), *self._trails, *root]

    def expensive_ops(self, recipe: Recipe) -> ExpensiveOps:
        """What `recipe.ops` stands for; looked up once."""
        if recipe.ops not in self._dear:
            self._dear[recipe.ops] = ExpensiveOps(recipe.ops)
        return self._dear[recipe.ops]

    @contextlib.contextmanager
    def recomputation(
        self, visit: RegionCall, plan: Plan, pack_hook: object, watch: StepRecorder | None, unable: Mapping[str, Unable]
    ) -> Generator[RecomputeRecorder | None, None, None]:
        """A region runs again in backward, in the thread that backward runs in."""
        desk = SavedTensorHooks(self._engines, visit)
        with contextlib.ExitStack() as stack:
            again = None if watch is None else stack.enter_context(watch.running_again(visit.region))
            for mark in self._former_marks:  # removed since: a graph under way goes by what its forward went by
                stack.enter_context(mark.standing_again())
            self._stack().append(Session(desk, plan, pack_hook, unable=unable))
            try:
                yield again
            finally:
                self._stack().pop()

    # -- what its control asks -------------------------------------------------------------------------------------

    @property
    def profile(self) -> Profile | None:
        """What a step was measured to do, at the pace of the last steps as far as these say; None before it was
        measured, and without a planner. A new object each time."""
        return None if self._control is None else self._control.profile

    def engine(self) -> Engine | None:
        """Of the device the model computes on; None while nothing can move there."""
        device = self._home.device()
        if device is None or not self._scope.serves(device):
            return None
        engine = self._engines.on(device)
        return None if isinstance(engine, Reason) or not engine.device.supports_timing else engine

    def is_captured(self) -> bool:
        """Whether what the model computes goes into a graph that is being captured."""
        device = self._home.device()
        return device is not None and self._scope.serves(device) and self._engines.is_captured(device)

    def made_for(self) -> dict[str, str]:
        """What a profile has to be of to be of use here, by name."""
        return {**made_for(self._module, self._home.device()), "min_bytes": str(self._config.min_bytes)}

    def compiled(self) -> set[str]:
        """Regions whose operators the compiler hides."""
        marks = self._marks
        return {name for name, module in self.regions.items() if module in marks and marks[module].is_compiled}

    def never_recomputed(self) -> dict[str, Unable]:
        """Regions that are kept whatever the plan says, and why: recomputation was seen to differ, or would."""
        if not self._scope.ledger.stats.unable:
            return {}
        marks = ((name, self._marks.get(module)) for name, module in self.regions.items())
        return {name: mark.unable for name, mark in marks if mark is not None and mark.unable is not None}

    def have_stepped(self) -> bool:
        """Whether an optimizer has stepped since this was called last."""
        return self._optimizers.have_stepped()

    def memory_before(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of parameters, gradients and the state of optimizers, and of the gradients that backward will allocate,
        by region."""
        device = self._home.device()
        base, coming = memory_of(self._module, self.regions, device)
        state_bytes = self._optimizers.state_bytes(list(parameters_of(self._module)), device)
        return (base | {"optimizer": state_bytes} if state_bytes > 0 else base), coming

    def plan_within(
        self,
        budget: Budget | None,
        regions: Names | list[Names] | tuple[Names, ...] | None,
        profile: Profile | str | Path | None,
        replans_on_oom: bool,
        process_group: "torch.distributed.ProcessGroup | None",
    ) -> None:
        """Have a planner set the plan from now on; once more when this rank turns out to be one of several.

        Raises ConfigError, PlanError, ModuleError.
        """
        if budget is not None:
            refuse_pipeline(self._module)
            self._may_be_a_stage = True  # of a pipeline that is made later
        named = names_of(self._module, find_named(self._module, as_names("regions", regions), "regions"))
        found = named or {**self._blocks, **self._norm}
        if not found:
            raise PlanError(
                f"{type(self._module).__name__} has no repeated blocks to plan for: name the modules that make it up, "
                "regions=['encoder.*', 'decoder.*'], or write mode='all' to move everything"
            )
        refuse_nested(found)
        profiles = Profiles(profile, self.made_for(), self._profile_settings, process_group)
        looks_again = budget is not None or profiles.are_for_any_budget
        known = profiles.find(found, looks_again)
        if named and known is not None:
            _check_of_regions(known, named)
        # Without a budget nothing runs again, and each rank may move what it likes.
        agree = None if budget is None else self._agreement(process_group)
        control = PlanController(
            self,
            tuple(found),
            self._scope,
            budget,
            AnyDear(),
            known,
            replans_on_oom=replans_on_oom,
            agree=agree,
            keep=profiles.keep,
            looks_again=looks_again,
            guessed=() if named else tuple(self._norm),
        )
        control.start()
        self._control = control
        self._budget = budget
        again = functools.partial(self.plan_within, budget, regions, profile, replans_on_oom, None)
        is_open = budget is not None and agree is None and process_group is None
        self._plan_with_others = again if is_open else None
        if known is not None:
            profiles.keep(known)
        else:
            self._optimizers.watch()

    def _agreement(self, process_group: "torch.distributed.ProcessGroup | None") -> Agree | None:
        return agreement(process_group, f"a plan for {type(self._module).__name__}")

    def start_when_there(self, start: Callable[[], None]) -> None:
        """`start` in the first forward that finds the parameters off the meta device, or at once."""
        if is_on_meta(self._module):
            self._start = start
        else:
            start()

    def _profile_settings(self) -> dict[str, str]:
        """What a profile depends on besides model and device, as it is now."""
        config = self._config
        return {
            "store": store_name(config.store),
            "compiled": count_compiled(self._blocks),
        }

    def conclude(self) -> Profile | None:
        """The profile, if the steps so far make one; nobody has to begin another step for it."""
        with self._while_measuring():
            return None if self._control is None else self._control.conclude()

    @contextlib.contextmanager
    def _while_measuring(self) -> Generator[None, None, None]:
        """Optimizers are of interest until there is a profile, or an error instead of one."""
        is_measuring = False
        try:
            yield
            is_measuring = self._control is not None and self._control.is_measuring
        finally:
            if not is_measuring:
                self._optimizers.end()

    # -- what its marks ask ----------------------------------------------------------------------------------------

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The module is about to be called with these."""
        if self._control is not None or not self._schedule.is_off:
            self._tokens = tokens_of(args, kwargs)

    def session(self) -> Session | None:
        stack = self._stack()
        return stack[-1] if stack else None

    def enter_root(self) -> None:
        self._was_entered = True
        if env.is_disabled():
            self._stack().append(None)
            return
        if is_inside_checkpoint():
            self._stack().append(None)
            if torch.is_grad_enabled() and graph_task_id() == -1:  # not where it saves nothing, nor again in backward
                self._scope.ledger.note_checkpointed(type(self._module).__name__)
            return
        around = self.session()
        if around is not None and around.goes_on():
            self._stack().append(around)  # called from its own forward: it is one step all the same
            return
        for mark in self._all_marks():
            mark.stand_outside()  # a block may have been compiled after `offload`
        if self._start is not None and not is_on_meta(self._module):
            self._start()
            self._start = None
        follows, verifies = None, False
        if torch.is_grad_enabled():
            verifies = self._schedule.is_due((bucket_of(max(1, self._tokens)), self._module.training))
        if self._control is not None and torch.is_grad_enabled():
            with self._while_measuring():
                if self._may_be_a_stage:
                    refuse_pipeline(self._module)
                    self._may_be_a_stage = False
                if self._plan_with_others is not None and self._agreement(None) is not None:
                    self._plan_with_others()  # the process group was made after `offload`: in one forward on all ranks
                follows = self._control.step_begins(self._tokens, verifies)
            if self._control.is_measuring:  # and of the forwards that are timed none is held up
                verifies = self._control.is_warming_up and not self._schedule.is_off
            if not self._control.status:
                self._scope.ledger.first_step_begins()
        if not self._knows_buffers:
            self._note_buffers()
        self._note_weights()
        torch_checkpoint.install()
        desk = SavedTensorHooks(self._engines, self._scope.visit(""))
        desk.watch = follows
        desk.stays = Reason.OUTSIDE if self._config.include else None
        if self._plan.outside is not None:
            desk.follow(self._plan.outside)
        hooks = desk.hooks()
        hooks.__enter__()  # before it counts as entered: torch.func refuses hooks
        session = Session(desk, self._plan, hooks.pack_hook, hooks, verifies, self.never_recomputed())
        self._stack().append(session)

    def warn_if_root_is_bypassed(self) -> None:
        """A part of the model saves for backward, and the model itself was never called."""
        if self._was_entered or not torch.is_grad_enabled() or graph_task_id() != -1 or env.is_disabled():
            return
        self._was_entered = True
        name = type(self._module).__name__
        warnings.warn(
            f"nothing moves while {name} is not called itself, and a part of it was: offload() covers model(...), not "
            "model.forward(...) or model.part(...). Call the model, apply offload() to the part, or use "
            "offload_activations() around the step",
            EbbtideWarning,
            stacklevel=2,
        )

    def leave_root(self, is_whole: bool) -> None:
        stack = self._stack()
        session = stack.pop() if stack else None
        if session is None or session is self.session():
            return
        assert session.hooks is not None
        session.hooks.__exit__()
        if self._control is not None and session.desk.watch is not None:
            session.desk.watch.forward_ended() if is_whole else self._control.forward_failed()
        self._note_buffers()  # for the next forward: the device has work now, and before one it may wait for the host
        if is_whole and torch.is_grad_enabled() and self._start is None:
            self._warn_if_nothing_moved(session.plan)

    def _warn_if_nothing_moved(self, plan: Plan) -> None:
        """Measured steps do not count, and a plan may keep everything if everything fits the budget."""
        if (self._control is not None and self._control.status) or (plan.keeps_all and plan.budget_bytes is not None):
            return
        door = f"offload({type(self._module).__name__})"
        if plan.predicted is None:
            self._scope.ledger.warn_if_nothing_moved(door)
            return
        causes = dict.fromkeys(region.reason.rpartition(": ")[2] for region in plan.regions.values())
        forward = f"planned forward ({'; '.join(filter(None, causes))})"
        advice = ". Within a budget, such as budget='40GiB', what has to leave does; mode='all' moves everything"
        self._scope.ledger.warn_if_nothing_moved(door, forward, advice)

    def _note_weights(self) -> None:
        """Anew when they have moved, or others are in their places."""
        storages = self._home.storages()
        if storages != self._weights_at and not is_on_meta(self._module):
            self._weights_at = storages
            self._scope.know_weights(parameters_of(self._module))

    def _note_buffers(self) -> None:
        """What is saved of them frees nothing. One that is replaced before the next forward is moved in that one, or an
        activation in its old place kept: no more than a waste, but in every forward if it is replaced before each."""
        self._knows_buffers = True
        self._scope.buffers = {
            b.untyped_storage()._cdata
            for owner in modules_of(self._module)
            for b in owner._buffers.values()
            if b is not None and _has_storage(b)
        }

    def was_traced(self, stands_outside: bool, module: torch.nn.Module) -> None:
        """A compiler has inlined the hooks of `module`."""
        if stands_outside:
            return
        if module is self._module:
            if self.session() is None:
                self._warn(
                    f"{type(module).__name__} was compiled as a whole with offloading inside, where it cannot work: "
                    "apply ebbtide.offload to what torch.compile returns or, better, compile the blocks one by one "
                    "(block.compile()): inside a single graph nothing can leave before forward ends"
                )
        elif self._is_asked_for(module) and not self._marks[module].is_compiled and not self._told:
            self._warn(
                f"{type(self._module).__name__} was compiled into graphs larger than its blocks. A graph hands over "
                "all that it saves at its end and takes it back at its start, so nothing inside of it leaves or comes "
                "while it runs: peak memory falls less and copies overlap with nothing. Compile the blocks one by one "
                "(block.compile())"
            )

    def _is_asked_for(self, module: torch.nn.Module) -> bool:
        """A region, and not only because a norm is one where it can be: in a graph of more it goes unplanned."""
        return module in self.regions.values() and module not in self._norm.values()

    def _warn(self, text: str) -> None:
        self._told = True
        warnings.warn(text, EbbtideWarning, stacklevel=3)

    def install(self) -> None:
        """Put the marks in place. Raises ModuleError for names that mean nothing."""
        choices: dict[torch.nn.Module, Reason | bool] = dict.fromkeys(self.regions.values(), False)
        choices.update(dict.fromkeys(find_named(self._module, self._config.include, "include"), True))
        choices.update(dict.fromkeys(find_named(self._module, self._config.exclude, "exclude"), Reason.OUTSIDE))
        choices.update(dict.fromkeys(_last(self.regions, self._config.keep_last), Reason.KEEP_LAST))
        names = {block: name for name, block in self.regions.items()}
        root_choice = choices.pop(self._module, False)
        if root_choice:
            raise ModuleError(
                "include and exclude choose among the modules inside the one given to offload(), and a name here "
                f"means {type(self._module).__name__} itself: leave include out to move everything"
            )
        self._marks = {
            module: RegionHook(self, module, names.get(module), choice) for module, choice in choices.items()
        }
        self._root_mark = RootHook(self, self._module)
        vars(self._module)[HANDLE] = self  # wrappers may hand on what is set on them

    def _stack(self) -> list[Session | None]:
        stack: list[Session | None] | None = getattr(self._sessions, "stack", None)
        if stack is None:
            stack = self._sessions.stack = []
        return stack

    def __reduce__(self) -> NoReturn:
        raise ModuleError(
            "a handle of offload() belongs to one module and cannot be copied or pickled with it: call "
            "handle.remove() first, or save the module's state_dict()"
        )


def offload(
    module: torch.nn.Module,
    *,
    mode: Mode | None = None,
    budget: int | float | str | None = None,
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
    """Move what is saved in `module`'s forward out of device memory until backward needs it.

    Loss and gradients are those of the plain run, bit for bit; names and `state_dict` are unchanged::

        handle = ebbtide.offload(model)                  # what the link carries without slowing the step
        handle = ebbtide.offload(model, budget="40GiB")  # the fastest step that stays below that peak
        handle = ebbtide.offload(model, mode="all", include=["layers.*.mlp"])
        ...  # train as before
        print(handle.plan, handle.report())
        handle.remove()

    Args:
        module: a model, before or after compile(), fully_shard, DDP or PEFT. One that is wholly on the meta device is
            looked at again, and planned for, in its first forward after to_empty() or loading weights.
        mode: "auto" leaves to the planner what is moved: two of the first steps are watched, then it goes by a plan.
            "all" moves everything, "off" is a handle that does nothing. Default: "auto", unless one of the other
            settings says what is to be moved and how (include, exclude, keep_last, recipe, plan, window, prefetch).
        budget: the peak of device memory to stay under, as the allocator counts it: bytes, "40GiB", or a share of the
            device's memory such as 0.8. The planner keeps, moves and recomputes whatever gives the fastest step.
        include, exclude: names or patterns of modules inside ("layers.*.mlp") or module classes. With `include`, only
            what is saved inside these modules' forward travels; what is saved inside `exclude` stays. Of nested ones
            the innermost decides.
        keep_last: what the last so many blocks save stays: backward needs it at once.
        regions: names, patterns or classes of the modules that are planned one by one, where there is a planner.
            Default: the repeated blocks, and the norm behind them.
        recipe: what is done with each region, instead of moving all it saves: "keep", "offload", "recompute",
            "selective" or a `Recipe`, for all repeated blocks or by name or pattern ({"layers.*": "recompute",
            "layers.0": "keep"}, later ones override earlier ones). A pattern that means no block makes regions of the
            modules it does mean. `handle.set_recipe` changes it between steps.
        plan: instead of a recipe: what is done with each region, and when what travels leaves and comes back.
            `handle.set_plan` changes it between steps.
        profile: of this model on this device, measured before (`handle.profile`): no step has to be watched. Or the
            path of a file: the profile in it is used if it is of this model, device, torch and these settings, else
            one is measured and written there, as JSON and by the first rank. What it cannot see is a change of the
            model's code or of autocast: delete the file then.
        on_oom: "replan" plans for less than the budget from the next step on when the device runs out of memory; the
            error is raised in any case. Default: "raise", the error is all there is.
        verify: compare what recomputation saves with what forward saved, in every so many-th forward and in the first
            one of each size of batch and training mode: a region that differs is kept from then on, and its gradients
            come from what forward saved. Such a forward moves all that recomputed regions save. Default: a planner does
            so once, in its first forward. 0: never.
        process_group: the ranks that train this module and go by one plan within a budget, such as
            `mesh["dp"].get_group()`: those of data, sharded and tensor parallelism together. Ranks that share the file
            of a profile are these too. Each of them has to run as many steps, for they agree on the plan between two.
            Default: all ranks of the job.
        store: "host" (pinned memory), "disk" or "disk:/folder", "mock", or a function that makes a store for a
            device. Default: host for accelerators; disk where the model is on the CPU of a machine without one.
        window: most bytes on their way out whose device memory is not yet released; beyond it compute waits.
            Default 512MiB; a plan has windows of its own.
        prefetch: most bytes brought back before backward asks for them. What a region needs to run again comes
            together, also where that is more. Default 512MiB; a plan has windows of its own.
        min_bytes: saves of smaller storages stay where they are.
        host_limit: most host memory to take; what does not fit stays on the device, counted. Default: 80 % of free
            memory, divided among the processes of this host.

    Returns:
        A handle with `stats()`, `report()` and `remove()`.

    Raises:
        ConfigError: a setting that cannot be, a file for a profile in a folder that is not there, a budget for a stage
            of a pipeline (in its first step, if the stage is made later).
        ModuleError: a part of the module is on the meta device, it has a handle already (or has one inside), a name
            means nothing.
        PlanError: no regions are found to plan for, the profile is of something else, its file is none, or no plan
            fits the budget (in the first planned step, if no profile was given; a larger batch later is a warning), or
            a rank does not come to agree on the plan.
        DeviceError: the module is on a device without streams.
    """
    says_how = given(
        include=include,
        exclude=exclude,
        keep_last=keep_last,
        window=window,
        prefetch=prefetch,
        recipe=recipe,
        plan=plan,
    )
    check_one_says_what_is_done(recipe, plan, keep_last)
    is_planned = is_left_to_planner(mode, budget, profile, regions, on_oom, process_group, says_how)
    config = make_config(
        mode=mode or ("auto" if is_planned else "all"),
        include=include,
        exclude=exclude,
        keep_last=keep_last,
        store=store,
        window="512MiB" if window is None else window,
        prefetch="512MiB" if prefetch is None else prefetch,
        min_bytes=min_bytes,
        host_limit=host_limit,
        verify=verify,
    )
    budget_of = None if budget is None else Budget(budget)
    check_group(process_group)
    _check_module(module)
    within = functools.partial(
        OffloadHandle.plan_within,
        budget=budget_of,
        regions=regions,
        profile=profile,
        replans_on_oom=on_oom == "replan",
        process_group=process_group,
    )
    return _installed(module, config, recipe, plan, within if is_planned else None)


def _installed(
    module: torch.nn.Module,
    config: OffloadConfig,
    recipe: RecipeLike | Mapping[Names, RecipeLike] | None,
    plan: Plan | None,
    plan_within: Callable[[OffloadHandle], None] | None,
) -> OffloadHandle:
    """A handle at work. Whatever goes wrong, none is left behind."""
    handle = OffloadHandle(module, config, PROCESS.engines(config), PROCESS.new_scope(config))

    def start() -> None:
        _check_device(module, config)
        if plan_within is not None and config.mode != "off":
            plan_within(handle)

    with contextlib.ExitStack() as undo:
        undo.callback(handle.remove)
        if config.mode != "off":
            handle.install()
            handle.set_recipe(recipe) if plan is None else handle.set_plan(plan)
        handle.start_when_there(start)
        undo.pop_all()
    return handle


def handle_of(module: torch.nn.Module) -> OffloadHandle | None:
    """What `offload` returned for `module`, until it is removed."""
    return module.__dict__.get(HANDLE)


def _check_of_regions(profile: Profile, named: Mapping[str, torch.nn.Module]) -> None:
    others = [region.name for region in profile.regions if region.name not in named]
    if others:
        raise PlanError(
            f"the profile is of other regions than regions= names ({', '.join(others[:3])}, ...): measure one of "
            "these, or leave regions= out"
        )


def _check_module(module: torch.nn.Module) -> None:
    """Raises ModuleError for what is none, and for one that has a handle already."""
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
            device_for(device)  # raises DeviceError for one that ebbtide cannot serve at all
        raise ModuleError(
            f"store={config.store!r} frees nothing for {type(module).__name__} on {sorted(map(str, devices))}: for a "
            "model on the CPU write store='disk' or 'disk:/folder'"
        )


def _is_one_inside(name: str, other: str) -> bool:
    """Whether one of the two modules is the other, or a part of it."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def _last(regions: dict[str, torch.nn.Module], count: int) -> list[torch.nn.Module]:
    if count > len(regions):
        raise ModuleError(
            f"keep_last={count}, but only {len(regions)} repeated blocks were found: "
            "write a smaller number, or name what should stay with exclude="
        )
    return list(regions.values())[len(regions) - count :]


def _has_storage(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor and buffer.layout is torch.strided
