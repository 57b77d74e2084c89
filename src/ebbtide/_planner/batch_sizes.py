"""Batch sizes under a budget: the largest that fits, and the fastest per sample. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ebbtide._errors import PlanError
from ebbtide._planner.explain import as_budget
from ebbtide._planner.options import option_for
from ebbtide._planner.simulate import least_budget
from ebbtide._planner.solve import Solver
from ebbtide._plans import Plan, Prediction, Recipe
from ebbtide._profiling.batch_fit import at_tokens, unlike
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import format_bytes
from ebbtide._utils.text import plain_table


@dataclass(frozen=True)
class BatchRow:
    """The predicted step of a batch size.

    Attributes:
        batch: number of samples.
        tokens: elements of the largest tensor that the model is called with.
        smallest_bytes: the smallest budget that a plan fits.
        plan: the fastest plan within the budget, with its prediction; None if no plan fits.
        recompute_s: seconds of recomputation in a step.
        is_measured: whether a profile is of the size.
    """

    batch: int
    tokens: int
    smallest_bytes: int
    plan: Plan | None
    recompute_s: float
    is_measured: bool

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def _predicted(self) -> Prediction | None:
        return None if self.plan is None else self.plan.predicted

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None if no plan fits."""
        return None if self._predicted is None else self._predicted.step_s

    @property
    def samples_per_s(self) -> float:
        """0 if no plan fits."""
        return self.batch / self.step_s if self.step_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 if no plan fits."""
        return self.tokens / self.step_s if self.step_s else 0.0

    @property
    def peak_bytes(self) -> int:
        """Of the plan; the smallest budget if no plan fits."""
        return (
            self.smallest_bytes if self.plan is None or self.plan.predicted is None else self.plan.predicted.peak_bytes
        )

    @property
    def moved_bytes(self) -> int:
        return 0 if self._predicted is None else self._predicted.moved_bytes

    @property
    def actions(self) -> dict[str, int]:
        """Numbers of regions by action of the plan."""
        return {} if self.plan is None else dict(Counter(r.recipe.action for r in self.plan.regions.values()))


@dataclass(frozen=True)
class BatchSizes:
    """Predicted steps of batch sizes under a budget. `str()` gives a table.

    Attributes:
        rows: by size: powers of two up to the first that does not fit, the measured sizes, the largest size that keeps
            everything, and the largest size.
        budget_bytes: the peak to stay under.
        assumptions: how sizes follow from what was measured, a sentence each.
    """

    rows: tuple[BatchRow, ...]
    budget_bytes: int
    assumptions: tuple[str, ...]

    @property
    def largest(self) -> BatchRow:
        """The largest size that fits."""
        return max((row for row in self.rows if row.fits), key=lambda row: row.batch)

    @property
    def largest_kept(self) -> BatchRow | None:
        """The largest size whose step keeps everything; None if none fits."""
        kept = [row for row in self.rows if row.plan is not None and row.plan.keeps_all]
        return kept[-1] if kept else None

    @property
    def fastest(self) -> BatchRow:
        """The row with the most samples per second; of equal rows the smallest."""
        return max(self.rows, key=lambda row: (round(row.samples_per_s, 6), -row.batch))  # last digits of sums differ

    def __str__(self) -> str:
        heading = ("batch", "step", "samples/s", "tokens/s", "peak", "moved", "recompute", "regions", "")
        return plain_table([heading, *map(self._cells, self.rows)], right=range(7))

    def _cells(self, row: BatchRow) -> tuple[str, ...]:
        marks = {"measured": row.is_measured, "largest": row is self.largest, "fastest": row is self.fastest}
        notes = ", ".join(name for name, holds in marks.items() if holds)
        if row.step_s is None:
            return (f"{row.batch}", *[""] * 3, f"{format_bytes(row.peak_bytes)}", "", "", "does not fit", notes)
        return (
            f"{row.batch}",
            f"{row.step_s * 1e3:.1f} ms",
            f"{row.samples_per_s:,.1f}",
            f"{row.tokens_per_s:,.0f}",
            format_bytes(row.peak_bytes),
            format_bytes(row.moved_bytes),
            f"{row.recompute_s * 1e3:.1f} ms",
            ", ".join(f"{count} {action}" for action, count in row.actions.items()),
            notes,
        )


def batch_sizes(profiles: Sequence[Profile], item: int, budget_bytes: int) -> BatchSizes:
    """Sizes under a budget. `profiles`: as of `at_tokens`, with recomputation times; `item`: tokens of a sample.

    Raises:
        PlanError: no plan fits a batch of 1, or memory does not grow with the batch.
    """
    sizes = _Sizes(profiles, item, budget_bytes)
    return BatchSizes(tuple(sizes.rows()), budget_bytes, tuple(_assumptions(profiles, item)))


def _assumptions(profiles: Sequence[Profile], item: int) -> list[str]:
    batches = ", ".join(f"{profile.tokens // item}" for profile in profiles)
    if len(profiles) == 1:
        found = [
            f"From one profile, of batch {batches}: activations and seconds of the device in proportion to the batch, "
            "memory from before the step, gradients and the host's time as measured. A profile of another batch size "
            "beside shows what does not grow in proportion."
        ]
    else:
        found = [
            f"From profiles of the batches {batches}: each number of the step is on the line through the two nearest "
            "sizes; the host's time is that of the nearest."
        ]
    parts = unlike(profiles)
    if parts:
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        found.append(
            f"{', '.join(parts[:3])}{more} saved other tensors in one batch than in another: in proportion from the "
            "nearest profile."
        )
    bound = [f"{p.tokens // item}" for p in profiles if p.host is not None and p.host.seconds >= p.plain_s]
    if bound:
        found.append(
            f"In the batch of {', '.join(bound)} the host took as long as compute, and measured seconds hold waits for "
            "the host: times of larger batches are rough until a larger batch is measured."
        )
    return found


class _Sizes:
    def __init__(self, profiles: Sequence[Profile], item: int, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._profiles = profiles
        self._item = item
        self._solvers: dict[int, Solver] = {}

    def rows(self) -> list[BatchRow]:
        largest = self._largest()
        measured = {profile.tokens // self._item for profile in self._profiles}
        kept = _last(self._is_kept, 0, largest + 1)
        powers = {1 << k for k in range(largest.bit_length() + 1)}
        return [self._row(size, size in measured) for size in sorted(powers | measured | {kept, largest}) if size > 0]

    def _largest(self) -> int:
        # Between measured sizes memory may fall, by noise: that of a CPU is sampled.
        sizes = [1, *(profile.tokens // self._item for profile in self._profiles)]
        low = max((size for size in sizes if self._least(size) <= self.budget_bytes), default=0)
        if low == 0:
            raise PlanError(
                f"budget {format_bytes(self.budget_bytes)}: no batch fits, and the smallest budget of a batch of 1 is "
                f"{format_bytes(self._least(1))}. Write budget={as_budget(self._least(1))!r} or more"
            )
        while self._least(2 * low) <= self.budget_bytes:
            if low >= sizes[-1] and self._least(2 * low) <= self._least(low):
                raise PlanError(
                    f"a batch of {2 * low} takes no more memory than a batch of {low}, by these profiles: no batch is "
                    "the largest. Measure batches that differ more"
                )
            low *= 2
        return _last(lambda size: self._least(size) <= self.budget_bytes, low, 2 * low)

    def _row(self, batch: int, is_measured: bool) -> BatchRow:
        solver, least, tokens = self._solver(batch), self._least(batch), batch * self._item
        if least > self.budget_bytes:
            return BatchRow(batch, tokens, least, None, 0.0, is_measured)
        plan, regions = solver.solve(self.budget_bytes), solver.profile.regions
        recompute_s = sum(option_for(region, plan.regions[region.name].recipe).recompute_s for region in regions)
        return BatchRow(batch, tokens, least, plan, recompute_s, is_measured)

    def _least(self, batch: int) -> int:
        return self._solver(batch).smallest_budget()

    def _is_kept(self, batch: int) -> bool:
        """Whether a step that keeps everything fits."""
        profile = at_tokens(self._profiles, batch * self._item)
        return least_budget(profile, [option_for(r, Recipe("keep")) for r in profile.regions]) <= self.budget_bytes

    def _solver(self, batch: int) -> Solver:
        if batch not in self._solvers:
            self._solvers[batch] = Solver(at_tokens(self._profiles, batch * self._item))
        return self._solvers[batch]


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last number of which `holds`, by bisection, between `low`, of which it does, and `high`, of which not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
