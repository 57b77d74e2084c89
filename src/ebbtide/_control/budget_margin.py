"""What of a budget plans may use: what measured peaks say of it, and running out of memory. Pure."""

from collections.abc import Callable

_MOST_FITS = 3
_NEAR = 0.02


class BudgetMargin:
    """A budget, and how much of it is left free. Sizes of batches are told apart by their tokens.

    Args:
        budget: the peak to stay under now, in bytes; None: there is none.
    """

    def __init__(self, budget: Callable[[], int | None]) -> None:
        self._budget = budget
        self._spares: dict[int, int] = {}  # by size: what peaks were beyond the predicted ones
        self._short_bytes = 0  # never given back
        self._fits = 0

    @property
    def asked_bytes(self) -> int | None:
        """That a measured peak has to stay under: the budget less what running out of memory took off."""
        budget_bytes = self._budget()
        return None if budget_bytes is None else budget_bytes - self._short_bytes

    def planned_bytes(self, tokens: int) -> int | None:
        """That a predicted peak has to stay under."""
        asked_bytes = self.asked_bytes
        return None if asked_bytes is None else asked_bytes - self.spare_bytes(tokens)

    def spare_bytes(self, tokens: int) -> int:
        """A size that was not looked at yet may be as far beyond its prediction as another, and counts on no less."""
        return self._spares.get(tokens, max([0, *self._spares.values()]))

    def fitted(self, tokens: int, peak_bytes: int, predicted_bytes: int, is_whole: bool) -> int | None:
        """What to leave free from now on; None if nothing is to change. A few times.

        More if the peak was beyond the budget, and less if that leaves room to spare.

        Args:
            peak_bytes, predicted_bytes: measured of a plan, and predicted of it.
            is_whole: measured of batches as large as is planned for.
        """
        asked_bytes = self.asked_bytes
        if asked_bytes is None or self._fits == _MOST_FITS or asked_bytes * (1 - _NEAR) <= peak_bytes <= asked_bytes:
            return None
        beyond_bytes, spare_bytes = peak_bytes - predicted_bytes, self.spare_bytes(tokens)
        over_bytes = peak_bytes - asked_bytes
        # The last fit is for what is beyond the budget; and what the plan leaves unused on its own account is none of
        # the prediction's fault.
        may_give_back = is_whole and self._fits < _MOST_FITS - 1
        if over_bytes <= 0 and (not may_give_back or spare_bytes - beyond_bytes <= _NEAR * asked_bytes):
            return None
        self._fits += 1
        return beyond_bytes if over_bytes <= 0 else max(beyond_bytes, spare_bytes + over_bytes)

    def leave_free(self, tokens: int, spare_bytes: int, short_bytes: int = 0) -> None:
        """So much for what peaks are beyond predictions of this size; and so much more for all, for good."""
        self._spares[tokens] = spare_bytes
        self._short_bytes += short_bytes
