"""How much of a budget plans may use, by measured peaks and by running out of memory. Pure."""

from collections.abc import Callable

_MOST_CORRECTIONS = 3
_NEAR = 0.02


class BudgetMargin:
    """A budget, and the margin left free below the limit. Batch sizes are told apart by tokens.

    Args:
        budget: returns the peak to stay under in bytes; None: no budget.
    """

    def __init__(self, budget: Callable[[], int | None]) -> None:
        self._budget = budget
        self._margins: dict[int, int] = {}  # by batch size: measured less predicted peak
        self._oom_bytes = 0  # never given back
        self._corrections = 0

    @property
    def limit_bytes(self) -> int | None:
        """Limit of a measured peak: the budget less the bytes taken off after running out of memory."""
        budget_bytes = self._budget()
        return None if budget_bytes is None else budget_bytes - self._oom_bytes

    def planned_bytes(self, tokens: int) -> int | None:
        """Limit of a predicted peak."""
        limit_bytes = self.limit_bytes
        return None if limit_bytes is None else limit_bytes - self.margin_bytes(tokens)

    def margin_bytes(self, tokens: int) -> int:
        """Margin of a batch size; for a size without measured peaks the largest margin, and never less than 0."""
        return self._margins.get(tokens, max([0, *self._margins.values()]))

    def corrected(self, tokens: int, peak_bytes: int, predicted_bytes: int, is_full_size: bool) -> int | None:
        """Margin from now on in bytes; None if the margin stays. At most three corrections.

        The margin grows if the peak was over the limit, and shrinks if the peak left room to spare.

        Args:
            tokens: batch size.
            peak_bytes: measured peak of a plan.
            predicted_bytes: predicted peak of the plan.
            is_full_size: whether the measured batches were as large as planned for.
        """
        limit_bytes = self.limit_bytes
        if limit_bytes is None or self._corrections == _MOST_CORRECTIONS:
            return None
        if limit_bytes * (1 - _NEAR) <= peak_bytes <= limit_bytes:
            return None
        excess_bytes, margin_bytes = peak_bytes - predicted_bytes, self.margin_bytes(tokens)
        over_bytes = peak_bytes - limit_bytes
        # The last correction is reserved for a peak over the limit. Budget left unused by the plan itself is no error
        # of the prediction.
        may_shrink = is_full_size and self._corrections < _MOST_CORRECTIONS - 1
        if over_bytes <= 0 and (not may_shrink or margin_bytes - excess_bytes <= _NEAR * limit_bytes):
            return None
        self._corrections += 1
        return excess_bytes if over_bytes <= 0 else max(excess_bytes, margin_bytes + over_bytes)

    def leave_free(self, tokens: int, margin_bytes: int, oom_bytes: int = 0) -> None:
        """Set the margin of one batch size, and take `oom_bytes` off the limit of all sizes for good."""
        self._margins[tokens] = margin_bytes
        self._oom_bytes += oom_bytes
