"""Planning for a model: the choice of regions, profile and ranks."""

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebbtide._config import Budget, as_names
from ebbtide._control.controller import PlanController
from ebbtide._control.ranks import FIRST_MEETING, Ranks, group_of, ranks_of, stages_beside
from ebbtide._errors import PlanError
from ebbtide._model.attach import Attachment
from ebbtide._model.hooks import HANDLE
from ebbtide._model.recipe_probe import probe_recipes
from ebbtide._model.regions import find_named, names_of, refuse_nested
from ebbtide._plans import Plan
from ebbtide._profiling.files import Profiles, count_compiled, store_name
from ebbtide._profiling.profile import Profile
from ebbtide._recompute.provenance import AnyExpensiveOp
from ebbtide._types import StepRecorder
from ebbtide._utils.distributed import ThisRank, group_size
from ebbtide._utils.logs import logger_of
from ebbtide._utils.torch_private import class_of, modules_of, parameters_of

_log = logger_of(__name__)


@dataclass(frozen=True)
class Goal:
    """What to plan for: the fastest step within a budget, or the smallest peak for a largest slowdown."""

    budget: Budget | None = None
    max_slowdown: float | None = None

    @property
    def may_recompute(self) -> bool:
        """Whether plans may recompute: all ranks then need one plan."""
        return self.budget is not None or self.max_slowdown is not None

    def __str__(self) -> str:
        if self.budget is not None:
            return f"budget {self.budget}"
        return "" if self.max_slowdown is None else f"at most {100 * self.max_slowdown:.3g}% slower"


@dataclass(eq=False)
class Planning:
    """Makes the controller that plans for an attachment, and another if the rank turns out to be one of several.

    Attributes:
        regions: names, patterns or classes of the modules to plan for; empty: the repeated blocks and the last norm.
        process_group: the ranks that agree on one plan; None: all ranks.
        may_be_stage: the module may become a stage of a pipeline, until the ranks meet for the first time.
        may_have_peers: a process group may be made later.
        is_whole: the model was compiled as a whole when the controller was made.
        ranks: the ranks that meet; None for a single rank.
        stages: the modules of all pipeline stages on this rank; None until looked for, once steps are measured.
        unchecked: `ranks`, if they have not compared their `options` yet.
        options: what decides about recomputation, by name, and has to be equal on all ranks.
    """

    attachment: Attachment
    goal: Goal
    regions: Any
    profile: Profile | str | Path | None
    replans_on_oom: bool
    process_group: "torch.distributed.ProcessGroup | None"
    may_be_stage: bool = False
    may_have_peers: bool = False
    is_first_forward: bool = True
    is_whole: bool = False
    ranks: Ranks | None = None
    stages: list[torch.nn.Module] | None = None
    unchecked: Ranks | None = None
    options: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def start(self) -> None:
        """Have a controller set the plan from now on. Raises ConfigError, PlanError, ModuleError."""
        attachment, goal, group = self.attachment, self.goal, self.process_group
        module = attachment.module
        if next(parameters_of(module), None) is None:
            raise PlanError(
                f"{type(module).__name__} has no parameters, and plans are for the device of the parameters: on this "
                "rank leave offload() out, or write mode='all' to move everything"
            )
        if goal.may_recompute:
            group = group_of(module, group)
            self.may_be_stage = group is not ThisRank.ALONE
        named = names_of(module, find_named(module, as_names("regions", self.regions), "regions"))
        self.is_whole = attachment.is_whole
        if self.is_whole:
            self._check_whole(named)
            attachment.plan_as_whole()
        regions = named or {**attachment.blocks, **attachment.norm}
        if not regions:
            raise PlanError(
                f"{type(module).__name__} has no repeated blocks to plan for: name the modules that make it up, "
                "regions=['encoder.*', 'decoder.*'], or write mode='all' to move everything"
            )
        refuse_nested(regions)
        # Where no region recomputes, each rank may move tensors as it likes.
        ranks = ranks_of(group, f"a plan for {type(module).__name__}") if goal.may_recompute else None
        self.ranks = self.unchecked = ranks
        self.options = self._options(regions)
        if self.profile is not None:
            self._check_alike()  # over a profile ranks agree at once
        profiles = Profiles(self.profile, attachment.made_for(), self._profile_settings, group)
        looks_again = goal.may_recompute or profiles.are_for_any_budget
        known = profiles.find(regions, looks_again)
        others = [region.name for region in known.regions if region.name not in regions] if named and known else []
        if others:
            raise PlanError(
                f"the profile is of other regions than regions= names ({', '.join(others[:3])}, ...): measure one of "
                "these, or leave regions= out"
            )
        controller = PlanController(
            attachment, tuple(regions), attachment.context, goal.budget, AnyExpensiveOp(), known,
            max_slowdown=goal.max_slowdown,
            replans_on_oom=self.replans_on_oom, ranks=ranks, on_profile=profiles.keep, always_recompute=looks_again,
            nested=() if named else tuple(attachment.norm),
            probe_recipes=functools.partial(probe_recipes, attachment.engines, attachment.context.serves),
            stages=self._stage_controllers,
        )  # fmt: skip
        controller.start(is_stage=known is not None and len(stages_beside(module)) > 1)
        attachment.controller, attachment.plan_step = controller, self.step_begins
        self.may_have_peers = goal.may_recompute and ranks is None and group is None
        if known is not None:
            profiles.keep(known)
        if controller.counts_steps:
            attachment.optimizers.start()

    def _stage_controllers(self) -> list[PlanController]:
        if self.stages is None:
            self.stages = stages_beside(self.attachment.module)
        own = set(modules_of(self.attachment.module))  # the stage, a part of it or a wrapper around it
        found: list[PlanController | None] = []
        for stage in self.stages:
            if not own.isdisjoint(modules_of(stage)):
                found.append(self.controller)
            else:
                handles = [vars(inner).get(HANDLE) for inner in modules_of(stage)]
                plannings = [handle._planning for handle in handles if handle is not None]
                found += [planning.controller for planning in plannings if planning is not None]
        return [each for each in found or [self.controller] if each is not None]

    @property
    def controller(self) -> PlanController | None:
        """None before `start`."""
        return self.attachment.controller

    @property
    def status(self) -> str:
        """Why there is no plan yet; "" with a plan."""
        return "no plan yet: the weights are on the meta device" if self.controller is None else self.controller.status

    def describe(self, plan: Plan) -> Plan:
        """`plan` with the status, and the budget as written."""
        budget = "" if self.controller is None or self.goal.budget is None else str(self.goal.budget)
        return dataclasses.replace(plan, budget=budget, status=self.status)

    def step_begins(self, tokens: int, verifies: bool) -> tuple[StepRecorder | None, bool]:
        """Set the plan of the forward about to begin. Returns a recorder, and whether to verify the forward."""
        is_measuring = counts_steps = False
        try:
            # The process group or the stage may have been made after `offload`, a stage even after some forwards: every
            # rank looks before the first forward and before the first meeting. In a meeting of all ranks a stage would
            # wait for stages that wait for its output.
            group, ranks = self.process_group, self.ranks
            looks = self.is_first_forward or (ranks is not None and ranks.meet_next)
            is_stage = self.may_be_stage and looks and group_of(self.attachment.module, group) is not group
            is_compiled = self.attachment.is_whole and not self.is_whole  # since `offload`
            if is_stage or is_compiled or (self.may_have_peers and group_size(None) > 1):
                self.start()
            self.is_first_forward = False
            self._check_alike()
            assert self.controller is not None
            recorder = self.controller.step_begins(tokens, verifies)
            is_measuring, counts_steps = self.controller.is_measuring, self.controller.counts_steps
        finally:
            if not counts_steps:  # a single rank looks for optimizers until there is a profile, or an error instead
                self.attachment.optimizers.stop()
        self.may_be_stage &= self.ranks is not None and self.ranks.step < FIRST_MEETING
        if is_measuring:  # verification would hold up a timed forward
            verifies = self.controller.is_warming_up and self.attachment.config.verify != 0
        if not self.controller.status:
            self.attachment.context.recorder.first_step_begins()
        return recorder, verifies

    def conclude(self) -> Profile | None:
        """The profile, if the past steps suffice, without another step."""
        return None if self.controller is None else self.controller.conclude()

    def _options(self, regions: Collection[str]) -> dict[str, str]:
        slowdown = "none" if self.goal.max_slowdown is None else str(self.goal.max_slowdown)
        profile = "none" if self.profile is None else "a profile" if isinstance(self.profile, Profile) else "a file"
        return {
            "budget=": "none" if self.goal.budget is None else "one",  # of several the smallest counts
            "max_slowdown=": slowdown,
            "profile=": profile,
            "regions": f"{len(regions)} ({', '.join(regions)})",
        }

    def _check_alike(self) -> None:
        if self.unchecked is not None:
            compiled = count_compiled(self.attachment.blocks)  # maybe since `offload`
            self.unchecked.check_alike({**self.options, "compiled blocks": compiled})
            self.unchecked = None

    def _check_whole(self, named: Collection[str]) -> None:
        """Raises PlanError for regions inside of a model compiled as a whole."""
        name = class_of(self.attachment.module).__name__
        if named:
            raise PlanError(
                f"regions= names {len(named)} modules ({', '.join(list(named)[:3])}, ...), and {name} is compiled as a "
                "whole, so that a plan has one region: leave regions= out, or compile these modules one by one "
                "(block.compile()) instead of the model"
            )
        _log.info(
            "%s is compiled as a whole and planned as one region: with blocks compiled one by one (block.compile()) a "
            "plan chooses for each block, and tensors leave while the next block runs", name,
        )  # fmt: skip

    def _profile_settings(self) -> dict[str, str]:  # as of now: blocks may be compiled after `offload`
        config, blocks = self.attachment.config, self.attachment.blocks
        return {"store": store_name(config.store), "compiled": count_compiled(blocks)}
