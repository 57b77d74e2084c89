"""Agreement of ranks on one plan, and the refusal of pipelines, for which no agreement is possible.

A pipeline schedule with point-to-point communication never lets all ranks meet: a stage waits inside forward for the
output of another stage. A budget for a stage is therefore an error before the first step (see Note [Ranks meet]).
"""

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ebbtide._errors import ConfigError
from ebbtide._planner.simulate import with_host
from ebbtide._profiling.merge_ranks import slowest
from ebbtide._profiling.profile import Profile
from ebbtide._utils.distributed import gather, group_size
from ebbtide._utils.torch_private import callers, modules_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Schedules with point-to-point communication: prefix of the module, prefix of the function.
_SCHEDULES = {"torch.distributed.pipelining.": "", "megatron.core.pipeline_parallel.": "forward_backward_pipelining"}


class RankAnswer(NamedTuple):
    """Reply of one rank to the question for a profile; `profile` is None if the rank has no profile."""

    profile: Profile | None
    budget_bytes: int | None


Agree = Callable[[RankAnswer], list[RankAnswer]]
"""Exchanges the answers of all ranks. Every rank has to call the function."""


def agreed_profile(profiles: Sequence[Profile]) -> Profile:
    """Merge profiles into the slowest, with the launch-ahead for the merged times. Raises PlanError."""
    merged = slowest(profiles)
    return with_host(merged, merged.host)


def agreement(group: "ProcessGroup | None", what: str) -> Agree | None:
    """Exchange of answers on `what` among the ranks of `group`; None for a single rank."""
    return None if group_size(group) == 1 else functools.partial(gather, group=group, what=what)


def refuse_pipeline(module: torch.nn.Module) -> None:
    """Raise ConfigError if `module` is a pipeline stage of several ranks, or is called by a pipeline schedule."""
    if group_size(None) > 1 and (_is_stage(module) or any(map(_is_schedule, callers()))):
        raise ConfigError(
            f"budget= or max_slowdown= for {type(module).__name__}, a stage of a pipeline: ranks would agree on one "
            "plan, but ranks of a pipeline have different blocks, and wait for each other inside forward. Write "
            "recipe= (such as 'recompute' or 'selective'), plan= or mode= for each stage"
        )


def _is_stage(module: torch.nn.Module) -> bool:
    """Whether a pipeline stage owns `module`, a part of `module` (as in DDP), or a parent.

    A module has no reference to its stage. The search visits every object of the process, once for each handle.
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
