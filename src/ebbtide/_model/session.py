"""A session is one run of model code in one thread; a module that moves nothing rests: our hooks are off inside.

Note [Rest]
~~~~~~~~~~~
Where nothing moves, no hook of ours runs. A module rests if the plan keeps all that is saved inside, or if nothing that
an earlier forward saved could travel. The first forward by a plan counts what stays, for the statistics; forwards at
rest count the same. Tensors that cannot travel today may travel later (layers that train from some step on), so a
module that does not rest by the plan is looked at again from time to time, and whenever its input is larger.
"""

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from ebbtide._engine.context import RegionCall
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._engine.stats import Count, StatsRecorder
from ebbtide._plans import Plan
from ebbtide._recompute.saved_outputs import SaveOutputsMode
from ebbtide._types import Reason, RecomputeRecorder, Unable
from ebbtide._utils.torch_private import is_inside_checkpoint, top_pack_hook

UnableRegions: TypeAlias = Mapping[str, Unable]
"""Regions to keep whatever the plan says, by name, with the reason."""


class Enclosing(NamedTuple):
    """Settings of the saved-tensor hooks around a module, restored after the forward of the module.

    Attributes:
        region: name of the module if the module is a region, with a region call of its own.
        is_resting: our saved-tensor hooks are off inside.
        before: set if the forward counts what stays inside the module.
    """

    region_call: RegionCall
    stays: Reason | None
    region: str | None
    is_resting: bool = False
    before: "Before | None" = None


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
        before: set if the forward counts what stays in the root module.
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
    before: "Before | None" = None

    def __post_init__(self) -> None:
        self.is_paused = False
        self.packs_directly = self.pushed is not None
        self.is_recomputation = self.pushed is None
        self.is_recording = torch.is_grad_enabled()

    def receives_saved_tensors(self) -> bool:
        """Whether autograd hands saved tensors to this session, with grad on or off as at the beginning."""
        is_ours = self.is_paused or top_pack_hook() is self.pack_hook
        return is_ours and torch.is_grad_enabled() == self.is_recording

    def pause(self) -> bool:
        """Take `pushed` off until `resume`, unless saved tensors have to pass. Returns whether the pair is off."""
        recorder = self.hooks.step_recorder
        # The observer of a step learns of backward by tensors that have passed: the first one must.
        is_watched = recorder is not None and (recorder.sees_saved_tensors or not self.hooks.has_packed)
        if self.packs_directly and not (is_watched or self.is_paused) and top_pack_hook() is self.pack_hook:
            assert self.pushed is not None
            self.pushed.__exit__()
            self.is_paused = True
        return self.is_paused

    def resume(self) -> None:
        """Put `pushed` on again, if paused."""
        if self.is_paused:
            assert self.pushed is not None
            self.pushed.__enter__()
            self.is_paused = False

    def close(self) -> None:
        """The forward has ended, or an exception has left the middle of it."""
        if self.pushed is not None and not self.is_paused:
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
        self, pack_hook: object, mode: SaveOutputsMode | None, recorded: contextlib.AbstractContextManager[None]
    ) -> Generator[RecomputeRecorder | None, None, None]:
        """The forward of a region that will recompute, with a pack hook of its own."""
        before = self.pack_hook, self.packs_directly, self.outputs_mode
        self.pack_hook, self.packs_directly, self.outputs_mode = pack_hook, False, mode
        try:
            with recorded:
                yield None
        finally:
            self.pack_hook, self.packs_directly, self.outputs_mode = before


_LOOKS_AGAIN_AFTER = 64
"""Forwards at rest. A look costs about half of a forward's host time where kernels take next to nothing."""

_PASSING = frozenset((Reason.STORE_FULL, Reason.HELD, Reason.CAPTURING, Reason.CAPTURE_FULL, Reason.EMPTY))
"""Reasons of a moment: the next forward may move the tensor."""


class Before(NamedTuple):
    """Counts before the forward of a module."""

    kept: dict[Reason, Count]
    used: tuple[int, ...]


class Rest:
    """Whether a module rests under a plan, and what stays inside meanwhile; see Note [Rest]."""

    def __init__(self) -> None:
        self._plan: Plan | None = None  # of the last count
        self._kept: dict[Reason, Count] | None = None
        self._is_planned = False
        self._input_numel = 0
        self._forwards_left = 0

    def is_possible(self, plan: Plan, input_numel: int) -> bool:
        """Whether the module may rest in a forward by `plan`, with inputs of `input_numel` elements."""
        if plan is not self._plan or self._kept is None:
            return False
        if not self._is_planned:
            self._forwards_left -= 1
            if self._forwards_left < 0 or input_numel > self._input_numel:
                self._plan = None
                return False
        return True

    def begin(self, plan: Plan, input_numel: int, stays: Reason | None, recorder: StatsRecorder) -> Before | None:
        """Count what stays in a forward that begins, unless known. `stays`: why everything stays by the plan."""
        if plan is self._plan or not torch.is_grad_enabled():
            return None
        self._plan, self._kept = plan, None
        self._is_planned, self._input_numel = stays is not None, input_numel
        return Before(recorder.copy_of_kept(), recorder.used())

    def end(self, before: Before, recorder: StatsRecorder) -> None:
        """The forward has ended without an exception."""
        kept = {reason: count.since(before.kept.get(reason)) for reason, count in recorder.copy_of_kept().items()}
        kept = {reason: count for reason, count in kept.items() if count.count > 0}
        is_known = self._is_planned or (self._input_numel > 0 and not _PASSING & kept.keys())
        if is_known and recorder.used() == before.used:
            self._kept, self._forwards_left = kept, _LOOKS_AGAIN_AFTER

    def count(self, recorder: StatsRecorder) -> None:
        """A forward of the module has ended at rest."""
        if torch.is_grad_enabled():
            for reason, count in (self._kept or {}).items():
                recorder.keep(reason, count.nbytes, count.count)
