"""Agreement of ranks on one plan and on its corrections.

Note [Ranks]
~~~~~~~~~~~~
1. Ranks meet between two steps, at steps that follow from nothing but earlier meetings: the step after an agreement on
   profiles, each 4th step while plans are on trial, later ever more rarely. Between meetings every rank keeps the plan.
2. At a meeting every rank brings a summary of fixed size, and takes the worst of every number over all ranks away, by
   one reduction. From equal numbers every rank draws equal conclusions, by the code of a single rank
   (Note [PlanTuner]). Nothing else may decide: no clock, no figure of one rank, no answer that came early.
3. An optimizer step ends a step, because ranks may run different numbers of forwards in a step. Without an optimizer of
   torch each forward counts as a step, and every rank must run the same number.
   The meetings begin before the first forward, or as soon as a profile is given: ranks of other options would recompute
   other regions, and their collectives would hang or mix. Every rank raises the same error instead.
4. Profiles of equal structure are merged by a reduction of their numbers. Ranks with different structures send whole
   profiles.
5. Each stage of a pipeline has a plan, for the blocks of stages differ. A stage waits in the middle of a step for the
   output of another stage, so only the ranks of one stage meet, before the first forward of a step. A rank arrives when
   the rank's former step is over, independent of the present step elsewhere: no two meetings wait for each other. Until
   an optimizer has stepped, forwards count, and a first meeting may come between the forwards of one step: shown for
   GPipe and 1F1B only. In a pipeline over all ranks of the job each rank plans alone; otherwise `process_group=` has to
   name the ranks of the stage, and a budget without the name is an error before the first step.
"""

import gc
import hashlib
import operator
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from math import inf
from typing import Any, NamedTuple

import torch

from ebbtide._control.link_rates import LinkRatios
from ebbtide._control.trial import Observation
from ebbtide._errors import ConfigError, PlanError
from ebbtide._planner.simulate import with_host
from ebbtide._profiling.merge_ranks import merged_by, slowest, structure_of
from ebbtide._profiling.profile import Profile
from ebbtide._utils.distributed import Group, ThisRank, Value, gather, group_size, largest, ranks_in
from ebbtide._utils.torch_private import callers, modules_of, pipeline_stages

FIRST_MEETING = 4  # a warm-up, two measured steps, and the step that begins with the meeting

# Schedules with point-to-point communication: prefix of the module, prefix of the function.
_SCHEDULES = {"torch.distributed.pipelining.": "", "megatron.core.pipeline_parallel.": "forward_backward_pipelining"}


class Condition(NamedTuple):
    """A rank before a step.

    Attributes:
        grown_bytes: allocated before the step beyond the profile's bytes.
        peak_bytes: the device's peak, of evaluations too; 0: unknown.
        ran_out: the device ran out of memory.
        is_asked: the user asks for another plan.
    """

    grown_bytes: int = 0
    peak_bytes: int = 0
    ran_out: bool = False
    is_asked: bool = False


class Summary(NamedTuple):
    """The part of a rank in a meeting."""

    observation: Observation
    condition: Condition
    link: LinkRatios


_SMALLER_IS_WORSE = ("is_complete", "timed", "out", "back")


class Ranks:
    """The ranks that follow one plan, and the steps at which they meet.

    Args:
        group: the ranks.
        what: what the ranks agree on, for messages.
    """

    def __init__(self, group: Group, what: str) -> None:
        self._group = group
        self._what = what
        self.step = 0
        """Number of the current step; of the current forward while no optimizer has stepped."""
        self._counts_forwards = True
        self._meeting = FIRST_MEETING

    def check_alike(self, options: Mapping[str, str]) -> None:
        """Raise PlanError on every rank if ranks differ in the `options` that decide about recomputation. Before the
        first plan, on every rank."""
        digest = hashlib.sha256(repr(sorted(options.items())).encode()).digest()
        number = float(int.from_bytes(digest[:6], "big"))
        if sum(self._largest([number, -number])) == 0.0:
            return
        found = self._gather(dict(options))
        numbers = ranks_in(self._group)
        for name in options:
            values = [each[name] for each in found]
            other = next((at for at, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise PlanError(
                    f"ranks differ in {name} for {self._what}: {values[0]} on rank {numbers[0]}, {values[other]} on "
                    f"rank {numbers[other]}. Give all ranks equal ones, or name those of a plan with process_group="
                )

    def forward_begins(self, have_stepped: bool) -> bool:
        """Whether all ranks meet before this forward. `have_stepped`: an optimizer has, since the last call."""
        if have_stepped and self._counts_forwards:
            self._counts_forwards, self.step, self._meeting = False, 1, FIRST_MEETING
        if have_stepped or self._counts_forwards:
            self.step += 1
            return self.step == self._meeting
        return False

    def meet_after(self, steps: int) -> None:
        """Meet again so many steps after the current step."""
        self._meeting = self.step + steps

    @property
    def meet_next(self) -> bool:
        """Whether the current step is the last one before a meeting."""
        return self.step + 1 >= self._meeting

    def agreed(self, own: Profile | None, budget_bytes: int | None) -> tuple[Profile | None, int | None]:
        """The slowest profile and the smallest budget of all ranks; no profile if some rank has none. Raises
        PlanError."""
        base_bytes, structure = (-inf, (0, 0)) if own is None else (own.base_bytes, structure_of(own))
        least_bytes = inf if budget_bytes is None else budget_bytes
        numbers = [float(own is None), -least_bytes, base_bytes, *structure, *(-part for part in structure)]
        lacks, negative, base_bytes, *structures = self._largest(numbers)
        least = None if negative == -inf else int(-negative)
        if own is None or lacks:
            return None, least
        are_alike = structures[:2] == [-part for part in structures[2:]]
        if not are_alike:
            return agreed_profile(self._gather(own)), least
        merged = merged_by(self._largest, own, int(base_bytes))
        return with_host(merged, merged.host), least

    def worst(self, own: Summary) -> Summary:
        """The worst of every number over all ranks."""
        parts: list[Any] = list(own)
        signs = [-1.0 if name in _SMALLER_IS_WORSE else 1.0 for part in parts for name in part._fields]
        values = [value for part in parts for value in part]
        found = self._largest(list(map(operator.mul, signs, values)))
        worst = (type(value)(sign * number) for value, sign, number in zip(values, signs, found, strict=True))
        return Summary(*(type(part)(*islice(worst, len(part))) for part in parts))

    def _largest(self, numbers: Sequence[float]) -> list[float]:
        return largest(numbers, self._group, self._what)

    def _gather(self, own: Value) -> list[Value]:
        return gather(own, self._group, self._what)


def agreed_profile(profiles: Sequence[Profile]) -> Profile:
    """Merge profiles into the slowest, with the launch-ahead for the merged times. Raises PlanError."""
    merged = slowest(profiles)
    return with_host(merged, merged.host)


def ranks_of(group: Group, what: str) -> Ranks | None:
    """The ranks of `group`, to agree on `what`; None for a single rank."""
    return None if group_size(group) == 1 else Ranks(group, what)


def group_of(module: torch.nn.Module, group: Group) -> Group:
    """The ranks to agree on a plan for `module`, by `process_group=` of the user.

    Raises:
        ConfigError: the module is a pipeline stage of unknown ranks.
    """
    if group_size(None) == 1:
        return group
    stages = _stages()
    own = [stage for stage in stages if _has_part_in(stage.submod, module)]
    if group is not None:
        return group
    if own and own[0].group_size == group_size(None):
        return ThisRank.ALONE
    if own or any(map(_is_schedule, callers())):
        raise ConfigError(
            f"budget= or max_slowdown= for {type(module).__name__}, a stage of a pipeline: the ranks of the stage "
            "agree on one plan, and other stages have others. Name them with process_group= (the ranks of data, "
            f"sharded and tensor parallelism, or a group of this rank alone). Or: {_WITHOUT_A_PLANNER}"
        )
    return None


_WITHOUT_A_PLANNER = "write recipe= (such as 'recompute' or 'selective'), plan= or mode= for each stage"


def stages_beside(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of all pipeline stages on this rank, in order, if `module` has a part in one of them."""
    for schedule in _instances("schedules", "_PipelineSchedule"):
        stages = sorted(pipeline_stages(schedule), key=lambda stage: stage.stage_index)
        modules = [stage.submod for stage in stages]
        if any(_has_part_in(each, module) for each in modules):
            return modules
    return []


def _stages() -> list[Any]:
    """The pipeline stages of this process."""
    found = _instances("stage", "_PipelineStageBase")
    return [each for each in found if isinstance(getattr(each, "submod", None), torch.nn.Module)]


def _instances(file: str, base: str) -> list[Any]:
    """The objects of a class of torch.distributed.pipelining. A module has no reference to its stage, nor a stage to
    its schedule: the search visits every object."""
    found: Any = sys.modules.get(f"torch.distributed.pipelining.{file}")
    if found is None:
        return []
    gc.collect()  # stages of an earlier pipeline
    return [each for each in gc.get_objects() if getattr(found, base) in type(each).__mro__]


def _has_part_in(submod: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether the modules are equal, or one is a part of the other (as in DDP)."""
    return submod in modules_of(module) or module in modules_of(submod)


def _is_schedule(caller: tuple[str, str]) -> bool:
    module, function = caller
    return any(module.startswith(name) and function.startswith(start) for name, start in _SCHEDULES.items())
