"""From the first steps to a profile and a plan: what a handle asks at the beginning of every step.

Note [PlanController]
~~~~~~~~~~~~~~
1. The first steps run with what needs the least: every region runs again with its inputs moved if there is a budget,
   every region keeps if there is none. One step warms up, one is watched for times, one for details; then the plan.
2. From then on upkeep.py looks after it.
3. Where a job has several ranks and regions may run again, all ranks go by one plan, from the slowest of their
   profiles, whatever sizes their batches are of. Ranks vote on the plan between two steps, before the fourth one (and
   before the 12th and the 36th if not all have a profile by then). A step ends when an optimizer has stepped, for ranks
   may run different numbers of forwards in one; where no optimizer of torch is seen, each forward counts as a step.
"""

import dataclasses
import enum
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from ebbtide._control.in_flight import InFlightStep
from ebbtide._control.ranks import Agree, Answer, agreed_profile
from ebbtide._control.tuner import PlanTarget, PlanTuner
from ebbtide._engine.context import HookContext
from ebbtide._engine.engine import Engine
from ebbtide._errors import EbbtideWarning, PlanError, add_note
from ebbtide._planner.explain import NO_BUDGET
from ebbtide._planner.launch_ahead import with_host
from ebbtide._plans import Plan, Recipe, RegionPlan
from ebbtide._profiling.build import Surroundings, profile_of
from ebbtide._profiling.link_probe import link_rates
from ebbtide._profiling.profile import Link, Profile
from ebbtide._profiling.recorder import StepWatch
from ebbtide._profiling.step_events import StepMonitor
from ebbtide._utils.logs import logger_of
from ebbtide.types import Dearness, StepRecorder

_log = logger_of(__name__)

_FIRST_VOTE = 4  # steps: one to warm up, two that are watched, and the one that begins with a vote
_LATENCY_S = 1e-5
_MOST_FAILURES = 3
_FORWARDS_TO_WAIT = 1000  # for the backward of a graph that somebody holds


class Planned(PlanTarget, Protocol):
    """The handle, as its control sees it."""

    def engine(self) -> Engine | None:
        """Of the device that the model computes on; None while nothing can move there."""
        ...

    def is_captured(self) -> bool:
        """Whether what the model computes goes into a graph that is being captured."""
        ...

    def made_for(self) -> Mapping[str, str]:
        """What a profile has to be of, by name."""
        ...

    def compiled(self) -> Collection[str]:
        """Regions whose operators the compiler hides."""
        ...

    def never_recomputed(self) -> Collection[str]:
        """Regions whose recomputation was seen to differ from their forward."""
        ...

    def have_stepped(self) -> bool:
        """Whether an optimizer has stepped since this was called last."""
        ...

    def memory_before(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by kind (parameters, gradients, the state of optimizers) as they are now, and of the gradients that a
        backward would allocate, by region."""
        ...


class Phase(enum.Enum):
    """What the step at hand is for."""

    WARM = "warms up"
    TIMES = "is watched for times"
    DETAILS = "is watched for details"
    PLANNED = "goes by the plan"
    GAVE_UP = "goes by the recipes it began with"


_MEASURING = (Phase.WARM, Phase.TIMES, Phase.DETAILS)


class _AndUnseen:
    """A handle whose plans are also of regions that their profile says nothing of."""

    def __init__(self, handle: PlanTarget, unseen: Mapping[str, RegionPlan]) -> None:
        self._handle = handle
        self._unseen = unseen

    def apply_plan(self, plan: Plan, size: int = 0) -> None:
        regions = {**plan.regions, **self._unseen}
        self._handle.apply_plan(dataclasses.replace(plan, regions=regions) if self._unseen else plan, size)


class PlanController:
    """Plans for one handle.

    Args:
        handle: whose plan it sets.
        names: of its regions.
        scope: its saves' scope.
        budget_bytes: the peak to stay under; None: move what costs no time.
        profile: of this model, measured before; spares the watched steps.
        replans_on_oom: plan for less after the device ran out of memory.
        agree: gives the answers of all ranks for this rank's one; None where there is only one.
        keep: is given the profile as soon as it is measured.
        looks_again: run every region again in the first steps also without a budget, for a profile that serves any.
        guessed: those of `names` that nobody knows to be entered on their own, and that are let go if no profile is
            made: some module may call itself what should come behind it.
    """

    def __init__(
        self,
        handle: Planned,
        names: tuple[str, ...],
        scope: HookContext,
        budget_bytes: Callable[[int], int] | None,
        dearness: Dearness,
        profile: Profile | None = None,
        replans_on_oom: bool = False,
        agree: Agree | None = None,
        keep: Callable[[Profile], None] | None = None,
        looks_again: bool = False,
        guessed: Collection[str] = (),
    ) -> None:
        self._handle = handle
        self._names = names
        self._scope = scope
        self._budget_of = budget_bytes
        self._dearness = dearness
        self._replans_on_oom = replans_on_oom
        self._agree = agree
        self._keep = keep
        self._looks_again = looks_again
        self._guessed = guessed
        self._times: StepWatch | None = None
        self._watched: InFlightStep[StepWatch] | None = None
        self._beside: list[InFlightStep[StepMonitor]] = []  # forwards that are not watched
        self._waited = 0
        self._has_warned_of_capture = False
        self._forwards = 0
        self._steps = 0  # that optimizers have ended
        self._next_vote = _FIRST_VOTE
        self._tokens = 0
        self._tokens_of_times = 0
        self._agreed_bytes: int | None = None  # the smallest budget of all ranks
        self._failures = 0
        self._measured = profile
        self._overwritten: set[tuple[str, int]] = set()
        self._host_forward_s = 0.0  # in the step that warms up
        self._memory_before: tuple[dict[str, int], dict[str, int]] = {}, {}  # the step that is watched for details
        self.is_warming_up = False
        """Whether the forward at hand warms up: none of its times and peaks count."""
        self.upkeep: PlanTuner | None = None
        """Of the plans, once there is a profile."""
        self.phase = Phase.WARM

    @property
    def profile(self) -> Profile | None:
        """What a step does, as far as the steps so far have shown."""
        return self._measured if self.upkeep is None else self.upkeep.profile

    @property
    def asked_bytes(self) -> int | None:
        """The user's budget, or the smallest of all ranks'; None without one, and for a share of an unknown device."""
        return self._asked_bytes() or None

    @property
    def measured(self) -> tuple[float, int]:
        """Seconds and peak in bytes of a step by the current plan; 0: unknown as yet."""
        return (0.0, 0) if self.upkeep is None else self.upkeep.measured

    @property
    def recomputes(self) -> bool:
        """Whether the first steps run every region again."""
        return self._budget_of is not None or self._looks_again

    @property
    def is_measuring(self) -> bool:
        """Whether steps are still to be watched."""
        return self.phase in _MEASURING

    @property
    def status(self) -> str:
        """Why there is no plan; "" with one."""
        if self.is_measuring:
            return f"no plan yet: measuring step {_MEASURING.index(self.phase) + 1} of {len(_MEASURING)}"
        return f"no plan: training {self.phase.value}" if self.upkeep is None else ""

    def start(self) -> None:
        """Set what the first steps go by. Raises PlanError if the profile given is of something else, or none fits."""
        profile = self._measured
        if profile is None:
            self._set_first()
            return
        profile.check_made_for(self._handle.made_for())
        if self._budget_of is not None:
            profile.check_second_runs()
        if self._agree is not None:
            profile = self._agreed(profile)
            assert profile is not None
        self._plan_from(profile)

    def _plan_from(self, profile: Profile) -> None:
        """Raises PlanError if nothing fits; then all goes on as it began, which needs the least there is."""
        self.phase = Phase.GAVE_UP
        self._measured = profile
        self.upkeep = PlanTuner(
            _AndUnseen(self._handle, self._unseen_in(profile)),
            profile,
            self._scope.ledger,
            self._asked_bytes,
            self._handle.engine(),
            replans_on_oom=self._replans_on_oom,
            is_shared=self._agree is not None,
        )
        self.phase = Phase.PLANNED

    def _unseen_in(self, profile: Profile) -> dict[str, RegionPlan]:
        """Of regions that no watched step came by, within a budget: what needs the least, should a later one do so."""
        if self._budget_of is None:
            return {}
        known = {*(region.name for region in profile.regions), *self._guessed}
        least = RegionPlan(Recipe("recompute"), reason="no watched step came by: what needs the least")
        return {name: least for name in self._names if name not in known}

    def _set_first(self, prefetch_bytes: int | None = None) -> None:
        recipe, keep = Recipe("recompute" if self.recomputes else "keep"), Recipe("keep")
        kept = self._handle.never_recomputed()
        regions = {
            name: RegionPlan(keep if name in kept else recipe, prefetch_bytes=prefetch_bytes) for name in self._names
        }
        self._handle.apply_plan(Plan(regions, outside=RegionPlan(Recipe("keep"))))

    # -- a step ----------------------------------------------------------------------------------------------------

    def step_begins(self, tokens: int, is_verified: bool = False) -> StepRecorder | None:
        """Before a forward that saves: sets the plan it goes by, and returns what follows it. What a planned forward
        takes that `is_verified` says nothing of its plan."""
        self.is_warming_up = False
        engine = self._handle.engine()
        if engine is None and self.is_measuring and self._handle.is_captured():
            self._warn_of_capture()
        if engine is None or self.phase is Phase.GAVE_UP:
            return None
        if self.upkeep is not None:
            self.upkeep.never_recompute(self._handle.never_recomputed())
            return self.upkeep.step_begins(engine, tokens, is_verified)
        return self._watched_step(engine, tokens)

    def _warn_of_capture(self) -> None:
        """Nothing can be watched there, and the graph is what will be replayed."""
        if not self._has_warned_of_capture:
            self._has_warned_of_capture = True
            does = "runs every region again" if self.recomputes else "moves nothing"
            warnings.warn(
                f"a graph is captured before there is a plan, and {does} whenever it is replayed. Capture it when "
                "handle.profile is no longer None, or give offload() the profile of an earlier run (profile=)",
                EbbtideWarning,
                stacklevel=2,
            )

    def _watched_step(self, engine: Engine, tokens: int) -> StepRecorder | None:
        if self._agree is not None and self._is_to_vote():
            self._vote(engine)
            return None if self.upkeep is None else self.upkeep.step_begins(engine, tokens)
        waits_for = None if self._watched is None else self._watched.under_way
        if waits_for is not None:
            return self._wait_for_backward(waits_for, engine)
        if tokens == 0 < self._tokens:
            return self._go_beside(engine)  # an empty batch says nothing of a step
        watch = self._watch_that_ended
        if watch is not None:
            if self.phase is Phase.DETAILS and (self._agree is not None or not watch.is_readable):
                return self._go_beside(engine)  # until all vote, or the device has come by
            self._move_on(watch, engine)
            if self.upkeep is not None:
                return self.upkeep.step_begins(engine, tokens)
        is_detailed = self.phase is Phase.DETAILS
        self._tokens = tokens
        if self.phase is Phase.TIMES:
            self._tokens_of_times = tokens
        if is_detailed:
            self._memory_before = self._handle.memory_before()
        self._set_first(prefetch_bytes=1 if is_detailed and self.recomputes else None)
        self.is_warming_up = self.phase is Phase.WARM and self.recomputes
        _log.info("%s", self.status)
        watch = StepWatch(
            engine, self._scope, is_detailed=is_detailed, recomputes=self.recomputes,
            dearness=self._dearness if self.recomputes else None, is_first=self.phase is Phase.WARM,
            host_forward_s=self._host_forward_s, kept=self._handle.never_recomputed(),
        )  # fmt: skip
        watch.graphs = 1 + self._under_way()
        self._watched = InFlightStep(watch)
        self._waited = 0
        watch.began()
        return watch

    @property
    def _watch_that_ended(self) -> StepWatch | None:
        return None if self._watched is None else self._watched.ended

    def _go_beside(self, engine: Engine) -> StepMonitor:
        """A forward that is not watched, and whose graph counts while it is there."""
        pulse = StepMonitor(engine.device, looks_at_peak=False)
        self._beside = [*(flight for flight in self._beside if flight.under_way is not None), InFlightStep(pulse)]
        return pulse

    def _under_way(self) -> int:
        """Graphs of forwards that were not watched, and whose backward is to come."""
        return sum(flight.under_way is not None for flight in self._beside)

    def _is_to_vote(self) -> bool:
        """Counts, and is asked once for each forward."""
        self._forwards += 1
        if self._handle.have_stepped():
            if self._steps == 0:
                self._next_vote = _FIRST_VOTE  # what was counted before were forwards
            self._steps += 1
            return self._steps + 1 == self._next_vote
        return self._steps == 0 and self._forwards == self._next_vote

    def _vote(self, engine: Engine) -> None:
        """In the same step all ranks say whether they have a profile, whatever came between: none may be late.

        If not all have one, each watches anew, and has more steps for it than before: one may be of several forwards.
        """
        self._next_vote *= 3
        watch = self._watch_that_ended
        if self.phase is Phase.DETAILS and watch is not None:
            self._move_on(watch, engine)
        else:
            self._agreed(None)
            self._watched = None
            self._could_not_read()

    def _wait_for_backward(self, watch: StepWatch, engine: Engine) -> StepMonitor:
        """The graph that is watched has not run backward: several make one loss, or a pipeline."""
        pulse = self._go_beside(engine)
        watch.graphs = max(watch.graphs, 1 + self._under_way())
        self._waited += 1
        if self._waited >= _FORWARDS_TO_WAIT:
            self._watched = None
        return pulse

    def _move_on(self, watch: StepWatch, engine: Engine) -> None:
        """To the next phase, or to a plan."""
        if self.phase is Phase.WARM:
            self.phase, self._overwritten = Phase.TIMES, watch.overwritten()
            self._host_forward_s = watch.host_forward_s
        elif self.phase is Phase.TIMES:
            self.phase, self._times = Phase.DETAILS, watch
        else:
            profile = self._read(watch, engine)
            if profile is not None:
                self._plan_from(profile)

    def _read(self, watch: StepWatch, engine: Engine) -> Profile | None:
        """What the two steps that were watched make; None if they make no profile."""
        assert self._times is not None
        while not watch.is_readable:  # ranks have to come to their plan in the same step
            time.sleep(1e-4)
        profile = self._profile(self._times, watch, engine)
        self._times = self._watched = None
        if profile is None:
            self._could_not_read()
        elif self._keep is not None:
            self._keep(profile)
        return profile

    def conclude(self) -> Profile | None:
        """The profile, if the steps so far make one: what the next step would begin with, if there were one."""
        engine, watch = self._handle.engine(), self._watch_that_ended
        if self.phase is Phase.DETAILS and engine is not None and watch is not None:
            self._move_on(watch, engine)
        return self.profile

    def _could_not_read(self) -> None:
        """The watched steps came by other regions, or by none: they are watched again, a few times."""
        self._failures += 1
        self._names = tuple(name for name in self._names if name not in self._guessed)
        self.phase = Phase.TIMES
        if self._failures == _MOST_FAILURES:
            self.phase = Phase.GAVE_UP
            done = "run again with their inputs moved" if self.recomputes else "are kept"
            warnings.warn(
                f"no plan was made: the steps came by other regions each time, or by none of {len(self._names)} "
                f"({', '.join(self._names[:4])}, ...). All {done}. Name some that every step comes by: regions=[...]",
                EbbtideWarning,
                stacklevel=2,
            )

    def _profile(self, times: StepWatch, details: StepWatch, engine: Engine) -> Profile | None:
        base, grads = self._memory_before
        rates = link_rates(engine)
        if rates is None:
            self.phase = Phase.GAVE_UP
            if self._agree is not None:
                self._agreed(None)  # the others wait for an answer
            raise PlanError(
                "the store has no room for a single megabyte: give it a larger host_limit, or another store="
            )
        about = Surroundings(
            made_for=self._handle.made_for(),
            link=Link(*rates, _LATENCY_S),
            base=base,
            grads=grads,
            host_limit_bytes=engine.store_stats().limit_bytes,
            tokens=self._tokens,
            compiled=frozenset(self._handle.compiled()),
            time_scale=self._tokens / self._tokens_of_times if min(self._tokens, self._tokens_of_times) > 0 else 1.0,
            device_bytes=engine.device.total_bytes(),
            graphs=max(times.graphs, details.graphs),
            overwritten=self._overwritten,
        )
        profile = profile_of(times, details, self._names, about)
        if profile is not None:
            profile = with_host(profile, profile.host)
        if self._agree is None:
            return profile
        return self._agreed(profile)

    def _agreed(self, profile: Profile | None) -> Profile | None:
        """The slowest of all ranks'; None if one of them has none. Every rank asks, for the others wait for it."""
        assert self._agree is not None
        answers = self._agree(Answer(profile, self.budget_bytes))
        budgets = [answer.budget_bytes for answer in answers if answer.budget_bytes is not None]
        self._agreed_bytes = min(budgets, default=None)
        found = [answer.profile for answer in answers if answer.profile is not None]
        return agreed_profile(found) if len(found) == len(answers) else None

    @property
    def budget_bytes(self) -> int | None:
        """What is planned for, if there is a budget."""
        return self._asked_bytes() if self.upkeep is None else self.upkeep.budget_bytes

    def _asked_bytes(self) -> int | None:
        """The peak to stay under now; the smallest of all ranks' once they have agreed."""
        if self._budget_of is None or self._agreed_bytes is not None:
            return self._agreed_bytes
        engine = self._handle.engine()
        return self._budget_of(0 if engine is None else engine.device.total_bytes())

    def forward_failed(self) -> None:
        """An exception leaves the forward. If the device is out of memory, say what was planned."""
        error = sys.exc_info()[1]
        self._watched = None
        if self.upkeep is not None:
            self.upkeep.forward_failed(error, self._handle.engine())
        elif isinstance(error, torch.OutOfMemoryError):
            least = f"ebbtide: the step {self.phase.value}, which needs the least that recipes can do"
            add_note(error, NO_BUDGET if self._budget_of is None else least)
