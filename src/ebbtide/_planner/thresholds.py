"""All constants of the planner and of its corrections, with reasons: shares, counts and sizes, none of one machine."""

from dataclasses import dataclass

from ebbtide._utils.sizes import MIB


@dataclass(frozen=True)
class Thresholds:
    """Field by field in the order of use: plans, trials, comparisons, memory, speeds, looks."""

    slower: float = 0.01  # of a step: medians repeat within a percent; also the largest slowdown without a goal
    worth_moving: float = 0.005  # of the peak: a smaller gain is not worth the copies
    alike_bytes: float = 0.02  # between regions of equal build
    alike_seconds: float = 0.2  # between regions of equal build: equal work, measured once
    derive_steps: int = 6  # recipes of a region that derive little to all
    partitions: tuple[float, ...] = (0.75, 0.5, 0.25, 0.0)  # budgets of compiled regions; alike ones mix two of them
    few: int = 4096  # simulated graphs: of so many assignments the search tries all
    budgets: int = 64  # of which the search asks the linear program, otherwise
    buckets: int = 8  # of batch sizes in an octave
    unmeasured: float = 0.95  # of the link: times scaled to another batch size are inexact, above all for attention

    learning_steps: int = 2  # until the engine's timetable knows the order
    measured_steps: int = 4  # the fewest whose median ignores one hiccup on either side
    longest: int = 24  # forwards of a trial of which too few can be timed: several forwards make one loss, or overlap
    corrections: int = 2  # law 13
    turns: int = 2  # of each plan in a comparison: `remembered` timed steps
    baseline_steps: int = 2  # timed steps of a plan to compare with, where solving leaves time for few
    off: float = 0.05  # of a step, a stall or a rate: a smaller error of a prediction changes no plan
    target: float = 0.8  # of the largest slowdown: the time is approached from below as well

    margin: float = 0.1  # of the budget above the memory from before the step: errors of most first plans
    kept_margin: float = 0.25  # of what a measured peak shows to be unnecessary: plans of another kind err otherwise
    error_growth: float = 1.5  # times a measured error of a peak: another plan has another error
    room: float = 0.02  # of the budget: less is not worth a correction
    device: float = 0.9  # of the device's memory: a fallback with a larger peak is not tried
    oom: float = 0.05  # of the planned bytes, left free after running out of memory

    remembered: int = 8  # steps of a plan in force, for speeds and for what the handle reports
    furthest: float = 5.0  # largest change of a refit: beyond, the steps are of something else
    least_own: float = 0.2  # of a step: one that waits for copies all the time says nothing of compute
    least_copied_bytes: int = 64 * MIB  # for a rate of the link

    look_every: int = 16  # forwards between two looks at the device's peak, and between timed steps of a frozen plan
    meet_every: int = 4  # steps between two meetings of ranks, while plans are on trial: a solver works for seconds
    rarest: int = 256  # steps between two meetings of ranks with a frozen plan, at most: each one waits for the device


THRESHOLDS = Thresholds()
