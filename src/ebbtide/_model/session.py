"""A session is one run of model code in one thread. Where a plan keeps everything, our hooks are off.

Note [Rest]
~~~~~~~~~~~
Where nothing moves, no hook of ours runs: a region with the recipe `keep` rests, and so does a model whose plan keeps
all.
1. The first forward by a plan counts the kept tensors, for the statistics; forwards at rest add the same counts.
2. A region with another hooked module inside never rests, neither does a module named by the user, nor a region that
   moves nothing and has release points behind its entry: a saved tensor has to reach them. A tensor without room may
   move tomorrow: only a plan decides.
3. A model also rests if nothing qualified to move in a forward and nothing can qualify in the next: all tensors too
   small together, outside of regions that keep, are smaller than one that would move, the arguments are alike, all
   modules are in the same mode, and the same parameters are trained. Sizes may depend on data and on
   attributes of the model, so one forward in seventeen looks again.
4. Hooks of the user around ours would receive tensors saved at rest: under foreign hooks nothing rests. Hooks pushed
   inside a region and not yet popped at the region's end stay above ours.
"""

import contextlib
from collections.abc import Generator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from ebbtide._engine.context import RegionCall
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._engine.stats import Count, StatsRecorder
from ebbtide._plans import Plan
from ebbtide._recompute.saved_outputs import SaveOutputsMode
from ebbtide._types import Reason, RecomputeRecorder, Unable
from ebbtide._utils.torch_private import is_inside_checkpoint, push_below, top_pack_hook

UnableRegions: TypeAlias = Mapping[str, Unable]
"""Regions to keep whatever the plan says, by name, with the reason."""


class Enclosing(NamedTuple):
    """Settings of the saved-tensor hooks around a module, restored after the forward of the module.

    Attributes:
        region: name of the module if the module is a region, with a region call of its own.
        kept: counts of an earlier forward, which hold for this one too; None if tensors are counted one by one.
        rests: our hooks are off.
        is_counted: kept tensors of the module are counted, for later forwards.
        kept_around: counts of the forward around; None if nothing is counted around.
        was_paused: the module is called by a region at rest, without being a part of the region.
    """

    region_call: RegionCall
    stays: Reason | None
    region: str | None
    kept: "Kept | None" = None
    rests: bool = False
    is_counted: bool = False
    kept_around: "Counts | None" = None
    was_paused: bool = False


Counts: TypeAlias = dict[Reason, Count]


class Kept(NamedTuple):
    """Counts of the tensors kept by a forward under `plan`.

    Attributes:
        noticed: numbers of the saved tensors to look at in later forwards: the rest stays.
        operands: those of `noticed` that stay too. The rest is counted in each forward.
        only_for: what a later forward has to have in common with the counted one; None: nothing.
    """

    plan: Plan
    counts: Counts
    noticed: frozenset[int] = frozenset()
    operands: frozenset[int] = frozenset()
    only_for: Hashable = None

    def repeat(self, recorder: StatsRecorder) -> None:
        """Count a further forward with equal counts."""
        for reason, count in self.counts.items():
            recorder.keep(reason, count.nbytes, count.count)


NEVER_MOVE = {
    Reason.SMALL, Reason.PARAMETER, Reason.BUFFER, Reason.AUTOCAST_WEIGHT, Reason.EMPTY, Reason.LAYOUT, Reason.SUBCLASS,
    Reason.OTHER_DEVICE, Reason.RECIPE,
}  # fmt: skip
"""Reasons to stay that hold in equal forwards."""


def add_counts(counts: Counts, to: Counts | None) -> None:
    """Add `counts` to `to`; None: nothing is counted."""
    if to is not None:
        for reason, count in counts.items():
            to.setdefault(reason, Count()).add(count.nbytes, count.count)


@dataclass(eq=False)
class Session:
    """One run of model code in one thread: a forward of the root module, or the recomputation of a region.

    Attributes:
        plan: for the regions inside. Plans are replaced, never changed: backward follows the plan of its forward.
        pack_hook: our innermost pack hook.
        pushed: the pair of torch that hands saved tensors to `hooks`; None in a recomputation.
        verifies: recomputed tensors are compared with the saved tensors of this forward.
        unable: fixed for the forward, because backward recomputes only the regions that forward has prepared.
        outputs_mode: keeps outputs of expensive operators at the current place of the forward.
        enclosing: the settings of the modules around, innermost last.
        likeness: of the arguments, if later forwards may rest because of this one.
        packs_directly: `pack_hook` is the one of `hooks`, not of a recomputing region.
        is_paused: `pushed` is off: the forward is in a module that rests.
        is_recording: the forward of the root runs with grad on.
    """

    hooks: SavedTensorHooks
    plan: Plan
    pack_hook: object
    pushed: torch.autograd.graph.saved_tensors_hooks | None = None
    verifies: bool = False
    unable: UnableRegions = field(default_factory=dict[str, Unable])
    outputs_mode: SaveOutputsMode | None = None
    enclosing: list[Enclosing] = field(default_factory=list[Enclosing])
    likeness: tuple[Hashable, ...] = ()

    def __post_init__(self) -> None:
        self.is_paused = False
        self.packs_directly = self.pushed is not None
        self.is_recomputation = self.pushed is None
        self.is_recording = torch.is_grad_enabled()

    def receives_saved_tensors(self) -> bool:
        """Whether autograd hands saved tensors to this session, with grad on or off as at the beginning."""
        is_ours = self.is_paused or top_pack_hook() is self.pack_hook
        return is_ours and torch.is_grad_enabled() == self.is_recording

    @property
    def is_watched(self) -> bool:
        """Whether the observer of the step has to see every saved tensor."""
        recorder = self.hooks.step_recorder
        return recorder is not None and recorder.sees_saved_tensors

    def pause(self) -> bool:
        """Take `pushed` off until `resume`, unless saved tensors have to pass. Returns whether the pair is off now."""
        # The observer of a step learns of backward from tensors passed to hooks: the first tensor has to pass.
        has_passed = self.hooks.step_recorder is None or self.hooks.has_packed
        if self.is_watched or not has_passed or not self.packs_directly or top_pack_hook() is not self.pack_hook:
            return False
        assert self.pushed is not None
        self.pushed.__exit__()
        if top_pack_hook() is not None:
            self.pushed.__enter__()
            return False
        self.is_paused = True
        return True

    def resume(self) -> None:
        """Put `pushed` on again, if off."""
        if not self.is_paused:
            return
        assert self.pushed is not None
        self.is_paused = False
        if top_pack_hook() is None:
            self.pushed.__enter__()
        else:
            push_below(self.pushed)  # of hooks that the module has pushed, and pops later

    def close(self) -> None:
        """The forward has ended, or an exception has left the forward."""
        if self.pushed is not None and not self.is_paused:
            self.pushed.__exit__()
        self.hooks.switch_to(self.hooks.region_call)

    def forget(self) -> None:
        """Take off `pushed` after an interrupt."""
        if self.pushed is not None and top_pack_hook() is self.pack_hook:
            self.pushed.__exit__()

    def why_unable(self) -> Unable | None:
        """Reason against recomputing a region whose forward begins now; None if recomputation is possible."""
        if not torch.is_grad_enabled():
            return Unable.NO_GRAD
        if top_pack_hook() is self.pack_hook:
            return None
        return Unable.USER_CHECKPOINT if is_inside_checkpoint() else Unable.OTHER_HOOKS

    @contextlib.contextmanager
    def recording(
        self,
        pack_hook: object,
        mode: SaveOutputsMode | None,
        recorded: contextlib.AbstractContextManager[RecomputeRecorder | None],
    ) -> Generator[RecomputeRecorder | None, None, None]:
        """The forward of a region that will recompute, with a pack hook of its own."""
        before = self.pack_hook, self.packs_directly, self.outputs_mode
        self.pack_hook, self.packs_directly, self.outputs_mode = pack_hook, False, mode
        try:
            with recorded as recorder:
                yield recorder
        finally:
            self.pack_hook, self.packs_directly, self.outputs_mode = before
