"""Compares the steps of a plan with the prediction, and corrects the plan.

Note [PlanTuner]
~~~~~~~~~~~~~~~~
1. The duration of each step is compared with the prediction without waiting for the step: the CPU may be steps ahead of
   the device, so several monitors are in flight. Overlapping steps (two forwards, then backward) are not compared.
2. After a lasting deviation of more than `plan_stats.REPLAN_AT` the profile is refitted and solved again. The link gets
   the rates of measured copies, the CPU the time of forward if compute waits for the CPU, and compute the time of
   regions without such waiting (speed_scale.py), or else the step without stalls. Compute must not be blamed for a slow
   CPU: a CPU with shared cores is slow for seconds, and regions that keep would look as slow as recomputed regions.
   Each correction takes more patience, a plan slower than the best plan so far gives way to the best plan, and the
   number of corrections is limited over all batch sizes: plans cannot oscillate.
   With a budget, replan once after 5 s if the step is off by 2 %: clocks have settled by then, and plans at the limit
   of the link change if compute is a few percent slower.
3. Without a budget no step may be slower than keeping everything (law 12). The prediction cannot tell a slow plan from
   a slow machine, so a plan over the predicted time is compared: eight steps keep everything and, if these were faster,
   eight steps follow the plan again. A plan as fast as keeping everything stays, until steps are slower than in the
   comparison. Else the profile is refitted to the steps that kept everything, and a plan that offloads less follows, or
   everything is kept. A larger batch than the measured one may not fit with everything kept, and is solved again only.
4. The peak is measured in two steps as soon as a plan has run twice, after a reset of the device's peak statistics. The
   margin below the budget grows or shrinks by the error of the predicted peak, a few times. The peak is measured again
   if the device's statistics go over the budget later.
5. Smaller deviations show in `PlanTuner.profile` only, as speed scales of the last steps of the current batch size.
6. Another batch size has a plan of its own, from the profile scaled to the size: one plan for each bucket of sizes.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import torch

from ebbtide._control.budget_margin import BudgetMargin
from ebbtide._control.plan_stats import STEPS_TO_LEARN, MeasuredPlan, PlanStats, bounded
from ebbtide._control.speed_scale import ComputeScale, FinishedStep, LinkRates, SpeedScales
from ebbtide._engine.engine import Engine
from ebbtide._engine.stats import StatsRecorder
from ebbtide._errors import EbbtideWarning, PlanError, add_note
from ebbtide._planner import simulate
from ebbtide._planner.explain import out_of_memory, used_bytes
from ebbtide._planner.solve import Solver
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile
from ebbtide._profiling.step_events import InFlightStep, StepMonitor
from ebbtide._utils.logs import logger_of
from ebbtide._utils.sizes import format_bytes
from ebbtide._utils.tracing import span

_log = logger_of(__name__)

_SETTLES_IN_S = 5.0  # of steps by one plan: clocks have settled
_SETTLED_AT = 0.02
_MOST_REPLANS = 8  # of all batch sizes
_MOST_IN_FLIGHT = 64
_LOOK_EVERY = 16  # forwards of one size
_BUCKETS_PER_OCTAVE = 8
_OOM_SHARE = 20  # divisor: share of the budget taken off after running out of memory
_LOOKS_SLOW = 1.02  # times the predicted step that keeps everything
_LONGEST_COMPARISON = 24  # forwards: steps in flight, and steps that cannot be timed
_AS_MUCH = 0.95  # of the bytes that a plan offloaded
_WAITS_FOR_CPU = 0.01  # of a step: the real waiting time is unknown
_UNMEASURED = 0.95  # of the link: times scaled to another batch size are inexact, above all for attention


class PlanTarget(Protocol):
    """Receiver of plans."""

    def apply_plan(self, plan: Plan, size: int = 0) -> None: ...


@dataclasses.dataclass
class _BatchSize:
    """One bucket of batch sizes. `profile`: source of the plans, before scaling to the size."""

    tokens: int
    profile: Profile
    solver: Solver
    stats: PlanStats
    scales: SpeedScales = dataclasses.field(default_factory=SpeedScales)
    is_logged: bool = False


class _PlannedStep(NamedTuple):
    """A step in flight. `share`: batch size over the planned batch size."""

    step: InFlightStep[StepMonitor]
    size: _BatchSize
    plan: Plan
    share: float


class PlanTuner:
    """Makes plans from one profile, and corrects the plans by measured steps.

    Args:
        handle: receiver of plans.
        profile: source of all plans; refitted on the way.
        recorder: statistics of the handle: stalls and copy rates.
        budget: returns the peak to stay under in bytes; None: offload without slowing the step.
        engine: engine of the model's device.
        replans_on_oom: plan for a smaller peak after the device ran out of memory.
        is_shared: all ranks share one plan for all batch sizes. The plan never changes, because the measurements of one
            rank are unknown to the other ranks.
    """

    def __init__(
        self,
        handle: PlanTarget,
        profile: Profile,
        recorder: StatsRecorder,
        budget: Callable[[], int | None],
        engine: Engine | None,
        *,
        replans_on_oom: bool,
        is_shared: bool,
    ) -> None:
        self._handle = handle
        self._profile = profile
        self._margin = BudgetMargin(budget)
        self._replans_on_oom = replans_on_oom
        self._is_shared = is_shared
        self._sizes: dict[int, _BatchSize] = {}
        self._in_flight: list[_PlannedStep] = []
        self._replans = 0
        self._has_settled = False
        self._may_keep_all = True  # until keeping everything runs out of memory
        self._was_slower = False  # the plan of the last comparison
        self._was_cpu_refitted = False
        self._solving_s = 0.0  # since the last record of the log
        self._has_warned_of_peak = False
        self._failed_allocations = 0 if engine is None else engine.device.failed_allocations()
        self._link_rates = LinkRates(recorder)
        self._measured_tokens = profile.tokens
        self._size = self._make_size(profile.tokens)
        self._apply(self._size)

    @property
    def profile(self) -> Profile:
        """Source of the plans, at the measured speed of compute and CPU for the current batch size (see Note [Speed
        scales])."""
        size = self._size
        if self._is_shared or size.profile is not self._profile:
            return self._profile  # equal on all ranks; or the last steps were compared with another profile
        cpu, compute = self._cpu_scale(size), self._compute_scale(size)
        if compute is None:
            waits = size.solver.profile.host is not None and _waits_for_cpu(size.stats.plan)
            scale = 1.0 if waits else size.stats.compute_scale
            compute = ComputeScale(scale, scale)
        if cpu == compute.forward == compute.backward == 1.0:
            return self._profile
        refitted = _with_cpu_times(self._profile, cpu).refitted(compute.forward, compute.backward)
        return refitted if cpu != 1.0 else self._with_launch_ahead(refitted)

    @property
    def tokens(self) -> int:
        """Batch size of the active plan."""
        return self._size.tokens

    @property
    def plans(self) -> dict[int, Plan]:
        """Plans by batch size in tokens."""
        return {tokens: size.stats.plan for tokens, size in self._sizes.items()}

    @property
    def measured(self) -> tuple[float, int]:
        """Median seconds of the last steps of the active plan, and measured peak in bytes; 0: unknown."""
        return self._size.stats.typical_s, self._size.stats.peak_bytes

    @property
    def budget_bytes(self) -> int | None:
        """Limit of predicted peaks: the budget less the margin."""
        return self._margin.planned_bytes(self._size.tokens)

    def never_recompute(self, names: Collection[str]) -> None:
        """Plan without recomputing `names`: regions with a recomputation that differed from forward."""
        if not names:
            return
        regions = [dataclasses.replace(r, recompute_s=0.0) if r.name in names else r for r in self._profile.regions]
        if self._is_shared or tuple(regions) == self._profile.regions:
            return  # ranks never change a plan: the saved tensors of the regions are offloaded
        self._profile = dataclasses.replace(self._profile, regions=tuple(regions))
        self._sizes = {}
        self._size = self._make_size(self._size.tokens, self._smallest_plan)
        self._apply(self._size)

    def step_begins(self, engine: Engine, tokens: int, is_verified: bool = False) -> StepMonitor:
        """Apply the plan of the batch size before a forward, and return the monitor of the step. The duration of a
        verified step is ignored."""
        if any(each.step.ended is None for each in self._in_flight):
            self._check_failed_allocations(engine)
        self._read_finished()
        bucket = self._bucket(tokens)
        size = self._sizes.get(bucket) or self._make_size(bucket, self._smallest_plan)
        if size is not self._size:
            self._size = size
            self._apply(size)
        if not size.is_logged:
            size.is_logged = True
            other = "" if size.tokens == self._measured_tokens else f" for batches of {size.tokens} tokens"
            self._log_plan(f"plan in force{other}", size)
        size.stats.begun += 1
        if size.stats.compared is not None and size.stats.begun > _LONGEST_COMPARISON:
            plans = size.stats.plan, size.stats.compared.plan
            self._change_to(size, max(plans, key=_moved_bytes), "too few steps can be compared")
        self._recheck_peak(size, engine)
        monitor = StepMonitor(engine.device, reads_peak=self._needs_peak(size.stats))
        monitor.is_alone = not is_verified
        for each in self._in_flight:
            other = each.step.pending
            if other is not None:
                monitor.is_alone = other.is_alone = False
        share = tokens / size.tokens if tokens > 0 and size.tokens > 0 else 1.0
        self._in_flight.append(_PlannedStep(InFlightStep(monitor), size, size.stats.plan, share))
        return monitor

    def _bucket(self, tokens: int) -> int:
        """Planned batch size: at least `tokens`, and one of a few sizes in an octave."""
        measured = self._measured_tokens
        if tokens <= 0 or measured <= 0 or self._is_shared:
            return self._size.tokens  # unknown size; or all ranks share one plan for all batch sizes
        return bucket_of(tokens, measured)

    # -- step times ------------------------------------------------------------------------------------------------

    def _read_finished(self) -> None:
        """Compare all steps that have passed with the predictions."""
        finished: list[tuple[_PlannedStep, StepMonitor]] = []
        left: list[_PlannedStep] = []
        for each in self._in_flight:
            monitor = each.step.ended
            if monitor is not None and monitor.is_readable:
                finished.append((each, monitor))
            elif monitor is not None or each.step.pending is not None:
                left.append(each)  # all other graphs were dropped
        self._in_flight = left[-_MOST_IN_FLIGHT:]
        if not finished:
            return
        # Stalls are known in total only: a step gets a share by duration.
        took_s = max(sum(monitor.seconds() for _, monitor in finished), 1e-9)
        forward, backward = (waited_s / took_s for waited_s in self._link_rates.waited_s())
        for each, monitor in finished:
            stats = each.size.stats
            if each.plan is not stats.plan or self._sizes.get(each.size.tokens) is not each.size:
                continue  # the plan was replaced
            seconds = monitor.seconds() / each.share
            if monitor.reads_peak:
                if stats.add_peak(monitor.peak_bytes, each.share):
                    self._fit_peak(each.size)
            elif not monitor.is_alone:
                stats.count_step()
            else:
                deviates = stats.add_step(seconds, seconds * min(1.0, forward + backward))
                if monitor.launch_times is not None and stats.steps > STEPS_TO_LEARN:
                    stalls_s = monitor.seconds() * forward, monitor.seconds() * backward
                    each.size.scales.add_step(FinishedStep(monitor.launch_times, each.share, *stalls_s))
                if deviates or self._is_to_settle(stats):
                    self._correct(each.size)

    def _is_to_settle(self, stats: PlanStats) -> bool:
        """Once, with a budget, and if the deviation is large enough."""
        is_ready = stats.has_run_for(_SETTLES_IN_S) and self._margin.limit_bytes is not None
        if not is_ready or self._has_settled or self._is_shared:
            return False
        self._has_settled = True
        return stats.deviates_by(_SETTLED_AT) and not stats.is_as_measured

    def _correct(self, size: _BatchSize) -> None:
        """Replace a plan whose steps deviate from the prediction."""
        if self._is_shared:
            return
        if size.stats.compared is not None:
            self._compare(size, size.stats.compared)
        elif size.stats.is_slow and self._may_keep_all and self._can_keep_all(size):
            self._keep_all(size)
        elif self._replans < _MOST_REPLANS:
            self._replans += 1
            self._plan_again(size)

    def _plan_again(self, size: _BatchSize) -> None:
        """Solve the refitted profile. An earlier plan returns if the measured step was faster than the new prediction.
        If an earlier plan no longer takes the measured time, the machine has changed, and old measurements are void."""
        stats = size.stats
        if stats.is_as_measured:
            stats.best = None
            self._change_to(size, self._solve(size), _took(stats))
            return
        why = _took(stats)
        before = stats.best if stats.best is not None and stats.best.plan is not stats.plan else None
        self._refit(size)
        plan = self._solve(size)
        if before is None or plan.predicted is None or plan.predicted.step_s <= before.step_s:
            self._change_to(size, plan, why)
        else:
            plan = before.as_predicted()
            self._change_to(size, plan, f"{why}: an earlier plan was faster", is_as_measured=True)

    def _can_keep_all(self, size: _BatchSize) -> bool:
        """Whether everything fits, and something moves."""
        return size.tokens <= self._measured_tokens and _moved_bytes(size.stats.plan) > 0

    def _keep_all(self, size: _BatchSize) -> None:
        """Keep everything for a comparison. After too many corrections the verdict of another batch size holds."""
        stats, keeping_all = size.stats, size.solver.keeping_all()
        if self._replans < _MOST_REPLANS:
            self._replans += 1
            self._change_to(size, keeping_all, _took(stats), compared=stats.measured)
        elif self._was_slower and not stats.is_as_measured:
            self._change_to(size, keeping_all, "as with batches of another size", is_final=True)
        else:
            stats.is_final = True

    def _compare(self, size: _BatchSize, other: MeasuredPlan) -> None:
        """Choose between two measured plans (law 12): the active plan and `other`, one of which keeps everything.

        The first steps of the offloading plan were compared because some were slow, maybe by chance: before a verdict
        against the plan, the plan is measured again.
        """
        active, keeps_all = size.stats.measured, _moved_bytes(size.stats.plan) == 0
        kept, offloading = (active, other) if keeps_all else (other, active)
        self._was_slower = not offloading.is_as_fast_as(kept)
        if not self._was_slower:
            plan, why = offloading.as_predicted(), "as fast as keeping everything"
            self._change_to(size, plan, why, is_as_measured=True)
            size.stats.most_s = max(kept.fastest_s, offloading.fastest_s) * _LOOKS_SLOW
        elif keeps_all:
            self._refit(size)
            self._change_to(size, offloading.plan, "keeping everything was faster", compared=kept)
        else:
            plan = self._solve(size)
            offloads_less = _moved_bytes(plan) < _AS_MUCH * _moved_bytes(offloading.plan)
            chosen = plan if offloads_less else size.solver.keeping_all()
            self._change_to(size, chosen, "keeping everything was faster", is_final=not offloads_less)

    def _refit(self, size: _BatchSize) -> None:
        """Refit link, CPU and compute of the profile to measured speeds. Without a change by regions, whole steps give
        the speed of compute."""
        cpu, compute = self._cpu_scale(size), self._compute_scale(size)
        if compute is None or cpu == compute.forward == compute.backward == 1.0:
            ratio = self._ratio_by_steps(size, cpu)
            compute = ComputeScale(ratio, ratio)
        refitted = _with_cpu_times(self._profile, cpu).refitted(compute.forward, compute.backward)
        refitted = dataclasses.replace(refitted, link=self._link_rates.refitted(self._profile.link))
        self._was_cpu_refitted = cpu != 1.0
        self._profile = self._with_launch_ahead(refitted)
        # Plans of other sizes are void, except the results of comparisons.
        self._sizes = {tokens: other for tokens, other in self._sizes.items() if other.stats.was_compared}
        self._sizes[size.tokens] = size
        size.profile, size.solver = self._profile, self._solver_for(size.tokens)
        size.stats.most_s = self._most_s(size.solver)

    def _ratio_by_steps(self, size: _BatchSize, cpu: float) -> float:
        """Measured over predicted time of compute, if compute waits for the CPU as long as predicted at scale `cpu`."""
        stats = size.stats
        predicted = stats.plan.predicted
        assert predicted is not None
        host_wait_s = predicted.host_wait_s
        if cpu != 1.0:
            host_wait_s = simulate.host_wait_s(_with_cpu_times(size.solver.profile, cpu), stats.plan)
        return stats.compute_ratio(stats.typical_s, host_wait_s)

    def _with_launch_ahead(self, profile: Profile) -> Profile:
        """Waiting for a CPU measured as slow is not part of the compute times: no launch-ahead compensates for it."""
        return profile if self._was_cpu_refitted else simulate.with_host(profile, profile.host)

    def _cpu_scale(self, size: _BatchSize) -> float:
        return bounded(size.scales.of_cpu(size.solver.profile, size.stats.plan))

    def _compute_scale(self, size: _BatchSize) -> ComputeScale | None:
        """By regions in which compute does not wait for the CPU; None if unknown."""
        scale = size.scales.of_compute(size.solver.profile, size.stats.plan)
        return None if scale is None else ComputeScale(bounded(scale.forward), bounded(scale.backward))

    # -- plans -----------------------------------------------------------------------------------------------------

    def _solve(self, size: _BatchSize) -> Plan:
        return self._solved(size.solver, self._margin.planned_bytes(size.tokens))

    def _solved(self, solver: Solver, budget_bytes: int | None) -> Plan:
        start = time.perf_counter()
        try:
            with span("ebbtide::solve"):
                return solver.solve(budget_bytes)
        finally:
            self._solving_s += time.perf_counter() - start

    def _make_size(self, tokens: int, fallback: Callable[[int, Solver], Plan] | None = None) -> _BatchSize:
        """Raises PlanError if nothing fits the budget and no `fallback` is given."""
        solver = self._solver_for(tokens)
        try:
            plan = self._solved(solver, self._margin.planned_bytes(tokens))
        except PlanError:
            if fallback is None:
                raise
            plan = fallback(tokens, solver)
        size = self._sizes[tokens] = _BatchSize(tokens, self._profile, solver, PlanStats(plan, self._most_s(solver)))
        return size

    def _solver_for(self, tokens: int) -> Solver:
        profile = self._profile.scaled(tokens)
        if self._margin.limit_bytes is None and tokens != self._measured_tokens:
            profile = dataclasses.replace(profile, link=profile.link.times(_UNMEASURED, _UNMEASURED))
        return Solver(profile)

    def _most_s(self, solver: Solver) -> float | None:
        """Without a budget, limit of the step time by law 12."""
        if self._margin.limit_bytes is not None:
            return None
        predicted = solver.keeping_all().predicted
        assert predicted is not None
        return predicted.step_s * _LOOKS_SLOW

    def _smallest_plan(self, tokens: int, solver: Solver) -> Plan:
        """For a batch too large for the budget: training is under way, and an error would stop it."""
        least_bytes, limit_bytes = solver.smallest_budget(), self._margin.limit_bytes
        if limit_bytes is not None and least_bytes <= limit_bytes:
            return self._solved(solver, limit_bytes)  # without the margin of another size
        warnings.warn(
            f"a batch with {tokens} tokens does not fit the budget of {format_bytes(limit_bytes or 0)}: the plan with "
            f"the smallest peak is used, with a peak of {format_bytes(least_bytes)}",
            EbbtideWarning,
            stacklevel=2,
        )
        return self._solved(solver, least_bytes)

    def _change_to(
        self,
        size: _BatchSize,
        plan: Plan,
        why: str,
        *,
        is_as_measured: bool = False,
        is_final: bool = False,
        compared: MeasuredPlan | None = None,
    ) -> None:
        size.stats.start_plan(plan, is_as_measured=is_as_measured, is_final=is_final, compared=compared)
        size.scales.clear()
        self._apply(size)
        self._log_plan(f"plan {'corrected' if compared is None else 'compared'}, {why}", size)

    def _log_plan(self, what: str, size: _BatchSize) -> None:
        limit_bytes, plan = self._margin.limit_bytes, size.stats.plan
        budget = "no budget" if limit_bytes is None else f"budget {format_bytes(limit_bytes)}"
        recomputed = sum(region.recipe.recomputes for region in plan.regions.values())
        does = f"{recomputed} of {len(plan.regions)} regions recompute"
        does = "everything stays on the device" if plan.keeps_all else does
        solved = f"; solving took {self._solving_s:.1f} s" if self._solving_s else ""
        self._solving_s = 0.0
        _log.info("%s (%s): %s; %s%s", what, budget, plan.predicted, does, solved)

    def _apply(self, size: _BatchSize) -> None:
        if size is self._size:
            is_first = size.tokens == self._measured_tokens  # continues with the timetable of the measured steps
            self._handle.apply_plan(size.stats.plan, 0 if is_first else size.tokens)

    # -- peaks -----------------------------------------------------------------------------------------------------

    def _needs_peak(self, stats: PlanStats) -> bool:
        """Whether to measure the peak: once the order of the plan has been learned, until the peak is known."""
        is_limited = not self._is_shared and self._margin.limit_bytes is not None
        return is_limited and stats.steps >= STEPS_TO_LEARN and stats.peak_bytes == 0

    def _fit_peak(self, size: _BatchSize) -> None:
        """Plan for a smaller peak if the measured peak was over the budget, and for a larger peak if room is left."""
        predicted, peak_bytes = size.stats.plan.predicted, size.stats.peak_bytes
        if predicted is None:
            return
        margin_bytes = self._margin.corrected(size.tokens, peak_bytes, predicted.peak_bytes, size.stats.is_full_size)
        if margin_bytes is not None:
            self._plan_with(size, f"the measured peak was {format_bytes(peak_bytes)}", margin_bytes)
        else:
            self._warn_if_over(peak_bytes)

    def _plan_with(self, size: _BatchSize, why: str, margin_bytes: int, oom_bytes: int = 0) -> None:
        """Plan again with a part of the budget left free. If nothing fits, the plan stays."""
        limit_bytes = self._margin.limit_bytes
        assert limit_bytes is not None
        try:
            plan = self._solved(size.solver, limit_bytes - margin_bytes - oom_bytes)
        except PlanError:
            self._warn_if_over(size.stats.peak_bytes)
            return
        self._margin.leave_free(size.tokens, margin_bytes, oom_bytes)
        self._sizes = {size.tokens: size}
        size.stats.best = None  # made for a larger peak
        self._change_to(size, plan, f"{format_bytes(margin_bytes + oom_bytes)} of the budget left free: {why}")

    def _recheck_peak(self, size: _BatchSize, engine: Engine) -> None:
        """Memory may grow (an optimizer's first step, a longer evaluation) after the peak was measured. The device's
        statistics show growth, unless somebody resets them."""
        stats, limit_bytes = size.stats, self._margin.limit_bytes
        if limit_bytes is None or self._is_shared or stats.begun % _LOOK_EVERY != 0 or stats.peak_bytes == 0:
            return
        if stats.peak_bytes <= limit_bytes < engine.device.memory().peak_bytes:
            stats.reset_peak()

    def _warn_if_over(self, peak_bytes: int) -> None:
        limit_bytes = self._margin.limit_bytes
        if limit_bytes is not None and peak_bytes > limit_bytes and not self._has_warned_of_peak:
            self._has_warned_of_peak = True
            warnings.warn(
                f"the step has a peak of {format_bytes(peak_bytes)}, over the budget of {format_bytes(limit_bytes)}, "
                "and no plan lowers the peak: memory outside of the regions is needed (warns once)",
                EbbtideWarning,
                stacklevel=2,
            )

    # -- out of memory ---------------------------------------------------------------------------------------------

    def forward_failed(self, error: BaseException | None, engine: Engine | None) -> None:
        """An exception leaves forward. A note about the plan is added to an out-of-memory error."""
        self._in_flight.clear()
        if engine is not None:
            self._failed_allocations = engine.device.failed_allocations()
        if isinstance(error, torch.OutOfMemoryError):
            add_note(error, self._oom_text(engine))
            self._plan_after_oom()

    def _check_failed_allocations(self, engine: Engine) -> None:
        """A backward that did not end may have run out of memory: no exception passes through ebbtide."""
        failures = engine.device.failed_allocations()
        if failures > self._failed_allocations:
            warnings.warn(self._oom_text(engine), EbbtideWarning, stacklevel=2)
            self._plan_after_oom()
        self._failed_allocations = failures

    def _plan_after_oom(self) -> None:
        size, budget_bytes = self._size, self.budget_bytes
        predicted = size.stats.plan.predicted
        if self._is_shared or predicted is None:
            return
        if budget_bytes is None:
            if self._may_keep_all and (predicted.moved_bytes == 0 or size.stats.compared is not None):
                self._may_keep_all = False
                self._sizes = {size.tokens: size}
                self._change_to(size, self._solve(size), "keeping everything ran out of memory", is_final=True)
        elif self._replans_on_oom:
            planned_bytes = used_bytes(budget_bytes, predicted)
            less_bytes = max(planned_bytes - planned_bytes // _OOM_SHARE, size.solver.smallest_budget())
            if less_bytes < planned_bytes:
                margin_bytes = self._margin.margin_bytes(size.tokens)
                self._plan_with(size, "the device ran out of memory", margin_bytes, budget_bytes - less_bytes)

    def _oom_text(self, engine: Engine | None) -> str:
        measured_bytes = 0 if engine is None else engine.device.memory().peak_bytes
        predicted = self._size.stats.plan.predicted
        what_next = "the next steps use a smaller plan" if self._replans_on_oom else "or write on_oom='replan'"
        if self._is_shared:
            what_next = "a plan shared by ranks never changes"
        least_bytes = 0 if self.budget_bytes is None else self._size.solver.smallest_budget()
        return out_of_memory(self.budget_bytes, predicted, measured_bytes, _OOM_SHARE, least_bytes, what_next)


def bucket_of(tokens: int, measured: int = 1) -> int:
    """The smallest bucket of at least `tokens`. An octave has eight buckets, counted from `measured`."""
    steps = math.log2(tokens / measured) * _BUCKETS_PER_OCTAVE
    return round(measured * 2 ** (math.ceil(steps - 1e-9) / _BUCKETS_PER_OCTAVE))


def _waits_for_cpu(plan: Plan) -> bool:
    return plan.predicted is not None and plan.predicted.host_wait_s > _WAITS_FOR_CPU * plan.predicted.step_s


def _took(stats: PlanStats) -> str:
    return f"the last steps took {stats.typical_s * 1e3:.1f} ms"


def _with_cpu_times(profile: Profile, ratio: float) -> Profile:
    return profile if profile.host is None else dataclasses.replace(profile, host=profile.host.times(ratio))


def _moved_bytes(plan: Plan) -> int:
    return 0 if plan.predicted is None else plan.predicted.moved_bytes
