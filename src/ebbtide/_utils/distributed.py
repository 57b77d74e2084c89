"""Ranks that answer each other.

Note [Ranks meet]
~~~~~~~~~~~~~~~~~
1. A collective that some rank never enters stands until the process group's timeout, and nothing names that rank. So
   ranks meet at the group's store first, which needs no other rank, and enter the collective when the last of them has
   come. A rank that waits warns, with the ranks that are missing, and raises at the timeout.
2. Ranks meet before a forward, never inside one, and count steps by the optimizer's (see Note [PlanController]).
"""

import time
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ebbtide._errors import ConfigError, EbbtideWarning, PlanError
from ebbtide._utils.torch_private import store_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Value = TypeVar("Value")

_TELL_AFTER_S = 10.0  # ranks of one job are rarely that far apart, and whoever looks at a job that stands has begun to
_LONGEST_SLEEP_S = 0.1


def check_group(group: object) -> None:
    """Raises ConfigError for what is no process group, or none of this rank's."""
    if group is None or (_is_distributed() and isinstance(group, torch.distributed.ProcessGroup)):
        return
    raise ConfigError(
        f"process_group={group!r}: expected a torch.distributed.ProcessGroup that this rank is in, such as "
        "mesh['dp'].get_group()"
    )


def gather(mine: Value, group: "ProcessGroup | None", what: str) -> list[Value]:
    """What all ranks of `group` (None: of the job) have, in order. Every rank has to call this.

    Raises PlanError if a rank has not come within the timeout of `init_process_group`.
    """
    size = group_size(group)
    if size == 1:
        return [mine]
    distributed = torch.distributed
    store = store_of(group)
    if store is not None:
        meet(store, distributed.get_rank(group), distributed.get_process_group_ranks(group), what)
    found: list[Any] = [None] * size
    distributed.all_gather_object(found, mine, group=group)
    return found


def meet(store: Any, place: int, ranks: list[int], what: str) -> None:
    """Returns when each of `ranks` has called this for `what`. `place`: of this rank among them; `store`: torch's.

    Raises PlanError, with the ranks that are missing, at the timeout of `store`.
    """
    key = f"ebbtide/{what}"
    count = store.add(f"{key}/{place}", 1)  # the first meeting on this, the second one: ranks count alike
    if store.add(f"{key}/meeting {count}", 1) == len(ranks):
        store.set(f"{key}/met {count}", "")
    began_s, limit_s = time.monotonic(), store.timeout.total_seconds()
    is_told = False
    while not store.check([f"{key}/met {count}"]):
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s or (waited_s > _TELL_AFTER_S and not is_told):
            missing = [rank for at, rank in enumerate(ranks) if store.add(f"{key}/{at}", 0) < count]
            text = _missing_text(missing, len(ranks), what, waited_s)
            if missing and waited_s > limit_s:
                for counter in (f"{key}/{place}", f"{key}/meeting {count}"):
                    store.add(counter, -1)  # who comes later is to wait for this rank, and to be told
                raise PlanError(text)
            if missing and not is_told:
                warnings.warn(f"{text} It waits until {limit_s:.0f} s have passed", EbbtideWarning, stacklevel=2)
                is_told = True
        time.sleep(min(_LONGEST_SLEEP_S, 0.1 * waited_s + 1e-3))


def _missing_text(missing: list[int], count: int, what: str, waited_s: float) -> str:
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return (
        f"this rank waits for {len(missing)} of {count} ranks to agree on {what}, since {waited_s:.0f} s: rank {shown} "
        "has not come. Each of them has to train this module too and run as many steps: name those that do with "
        "process_group=, or write recipe= or plan= instead of budget=."
    )


def is_first(group: "ProcessGroup | None") -> bool:
    """Whether this rank is the first one of `group`."""
    return not _is_distributed() or torch.distributed.get_rank(group) == 0


def group_size(group: "ProcessGroup | None") -> int:
    return torch.distributed.get_world_size(group) if _is_distributed() else 1


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
