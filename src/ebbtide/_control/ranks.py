"""What ranks agree on before they go by one plan, and where they cannot.

A schedule with point-to-point communication never lets all ranks come to one meeting: a stage waits inside its forward
for what another stage sends. So a budget is refused there before the first step (see Note [Ranks meet]).
"""

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ebbtide._errors import ConfigError
from ebbtide._planner.launch_ahead import with_host
from ebbtide._profiling.merge_ranks import slowest
from ebbtide._profiling.profile import Profile
from ebbtide._utils.distributed import gather, group_size
from ebbtide._utils.torch_private import callers, modules_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Schedules with point-to-point communication: functions with such a name, in modules with such a name.
_SCHEDULES = {"torch.distributed.pipelining.": "", "megatron.core.pipeline_parallel.": "forward_backward_pipelining"}


class Answer(NamedTuple):
    """What a rank has to say before all go by one plan. `profile`: None if it could not make one."""

    profile: Profile | None
    budget_bytes: int | None


Agree = Callable[[Answer], list[Answer]]
"""Gives the answers of all ranks for this rank's one. Every rank has to call it."""


def agreed_profile(profiles: Sequence[Profile]) -> Profile:
    """The slowest of all ranks' profiles, with a CPU as far ahead as that one needs. Raises PlanError."""
    merged = slowest(profiles)
    return with_host(merged, merged.host)


def agreement(group: "ProcessGroup | None", what: str) -> Agree | None:
    """A function that gives the answers of all ranks of `group` on `what` for this rank's; None for a single rank."""
    return None if group_size(group) == 1 else functools.partial(gather, group=group, what=what)


def refuse_pipeline(module: torch.nn.Module) -> None:
    """Raises ConfigError if `module` is a stage of a pipeline over several ranks, or a schedule of one calls it."""
    if group_size(None) > 1 and (_is_stage(module) or any(map(_is_schedule, callers()))):
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
