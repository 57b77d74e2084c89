"""What a training's own steps say of the link: how long compute waited for it, and how fast its copies were."""

import dataclasses

from ebbtide._engine.stats import CopyTiming, StatsRecorder
from ebbtide._profiling.profile import Link
from ebbtide._utils.sizes import MIB

_LEAST_SAMPLE = 64 * MIB
_SAME_RATE = 0.05


class LinkTimes:
    """Since it was asked last. Never waits for a copy.

    Args:
        ledger: of the door whose copies they are.
    """

    def __init__(self, ledger: StatsRecorder) -> None:
        self._ledger = ledger
        self._waited_s = self._total_waited_s()
        self._samples = self._sampled()

    def waited_s(self) -> tuple[float, float]:
        """What compute has waited for copies since the last call, in forward and in backward."""
        before, self._waited_s = self._waited_s, self._total_waited_s()
        return self._waited_s[0] - before[0], self._waited_s[1] - before[1]

    def refitted(self, link: Link) -> Link:
        """`link` at the rates of the copies since the last call, where these were many and are others."""
        before, self._samples = self._samples, self._sampled()
        out = _rate_since(self._samples[0], before[0], link.out) / link.out
        back = _rate_since(self._samples[1], before[1], link.back) / link.back
        return link.times(out, back)

    def _total_waited_s(self) -> tuple[float, float]:
        self._ledger.settle()
        return self._ledger.stats.stall_forward_s, self._ledger.stats.stall_backward_s

    def _sampled(self) -> tuple[CopyTiming, CopyTiming]:
        stats = self._ledger.stats
        return dataclasses.replace(stats.out_sample), dataclasses.replace(stats.in_sample)


def _rate_since(now: CopyTiming, before: CopyTiming, known: float) -> float:
    """Bytes per second of the copies between the two; `known` where they were few, or about as fast as that."""
    nbytes, seconds = now.nbytes - before.nbytes, now.seconds - before.seconds
    if nbytes < _LEAST_SAMPLE or seconds <= 0:
        return known
    rate = nbytes / seconds
    return known if abs(rate / known - 1) < _SAME_RATE else rate
