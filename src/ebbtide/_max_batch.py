"""The largest batch under a budget, and the fastest per sample, from profiles."""

from collections.abc import Sequence

from ebbtide._config import Budget
from ebbtide._errors import ConfigError
from ebbtide._planner.batch_sizes import BatchSizes, batch_sizes
from ebbtide._profiling.batch_fit import check_comparable
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import parse_bytes


def max_batch(
    profiles: Profile | Sequence[Profile], *, batch: int, budget: int | float | str, reserve: int | str = 0
) -> BatchSizes:
    """The largest batch whose step fits a budget, and the batch with the most samples per second.

    A plan is made for each size, from the profile at that size. Without a model or a device:

        found = ebbtide.max_batch([Profile.load("8.json"), Profile.load("16.json")], batch=8, budget="70GiB")
        print(found, found.largest.batch, found.fastest.batch)

    From two or more profiles, each number of the step is on the line through the two nearest measured sizes, so that
    parts of a step that do not grow with the batch are measured. From one profile, activations and seconds of the
    device are in proportion to the batch.

    Args:
        profiles: of one model, one device and one length of samples, each of another batch size, measured by `measure`
            or with a budget.
        batch: samples in the batch of the first profile; the others follow from their tokens. In a job of several
            ranks: of one rank.
        budget: Peak of device memory to stay under: bytes, text like "40GiB", or a share of the device memory: 0.8
            or "80%". Leave room for errors of a prediction, as a handle does.
        reserve: bytes ("9GiB") of device memory besides, such as the state of the optimizer if the profiles have none.

    Raises:
        ConfigError: an impossible setting, or a batch that the tokens of a profile contradict.
        PlanError: profiles of different models or circumstances, or without recomputation times; no plan fits a batch
            of 1 (the text names the smallest budget); or memory that does not grow with the batch.

    Traps:
        Sizes far from the measured ones are far from anything measured. Kernels differ in speed from size to size.
    """
    given = [profiles] if isinstance(profiles, Profile) else list(profiles)
    item = _tokens_of_sample(given, batch)
    limit = Budget(budget)
    if limit.is_share and given[0].device_bytes is None:
        raise ConfigError(
            f"budget={budget!r}: the profile does not say how much memory its device has: write bytes, such as 40GiB"
        )
    reserved_bytes = 0 if reserve in (0, "0") else parse_bytes(reserve, "reserve")
    measured = sorted((p.with_reserved(reserved_bytes) for p in given), key=lambda p: p.tokens)
    for profile in measured:
        profile.check_has_recomputation()
    check_comparable(measured)
    return batch_sizes(measured, item, limit(given[0].device_bytes or 0))


def _tokens_of_sample(profiles: Sequence[Profile], batch: int) -> int:
    """Raises ConfigError if the tokens of the profiles are no whole samples, or of equal batches."""
    if not profiles:
        raise ConfigError("there is no profile: write one or more")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"batch={batch!r}: expected the number of samples in the batch of the first profile")
    item, rest = divmod(profiles[0].tokens, batch)
    if item == 0 or rest:
        raise ConfigError(
            f"batch={batch}: the first profile is of a batch with {profiles[0].tokens} tokens (elements of the largest "
            "tensor that the model is called with), which are not so many equal samples"
        )
    tokens = [profile.tokens for profile in profiles]
    if len(set(tokens)) < len(tokens):
        raise ConfigError(f"the profiles are of batches with {tokens} tokens: expected each of another batch size")
    odd = [nbr for nbr in tokens if nbr % item]
    if odd:
        raise ConfigError(
            f"a profile of {odd[0]} tokens has no whole number of samples of {item} tokens, as the first profile has "
            f"with batch={batch}: expected profiles with samples of one length"
        )
    return item
