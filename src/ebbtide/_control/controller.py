"""From the first training steps to a profile and a plan. The handle asks the controller before every step.

Note [PlanController]
~~~~~~~~~~~~~~~~~~~~~
1. The first steps run with the smallest memory: with a budget every region is recomputed and inputs are offloaded,
   without a budget every region keeps. The first step warms up, the second is measured for times, and the third for
   details. With a goal that allows recomputation, compiled regions are measured at other activation memory budgets, in
   three more steps as a rule (Note [Points of compiled regions]). The solver is asked for a plan, and training goes on
   with these recipes until the plan is there.
2. From then on the tuner compares and corrects (Note [PlanTuner]).
3. Stages of a pipeline that share a rank share the budget: each waits, by its first recipes, until all are measured
   (Note [Several stages]).
4. With several ranks and recomputation, all ranks share one plan, from the slowest of all profiles, whatever the batch
   sizes of the ranks. They meet before step 4, again where compiled regions are measured further, and before steps
   12 and 36 if not all ranks have a profile; from then on to correct the plan (Note [Ranks]).
"""

import dataclasses
import enum
import sys
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from ebbtide._control.ranks import Ranks
from ebbtide._control.tuner import PlanTarget, PlanTuner
from ebbtide._engine.context import HookContext
from ebbtide._engine.engine import Engine
from ebbtide._errors import EbbtideWarning, PlanError, add_note
from ebbtide._planner.explain import NO_BUDGET
from ebbtide._planner.simulate import with_host
from ebbtide._planner.thresholds import THRESHOLDS
from ebbtide._plans import Plan, Recipe, RegionPlan, ReleasePoint
from ebbtide._profiling.build import ProfileInputs, derivable, profile_of
from ebbtide._profiling.derive_probe import probe_derivations
from ebbtide._profiling.launch_overhead import RecipeCosts
from ebbtide._profiling.link_probe import probe_link
from ebbtide._profiling.points import Budgets, rounds_of, with_points
from ebbtide._profiling.profile import Link, Profile
from ebbtide._profiling.recorder import ProfilingRecorder
from ebbtide._profiling.step_events import GraphOrder, InFlightStep, StepMonitor
from ebbtide._types import OpClasses, StepRecorder
from ebbtide._utils import env
from ebbtide._utils.logs import logger_of
from ebbtide._utils.torch_private import compiled_backwards

_log = logger_of(__name__)

_Result = TypeVar("_Result")

_LATENCY_S = 1e-5
_MOST_FAILURES = 3
_FORWARDS_TO_WAIT = 1000  # for the backward of a graph that is kept alive


class PlannedModel(PlanTarget, Protocol):
    """The handle, as seen by the controller."""

    def engine(self) -> Engine | None:
        """Engine of the model's device; None while nothing can be offloaded from the device."""
        ...

    def is_captured(self) -> bool:
        """Whether the forward is being captured in a graph."""
        ...

    def made_for(self) -> Mapping[str, str]:
        """Properties that a profile has to match, by name."""
        ...

    def compiled(self) -> Collection[str]:
        """Regions with operators hidden by the compiler."""
        ...

    def partitionable(self) -> Mapping[str, Hashable]:
        """Regions that can be compiled at other activation memory budgets, with the class of the module."""
        ...

    def compilations(self) -> tuple[int, float]:
        """Number and seconds of compilations at activation memory budgets so far."""
        ...

    def never_recomputed(self) -> Collection[str]:
        """Regions with a recomputation that differed from forward."""
        ...

    def have_stepped(self) -> bool:
        """Whether an optimizer has stepped since the last call."""
        ...

    def memory_before(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes allocated now by kind (parameters, gradients, optimizer states), and bytes of gradients that a backward
        would allocate, by region."""
        ...


class Phase(enum.Enum):
    """Purpose of the current step. The value continues a status text."""

    WARM = "warms up"
    TIMES = "is measured for times"
    DETAILS = "is measured for details"
    STAGES = "waits for the other stages of the rank"
    SOLVING = "waits for a plan"
    PLANNED = "runs by the plan"
    GAVE_UP = "keeps its first recipes"


_MEASURING = (Phase.WARM, Phase.TIMES, Phase.DETAILS)


class _WithUnseenRegions:
    """Adds plan entries for regions without a profile to every plan."""

    def __init__(self, handle: PlanTarget, unseen: Mapping[str, RegionPlan]) -> None:
        self._handle = handle
        self._unseen = unseen

    def apply_plan(self, plan: Plan, size: int = 0) -> None:
        regions = {**plan.regions, **self._unseen}
        self._handle.apply_plan(dataclasses.replace(plan, regions=regions) if self._unseen else plan, size)


class PlanController:
    """Measures, plans and tunes for one handle.

    Args:
        handle: receiver of plans.
        names: names of all regions.
        context: hook context of the handle's saved tensors.
        budget_bytes: returns the peak to stay under, by the total memory of the device; None: offload without slowing
            the step.
        op_classes: classes of operators.
        profile: earlier profile of the model; replaces the measured steps.
        replans_on_oom: plan for a smaller peak after the device ran out of memory.
        ranks: the ranks that agree on one plan; None for a single rank.
        on_profile: called with the profile as soon as the profile is measured.
        always_recompute: recompute every region in the first steps without a budget too, for a profile that serves any
            budget.
        max_slowdown: without a budget, the largest slowdown of a step; None: the default, by moving alone.
        nested: those of `names` that another module may call. They are dropped if no profile can be made.
        probe_recipes: measures what recipes cost the host; None: plans assume that the host is always ahead.
        stages: returns the controllers of all pipeline stages of the rank, this one included, in order. Default: this
            one alone.
    """

    def __init__(
        self,
        handle: PlannedModel,
        names: tuple[str, ...],
        context: HookContext,
        budget_bytes: Callable[[int], int] | None,
        op_classes: OpClasses,
        profile: Profile | None = None,
        replans_on_oom: bool = False,
        ranks: Ranks | None = None,
        on_profile: Callable[[Profile], None] | None = None,
        always_recompute: bool = False,
        max_slowdown: float | None = None,
        nested: Collection[str] = (),
        probe_recipes: Callable[[Engine], RecipeCosts] | None = None,
        stages: "Callable[[], Sequence[PlanController]] | None" = None,
    ) -> None:
        self._handle = handle
        self._names = names
        self._context = context
        self._budget_of = budget_bytes
        self._op_classes = op_classes
        self._replans_on_oom = replans_on_oom
        self._ranks = ranks
        self._on_profile = on_profile
        self._always_recompute = always_recompute
        self._max_slowdown = max_slowdown
        self._nested = nested
        self._probe_recipes = probe_recipes
        self._stages = stages or (lambda: [self])
        self._times: ProfilingRecorder | None = None
        self._recorded: InFlightStep[ProfilingRecorder] | None = None
        self._compiled_backwards = compiled_backwards()  # before there was a planner
        self._order = GraphOrder()
        self._waited = 0
        self._has_warned_of_capture = False
        self._tokens = 0
        self._tokens_of_times = 0
        self._agreed_bytes: int | None = None  # smallest budget of all ranks
        self._failures = 0
        self._measured = profile
        self._overwritten: set[tuple[str, int]] = set()
        self._cpu_region_s = 0.0  # of the warm-up
        self._has_timed_again = False
        self._inputs: ProfileInputs | None = None  # of the profile with all regions as the user compiled them
        self._rounds: list[Budgets] = [{}]  # activation memory budgets of the regions in each round of steps
        self._measured_at: list[tuple[Budgets, Profile]] = []  # rounds so far
        self._memory_before: tuple[dict[str, int], dict[str, int]] = {}, {}  # before the detailed step
        self.is_warming_up = False
        """Whether the current forward warms up: times and peaks do not count."""
        self.tuner: PlanTuner | None = None
        """None until there is a profile."""
        self.phase = Phase.WARM

    @property
    def profile(self) -> Profile | None:
        """Profile of a step, as far as known."""
        return self._measured if self.tuner is None else self.tuner.profile

    @property
    def user_budget_bytes(self) -> int | None:
        """The user's budget, or the smallest budget of all ranks; None without a budget, and for a share of an unknown
        device."""
        return self._goal_bytes() or None

    @property
    def measured(self) -> tuple[float, int]:
        """Measured seconds and peak bytes of a step by the current plan; 0: unknown."""
        return (0.0, 0) if self.tuner is None else self.tuner.measured

    @property
    def recomputes(self) -> bool:
        """Whether the first steps recompute every region."""
        return self._budget_of is not None or self._max_slowdown is not None or self._always_recompute

    @property
    def counts_steps(self) -> bool:
        """Whether optimizers are to tell when a step ends."""
        return self.is_measuring or (self._ranks is not None and self.phase is not Phase.GAVE_UP)

    @property
    def steps(self) -> int:
        """Number of steps to measure, as far as known."""
        return len(_MEASURING) * len(self._rounds)

    @property
    def is_measuring(self) -> bool:
        """Whether steps are still measured."""
        return self.phase in _MEASURING

    @property
    def is_plan_frozen(self) -> bool:
        """Whether the recipes in force stay until something changes."""
        return self.phase is Phase.GAVE_UP or (self.tuner is not None and self.tuner.is_plan_frozen)

    @property
    def status(self) -> str:
        """Reason for a missing plan; "" with a plan."""
        if self.is_measuring:
            number = len(_MEASURING) * len(self._measured_at) + _MEASURING.index(self.phase) + 1
            return f"no plan yet: measuring step {number} of {self.steps}"
        if self.phase is Phase.SOLVING:
            return "no plan yet: solving"
        if self.phase is Phase.STAGES:
            return f"no plan yet: {self.phase.value}"
        if self.tuner is not None:
            return "no plan at hand: solving again" if self.tuner.has_stopped_plan else ""
        return f"no plan: training {self.phase.value}"

    def start(self, is_stage: bool = False) -> None:
        """Apply the first plan. With a profile the plan to follow, if the module is no stage: others may come.

        Raises PlanError if the given profile does not match the model, or if no plan fits.
        """
        profile = self._measured
        if profile is None:
            self._handle.apply_plan(self._first_plan())
            return
        profile.check_made_for(self._handle.made_for())
        if self._budget_of is not None or self._max_slowdown is not None:
            profile.check_has_recomputation()
        self._tokens = profile.tokens
        agreed = self._agreed(profile)
        assert agreed is not None
        if is_stage:
            self._measured, self.phase = agreed, Phase.STAGES
            self._handle.apply_plan(self._first_plan())
            return
        self._plan_from(agreed)
        assert self.tuner is not None
        self._or_give_up(self.tuner.wait)
        self.phase = Phase.PLANNED

    def _plan_beside_stages(self, profile: Profile) -> None:
        """Ask for a plan once all stages that share the budget are measured."""
        self._measured = profile
        stages = [each for each in self._stages() if each.has_budget] if self.has_budget else [self]
        profiles = [each.measured_profile for each in stages]
        found = [each for each in profiles if each is not None]
        if len(found) < len(stages):
            if self.phase is not Phase.STAGES:
                self.phase = Phase.STAGES
                _log.info("%s", self.status)
            return
        own = stages.index(self)
        self._plan_from(profile, (tuple(found[:own]), tuple(found[own + 1 :])))

    @property
    def has_budget(self) -> bool:
        """Whether plans keep a budget, or will."""
        return self._budget_of is not None and self.phase is not Phase.GAVE_UP

    @property
    def measured_profile(self) -> Profile | None:
        """The profile of the measured steps, as far as known: the same whenever another stage asks."""
        return self._measured

    def _plan_from(self, profile: Profile, beside: tuple[tuple[Profile, ...], tuple[Profile, ...]] = ((), ())) -> None:
        """Ask for a plan. Raises PlanError if nothing fits: the first recipes stay, which have the smallest peak.

        `beside`: profiles of the other stages that share the budget, as in `Question`.
        """
        self.phase = Phase.GAVE_UP
        self._measured = profile
        self.tuner = PlanTuner(
            _WithUnseenRegions(self._handle, self._unseen_in(profile)),
            profile,
            self._context.recorder,
            self._goal_bytes,
            self._handle.engine(),
            waits=env.waits_for_plans(),
            max_slowdown=self._max_slowdown,
            first=self._first_plan(prefetch_bytes=1 if self.recomputes else None),
            replans_on_oom=self._replans_on_oom,
            ranks=self._ranks,
            own_tokens=self._tokens,
            beside=beside,
            is_stage=len(self._stages()) > 1,
        )
        self.phase = Phase.PLANNED if self.tuner.has_plan else Phase.SOLVING
        if self.phase is Phase.SOLVING:
            _log.info("%s", self.status)

    def _or_give_up(self, do: Callable[[], _Result]) -> _Result:
        """The result of `do`. After a PlanError the first recipes stay."""
        try:
            return do()
        except PlanError:
            self.tuner, self.phase = None, Phase.GAVE_UP
            raise

    def replan(self) -> None:
        """Plan again from what was measured; nothing to do before the first plan. Among several ranks when they meet
        next."""
        if self.tuner is not None:
            self.tuner.replan()

    def _unseen_in(self, profile: Profile) -> dict[str, RegionPlan]:
        """With a budget, the recipe with the smallest peak for regions that no measured step entered."""
        if self._budget_of is None:
            return {}
        known = {*(region.name for region in profile.regions), *self._nested}
        least = RegionPlan(Recipe("recompute"), reason="entered by no measured step: smallest peak")
        return {name: least for name in self._names if name not in known}

    def _first_plan(self, prefetch_bytes: int | None = None) -> Plan:
        """Within a budget the recipes with the smallest peak, whatever the defaults of windows."""
        release, prefetch_bytes = ((ReleasePoint(0, 0),), 1) if self._budget_of is not None else ((), prefetch_bytes)
        recipe, keep = Recipe("recompute" if self.recomputes else "keep"), Recipe("keep")
        kept = self._handle.never_recomputed()
        at = {name: Recipe("recompute", activation_memory_budget=budget) for name, budget in self._budgets.items()}
        regions = {
            name: RegionPlan(keep if name in kept else at.get(name, recipe), release, prefetch_bytes)
            for name in self._names
        }
        return Plan(regions, outside=RegionPlan(Recipe("keep")))

    @property
    def _budgets(self) -> Budgets:
        """Of the round of measured steps."""
        return self._rounds[len(self._measured_at)] if self.is_measuring else {}

    # -- a step ----------------------------------------------------------------------------------------------------

    def step_begins(self, tokens: int, is_verified: bool = False) -> StepRecorder | None:
        """Apply the plan of a training forward, and return the recorder of the step; None if nothing is recorded. The
        duration of a verified step is ignored."""
        self.is_warming_up = False
        engine = self._handle.engine()
        if engine is None and self.status and self._handle.is_captured():
            self._warn_of_capture()
        if engine is None or self.phase is Phase.GAVE_UP:
            return None
        ranks, meets = self._ranks, False
        if ranks is not None and ranks.forward_begins(self._handle.have_stepped()):
            meets = True
            if self.tuner is None and self.phase is not Phase.STAGES:
                self._agree_on_profile(ranks, engine)
        if self.phase is Phase.STAGES:
            assert self._measured is not None
            self._plan_beside_stages(self._measured)
        if self.tuner is not None:
            return self._planned_step(engine, tokens, is_verified, meets)
        return None if meets or self.phase is Phase.STAGES else self._recorded_step(engine, tokens)

    def _planned_step(
        self, engine: Engine, tokens: int, is_verified: bool = False, meets: bool = False
    ) -> StepMonitor | None:
        tuner = self.tuner
        assert tuner is not None
        tuner.never_recompute(self._handle.never_recomputed())
        monitor = self._or_give_up(lambda: tuner.step_begins(engine, tokens, is_verified, meets))
        if self.phase is Phase.SOLVING and tuner.has_plan:
            self.phase = Phase.PLANNED
        return monitor

    def _warn_of_capture(self) -> None:
        if not self._has_warned_of_capture:
            self._has_warned_of_capture = True
            keeps_all = self.tuner is not None and any(plan.keeps_all for plan in self.tuner.plans.values())
            does = "recomputes every region" if self.recomputes and not keeps_all else "moves nothing"
            warnings.warn(
                f"a graph is captured before there is a plan, and {does} in every replay. Capture when handle.profile "
                "is no longer None, or give offload() the profile of an earlier run (profile=)",
                EbbtideWarning,
                stacklevel=2,
            )

    def _recorded_step(self, engine: Engine, tokens: int) -> StepRecorder | None:
        pending = None if self._recorded is None else self._recorded.pending
        if pending is not None:
            return self._wait_for_backward(pending, engine)
        if tokens == 0 < self._tokens:
            return self._monitor_only(engine)  # an empty batch is no example of a step
        ended = self._ended_recorder
        is_unended = ended is None and self._recorded is not None
        if is_unended and compiled_backwards() > self._compiled_backwards:  # nobody sees those end
            self._give_up(
                "backward runs under compiled autograd, where no step can be measured", "Leave compiled autograd off, "
                "or write what each region does (recipe=)",
            )  # fmt: skip
            return None
        if ended is not None:
            waits_for_ranks = self._ranks is not None and self._is_last_round
            if self.phase is Phase.DETAILS and (waits_for_ranks or not ended.is_readable):
                return self._monitor_only(engine)  # until all ranks meet, or the device has finished
            self._move_on(ended, engine)
            if self.tuner is not None:
                return self._planned_step(engine, tokens)
        is_detailed = self.phase is Phase.DETAILS
        self._tokens = tokens
        if self.phase is Phase.TIMES:
            self._tokens_of_times = tokens
        if is_detailed:
            self._memory_before = self._handle.memory_before()
        # Without a budget inputs come back early in the timed step, which then waits less. Comparisons and longer
        # lifetimes take memory in the others.
        is_timed = self.phase is Phase.TIMES
        self._handle.apply_plan(self._first_plan(prefetch_bytes=1 if self.recomputes and not is_timed else None))
        self.is_warming_up = self.phase is Phase.WARM and self.recomputes
        _log.info("%s", self.status)
        recorder = ProfilingRecorder(
            engine, self._context, is_detailed=is_detailed, recomputes=self.recomputes,
            op_classes=self._op_classes if self.recomputes else None, is_first=self.phase is Phase.WARM,
            cpu_region_s=self._cpu_region_s, kept=self._handle.never_recomputed(),
            limit_bytes=self._goal_bytes() if engine.device.tracks_peak else None,
        )  # fmt: skip
        self._order.forward_begins(recorder)
        recorder.graphs = self._order.in_flight
        self._recorded = InFlightStep(recorder)
        self._waited = 0
        recorder.began()
        return recorder

    @property
    def _ended_recorder(self) -> ProfilingRecorder | None:
        return None if self._recorded is None else self._recorded.ended

    def _monitor_only(self, engine: Engine) -> StepMonitor:
        """Monitor of a forward that is not recorded: the graph counts among the graphs in flight."""
        monitor = StepMonitor(engine.device, reads_peak=False)
        self._order.forward_begins(monitor)
        return monitor

    def _agree_on_profile(self, ranks: Ranks, engine: Engine) -> None:
        """In one step all ranks say whether they have a profile, whatever happened before: no rank may be late.

        If a rank has no profile, all ranks measure again, with more steps: one step may have several forwards.
        """
        ranks.meet_after(2 * ranks.step)
        ended = self._ended_recorder
        if self.phase is Phase.DETAILS and self._is_last_round and ended is not None:
            self._move_on(ended, engine)
            return
        self._recorded = None
        profile = self._kept(self._agreed(self._with_points(None)))
        if profile is not None:
            self._plan_from(profile)

    @property
    def _is_last_round(self) -> bool:
        """Whether the measured steps are the last, as far as known."""
        return len(self._measured_at) + 1 == len(self._rounds)

    def _wait_for_backward(self, pending: ProfilingRecorder, engine: Engine) -> StepMonitor:
        """The recorded graph has not run backward: several forwards make one loss, or a pipeline."""
        monitor = self._monitor_only(engine)
        pending.graphs = max(pending.graphs, self._order.in_flight)
        self._waited += 1
        if self._waited >= _FORWARDS_TO_WAIT:
            self._recorded = None
        return monitor

    def _move_on(self, recorder: ProfilingRecorder, engine: Engine) -> None:
        """Begin the next phase, or plan."""
        if self.phase is Phase.WARM:
            self.phase = Phase.TIMES
            self._overwritten |= recorder.overwritten()
            if self._measured_at:
                _log.info("compiled variants so far: %d, in %.1f s", *self._handle.compilations())
            self._context.derived |= recorder.derived()
            self._cpu_region_s = recorder.cpu_region_s
        elif self.phase is Phase.TIMES:
            is_off = recorder.collecting > THRESHOLDS.off and self._ranks is None  # several ranks count steps
            if is_off and not self._has_timed_again:
                self._has_timed_again = True
                _log.info("the timed step is repeated: Python's garbage collector looked at all objects meanwhile")
                return
            self.phase, self._times = Phase.DETAILS, recorder
        else:
            profile = self._read(recorder, engine)
            if profile is not None:
                self._plan_beside_stages(profile)

    def _read(self, details: ProfilingRecorder, engine: Engine) -> Profile | None:
        """Profile of the measured steps; None if they do not match, or if there are more to come."""
        assert self._times is not None
        while not details.is_readable:  # all ranks have to plan in one step
            time.sleep(1e-4)
        found = self._profile(self._times, details, engine)
        self._times = self._recorded = None
        if self._ranks is not None and not self._measured_at:
            found = self._agreed(found)  # all ranks measure the same regions at the same budgets next
            if found is None or not self._begins_round(found):
                return self._kept(found)
            self._ranks.meet_after(len(_MEASURING) * (len(self._rounds) - 1) + 1)
            return None
        if found is not None and self._begins_round(found):
            return None
        return self._kept(self._agreed(self._with_points(found)))

    def _kept(self, profile: Profile | None) -> Profile | None:
        """`profile`, handed over to the owner; None has the steps measured again."""
        if profile is None:
            self._could_not_read()
        elif self._on_profile is not None:
            self._on_profile(profile)
        return profile

    def _begins_round(self, found: Profile) -> bool:
        """Whether more steps are to be measured, with compiled regions at other activation memory budgets.

        `found`: the profile of the steps so far, of this round.
        """
        if not self._measured_at and self.recomputes:
            regions = self._handle.partitionable()
            self._rounds += rounds_of(found, regions, THRESHOLDS.partitions)
            if len(self._rounds) > 1:
                variants = len(THRESHOLDS.partitions) * len(set(regions.values()))
                _log.info("compiling variants beside the user's own: %d, for %d regions", variants, len(regions))
        self._measured_at.append((self._budgets, found))
        if len(self._measured_at) == len(self._rounds):
            return False
        self.phase = Phase.WARM
        return True

    def _with_points(self, found: Profile | None) -> Profile | None:
        """The profile of the first round, with what later rounds have measured. `found`: None if a round has failed."""
        if not self._measured_at:
            return found
        (_, profile), *others = self._measured_at
        scaled = [(budgets, other.scaled(profile.tokens)) for budgets, other in others]
        return with_points(profile, self._handle.partitionable(), scaled) if scaled else profile

    def conclude(self) -> Profile | None:
        """Finish measuring without another step or a plan. Returns the profile if the steps so far suffice."""
        engine, ended = self._handle.engine(), self._ended_recorder
        if self.phase is Phase.DETAILS and engine is not None and ended is not None:
            self._measured = self._read(ended, engine)
        return self.profile

    def _could_not_read(self) -> None:
        """The measured steps entered different regions, or none: measure again, a few times."""
        self._failures += 1
        self._names = tuple(name for name in self._names if name not in self._nested)
        self.phase = Phase.TIMES
        if self._failures == _MOST_FAILURES:
            self._give_up(
                f"the steps entered different regions each time, or none of {len(self._names)} "
                f"({', '.join(self._names[:4])}, ...)", "Name regions that every step enters: regions=[...]",
            )  # fmt: skip

    def _give_up(self, why: str, advice: str) -> None:
        self.phase, self._recorded = Phase.GAVE_UP, None
        done = "are recomputed, with their inputs offloaded" if self.recomputes else "are kept"
        warnings.warn(f"no plan was made: {why}. All {done}. {advice}", EbbtideWarning, stacklevel=2)

    def _profile(self, times: ProfilingRecorder, details: ProfilingRecorder, engine: Engine) -> Profile | None:
        scale = self._tokens / self._tokens_of_times if min(self._tokens, self._tokens_of_times) > 0 else 1.0
        graphs = max(times.graphs, details.graphs)
        inputs = self._new_inputs(details, engine) if self._inputs is None else self._inputs
        inputs = inputs._replace(
            tokens=self._tokens, time_scale=scale, graphs=graphs, passes=self._order.passes,
            is_stage=len(self._stages()) > 1,
        )  # fmt: skip
        profile = profile_of(times, details, self._names, inputs)
        if profile is None:
            return None
        self._inputs = inputs._replace(recipe_costs=None)  # later rounds are of the same model on the same host
        return with_host(profile, profile.host)

    def _new_inputs(self, details: ProfilingRecorder, engine: Engine) -> ProfileInputs:
        base, grads = self._memory_before
        lanes = probe_link(engine)
        if lanes is None:
            self.phase = Phase.GAVE_UP
            self._agreed(None)  # all ranks wait for an answer
            raise PlanError(
                "the store has no room for a single megabyte: give it a larger host_limit, or another store="
            )
        probe = self._probe_recipes if engine.device.is_async else None
        costs = None if probe is None else probe(engine)
        goal_bytes = self._goal_bytes()
        room_bytes = None
        if goal_bytes is not None and engine.device.tracks_peak:
            room_bytes = goal_bytes - engine.device.memory().allocated_bytes
        return ProfileInputs(
            made_for=self._handle.made_for(),
            link=Link(lanes.out, lanes.back, _LATENCY_S, lanes.interference),
            base=base,
            grads=grads,
            host_limit_bytes=engine.store_stats().limit_bytes,
            tokens=self._tokens,
            compiled=frozenset(self._handle.compiled()),
            device_bytes=engine.device.total_bytes(),
            recipe_costs=costs,
            derivations=probe_derivations(engine.device, derivable(details), room_bytes),
            overwritten=self._overwritten,
        )

    def _agreed(self, profile: Profile | None) -> Profile | None:
        """Slowest profile of all ranks; None if a rank has no profile. All ranks wait until every rank has called."""
        if self._ranks is not None:
            profile, self._agreed_bytes = self._ranks.agreed(profile, self.budget_bytes)
        return profile

    @property
    def budget_bytes(self) -> int | None:
        """Limit of predicted peaks; None without a budget."""
        return self._goal_bytes() if self.tuner is None else self.tuner.budget_bytes

    def _goal_bytes(self) -> int | None:
        """Peak to stay under now; the smallest budget of all ranks after an agreement."""
        if self._budget_of is None or self._agreed_bytes is not None:
            return self._agreed_bytes
        engine = self._handle.engine()
        return self._budget_of(0 if engine is None else engine.device.total_bytes())

    def forward_failed(self) -> None:
        """An exception leaves forward. A note about the plan is added to an out-of-memory error."""
        error = sys.exc_info()[1]
        self._recorded = None
        if self.tuner is not None:
            self.tuner.forward_failed(error, self._handle.engine())
        elif isinstance(error, torch.OutOfMemoryError):
            least = f"ebbtide: the step {self.phase.value}, and no recipes have a smaller peak"
            add_note(error, NO_BUDGET if self._budget_of is None else least)
