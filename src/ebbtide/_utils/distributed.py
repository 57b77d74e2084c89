"""Exchange of values between ranks, with an error that names the missing ranks.

Note [Ranks meet]
~~~~~~~~~~~~~~~~~
1. A collective that some rank never enters hangs until the timeout of the process group, and no message names the rank.
   Ranks therefore meet at the group's key-value store first, and enter the collective after the last rank has arrived.
   A waiting rank warns with the numbers of the missing ranks, and raises at the timeout.
2. Ranks meet before a forward, never inside a forward, and count steps of the optimizer (see Note [Ranks]).
"""

import enum
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from ebbtide._errors import ConfigError, EbbtideWarning, PlanError
from ebbtide._utils import env
from ebbtide._utils.torch_private import collective_device, store_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Value = TypeVar("Value")


class ThisRank(enum.Enum):
    """In place of a process group: this rank alone, in a job of several."""

    ALONE = enum.auto()


Group: TypeAlias = "ProcessGroup | ThisRank | None"
"""Ranks; None: all ranks of the job."""

_WARN_AFTER_S = 10.0  # ranks of a healthy job are rarely further apart


def check_group(group: object) -> None:
    """Raise ConfigError unless `group` is None or a process group with this rank as a member."""
    if group is None or (_is_distributed() and isinstance(group, torch.distributed.ProcessGroup)):
        return
    raise ConfigError(
        f"process_group={group!r}: expected a torch.distributed.ProcessGroup that this rank is in, such as "
        "mesh['dp'].get_group()"
    )


def gather(mine: Value, group: Group, what: str) -> list[Value]:
    """Values of all ranks of `group`, in the order of ranks. Every rank has to call the function.

    Args:
        mine: value of this rank; has to be picklable.
        group: the ranks.
        what: name of the exchange, for keys and messages.

    Raises:
        PlanError: a rank has not arrived within the timeout of `init_process_group`.
    """
    size = group_size(group)
    if size == 1 or group is ThisRank.ALONE:
        return [mine]
    _meet_all(group, what)
    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def largest(mine: Sequence[float], group: Group, what: str) -> list[float]:
    """The largest of each number over all ranks of `group`, by one reduction: a rank sends as many bytes in a job of a
    thousand ranks as in a job of two. Every rank has to call the function, with equally many numbers.

    The numbers are 64-bit floats: whole numbers up to 2**53 are exact. Arguments and errors as of `gather`.
    """
    if group_size(group) == 1 or group is ThisRank.ALONE:
        return list(mine)
    _meet_all(group, what)
    found: Any = torch.tensor(mine, dtype=torch.float64, device=collective_device(group))
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=group)
    return found.tolist()


def _meet_all(group: "ProcessGroup | None", what: str) -> None:
    store = store_of(group)
    if store is not None:
        distributed = torch.distributed
        meet(store, distributed.get_rank(group), distributed.get_process_group_ranks(group), what)


def meet(store: Any, place: int, ranks: list[int], what: str) -> None:
    """Return after every rank in `ranks` has called `meet` for `what`.

    Args:
        store: key-value store of torch.distributed.
        place: index of this rank in `ranks`.
        ranks: global ranks, for messages.
        what: name of the exchange.

    Raises:
        PlanError: the timeout of `store` has passed; names the missing ranks.
    """
    key = f"ebbtide/{what}"
    count = store.add(f"{key}/{place}", 1)  # number of the meeting: all ranks count alike
    if store.add(f"{key}/meeting {count}", 1) == len(ranks):
        store.set(f"{key}/met {count}", "")
    began_s, limit_s = time.monotonic(), store.timeout.total_seconds()
    has_warned = False
    while not store.check([f"{key}/met {count}"]):
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s or (waited_s > _WARN_AFTER_S and not has_warned):
            missing = [rank for at, rank in enumerate(ranks) if store.add(f"{key}/{at}", 0) < count]
            text = _missing_text(missing, len(ranks), what, waited_s)
            if missing and waited_s > limit_s:
                for counter in (f"{key}/{place}", f"{key}/meeting {count}"):
                    store.add(counter, -1)  # a rank that arrives later waits and warns as well
                raise PlanError(text)
            if missing and not has_warned:
                warnings.warn(f"{text} It waits until {limit_s:.0f} s have passed", EbbtideWarning, stacklevel=2)
                has_warned = True
        time.sleep(min(0.1, 0.1 * waited_s + 1e-3))


def _missing_text(missing: list[int], count: int, what: str, waited_s: float) -> str:
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"this rank waits for {len(missing)} of {count} ranks to agree on {what}, since {waited_s:.0f} s: rank {shown} "
        "has not come. Each of them has to train this module too and run as many steps: name those that do with "
        "process_group=, or write recipe= or plan= instead of budget=."
    )


def is_first(group: Group) -> bool:
    """Whether this rank is rank 0 of `group`."""
    return group is ThisRank.ALONE or not _is_distributed() or torch.distributed.get_rank(group) == 0


def rank_of_process() -> tuple[int, int]:
    """Number of this process in the job, and processes of the job. Without a process group, as before it is made and
    after it is destroyed, the launcher tells."""
    if _is_distributed():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return env.rank_of_launcher()


def first_of(group: Group) -> int:
    """Number in the job of rank 0 of `group`."""
    if group is None or not _is_distributed():
        return 0
    return torch.distributed.get_rank() if group is ThisRank.ALONE else torch.distributed.get_global_rank(group, 0)


def ranks_in(group: Group) -> list[int]:
    """Numbers in the job of the ranks of `group`, in order."""
    if group is ThisRank.ALONE or not _is_distributed():
        return [first_of(group)]
    return torch.distributed.get_process_group_ranks(group)


def group_size(group: Group) -> int:
    return torch.distributed.get_world_size(group) if group is not ThisRank.ALONE and _is_distributed() else 1


def processes_on_host() -> int:
    """Number of processes that share the memory and the disks of this host; rather too many than too few."""
    told = env.processes_on_host()
    if told is not None:
        return told
    # Processes started by hand (mp.spawn). A host has one for each accelerator at most, unless each process sees one
    # accelerator alone.
    ranks, devices = group_size(None), torch.accelerator.device_count()
    return min(ranks, devices) if devices > 1 else ranks


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
