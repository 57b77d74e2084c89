"""How the steps of a plan turn out, and when it is time to plan again. Pure."""

from ebbtide.plans import Plan

REPLAN_AT = 0.05
PATIENCE = 3
STEPS_TO_LEARN = 2  # until the engine's timetable knows the order
_MOST_REPLANS = 4


class Follower:
    """One plan after another, for batches of one size.

    Attributes:
        plan: that is followed now.
        steps: that went by it.
        peak_bytes: most that one of them allocated, 0 before that was looked at.
        best: the least typical step so far, in seconds, and its plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.steps = 0
        self.peak_bytes = 0
        self.best: tuple[float, Plan] | None = None
        self._off = 0
        self._replans = 0
        self._times: list[float] = []

    def saw(self, step_s: float) -> bool:
        """Whether it is time to plan again."""
        self.steps += 1
        predicted = self.plan.predicted
        if predicted is None or self.steps <= STEPS_TO_LEARN:
            return False  # the timetable has still to learn the order
        self._times = [*self._times[-2:], step_s]
        is_off = abs(step_s / predicted.step_s - 1) > REPLAN_AT if predicted.step_s > 0 else False
        self._off = self._off + 1 if is_off else 0
        typical = sorted(self._times)[len(self._times) // 2]
        if len(self._times) == 3 and (self.best is None or typical < self.best[0]):
            self.best = typical, self.plan
        return self._off >= PATIENCE * 2**self._replans and self._replans < _MOST_REPLANS

    def goes_by(self, plan: Plan) -> None:
        self.plan = plan
        self.steps = 0
        self.peak_bytes = 0
        self._off = 0
        self._replans += 1
        self._times.clear()
