"""Ranks that answer each other.

Note [Ranks meet]
~~~~~~~~~~~~~~~~~
1. A collective that some rank never enters stands until the process group's timeout, and nothing names that rank. So
   ranks meet at the group's store first, which needs no other rank, and enter the collective when the last of them has
   come. A rank that waits warns, with the ranks that are missing, and raises at the timeout.
2. Ranks meet before a forward, never inside one, and count steps by the optimizer's (see Note [Control]).
3. A schedule with point-to-point communication never lets all ranks come: a stage waits inside its forward for what
   another stage sends. So a budget is refused there before the first step.
"""

import functools
import gc
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ebbtide._errors import ConfigError, EbbtideWarning, PlanError
from ebbtide._torch import callers, modules_of, store_of
from ebbtide.planner.ranks import Agree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Value = TypeVar("Value")

_TELL_AFTER_S = 10.0  # ranks of one job are rarely that far apart, and whoever looks at a job that stands has begun to
_LONGEST_SLEEP_S = 0.1

# Schedules with point-to-point communication: functions with such a name, in modules with such a name.
_SCHEDULES = {"torch.distributed.pipelining.": "", "megatron.core.pipeline_parallel.": "forward_backward_pipelining"}


def check_group(group: object) -> None:
    """Raises ConfigError for what is no process group, or none of this rank's."""
    if group is None or (_is_distributed() and isinstance(group, torch.distributed.ProcessGroup)):
        return
    raise ConfigError(
        f"process_group={group!r}: expected a torch.distributed.ProcessGroup that this rank is in, such as "
        "mesh['dp'].get_group()"
    )


def agreement(group: "ProcessGroup | None", what: str) -> Agree | None:
    """A function that gives the answers of all ranks of `group` on `what` for this rank's; None for a single rank."""
    return None if _size(group) == 1 else functools.partial(gather, group=group, what=what)


def gather(mine: Value, group: "ProcessGroup | None", what: str) -> list[Value]:
    """What all ranks of `group` (None: of the job) have, in order. Every rank has to call this.

    Raises PlanError if a rank has not come within the timeout of `init_process_group`.
    """
    size = _size(group)
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


def _size(group: "ProcessGroup | None") -> int:
    return torch.distributed.get_world_size(group) if _is_distributed() else 1


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


# -- pipelines ---------------------------------------------------------------------------------------------------------


def refuse_pipeline(module: torch.nn.Module) -> None:
    """Raises ConfigError if `module` is a stage of a pipeline over several ranks, or a schedule of one calls it."""
    if _size(None) > 1 and (_is_stage(module) or any(map(_is_schedule, callers()))):
        raise ConfigError(
            f"budget= for {type(module).__name__}, a stage of a pipeline: ranks would agree on one plan, and those of "
            "a pipeline have other blocks each, and wait for each other inside of forward. Write recipe= (such as "
            "'recompute' or 'selective'), plan= or mode= for each stage"
        )


def _is_stage(module: torch.nn.Module) -> bool:
    """A stage keeps its module, and nothing leads from a module to its stage. Looks at every object, once for a handle.

    The module may be inside of the stage's (in DDP), or around.
    """
    stages: Any = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None:
        return False
    inside = set(modules_of(module))
    found = (each for each in gc.get_objects() if stages._PipelineStageBase in type(each).__mro__)
    owned = (each.submod for each in found if isinstance(getattr(each, "submod", None), torch.nn.Module))
    return any(submod in inside or module in modules_of(submod) for submod in owned)


def _is_schedule(caller: tuple[str, str]) -> bool:
    module, function = caller
    return any(module.startswith(name) and function.startswith(start) for name, start in _SCHEDULES.items())
