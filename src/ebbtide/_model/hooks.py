"""Marks on the modules of a model: they say where a forward is, and run regions as their recipes want it.

Note [One pair of hooks, many marks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Only the root module's forward pushes saved-tensor hooks, and regions that run again in backward push theirs inside.
All other marks just note where the forward is. Pushing hooks there would, inside somebody's checkpointed block,
replace the checkpoint's own hooks and silently switch its recomputation off. For the same reason a region only runs
again if the innermost hooks are ours.
A compiled module traces its hooks, so a mark has to stand outside of it: around `_compiled_call_impl`. The root's mark
always does: torch calls forward hooks after an Exception, but not after KeyboardInterrupt, and saved-tensor hooks that
stay behind would go on working for every other model of the thread.
A region's forward is replaced on the instance, so that the hooks of others (FSDP gathers weights in them) stand
outside of what runs again and are called once.
"""

import abc
import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, SupportsIndex, cast

import torch

from ebbtide._engine.context import RegionCall
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._plans import Plan, Recipe
from ebbtide._recompute.arguments import Arguments
from ebbtide._recompute.compiled import Modules, Traced, sites_refused
from ebbtide._recompute.frame import Frame, Pack
from ebbtide._recompute.ops import ExpensiveOps
from ebbtide._recompute.prune import PruneCache
from ebbtide._recompute.saved_outputs import SaveOutputsMode
from ebbtide._recompute.state import RegionState
from ebbtide._recompute.verify import Evidence
from ebbtide._utils.torch_private import constant_in_traces, hidden_from_compiler, is_inside_checkpoint, top_pack_hook
from ebbtide.types import Reason, RecomputeRecorder, StepRecorder, Unable

HANDLE = "_ebbtide_handle"
"""The attribute of a root module that holds its handle."""

_REDUCE = "__reduce_ex__"


class Session:
    """One run of model code in one thread: a forward of the root module, or the second run of a region.

    Attributes:
        desk: where saves go.
        hooks: the desk's, if they were pushed for this session; None in a second run.
        plan: for the regions inside. Never changed, only replaced: backward goes by what its forward went by.
        pack_hook: the innermost pack hook of ours.
        packs_here: `pack_hook` is the desk's, not that of a region that runs again.
        is_recomputation: nothing travels, for what is saved is needed at once.
        is_recording: the root's forward runs with grad on.
        verifies: what regions save when they are recomputed is compared with what they save now.
        unable: regions that are kept whatever the plan says, by name, and why. Of the forward, like the plan: backward
            recomputes what its forward has prepared.
        holding: what takes dear outputs where the forward is now.
        frames: what marks have changed, to be put back.
    """

    def __init__(
        self,
        desk: SavedTensorHooks,
        plan: Plan,
        pack_hook: object,
        hooks: torch.autograd.graph.saved_tensors_hooks | None = None,
        verifies: bool = False,
        unable: Mapping[str, Unable] = MappingProxyType({}),
    ) -> None:
        self.desk = desk
        self.hooks = hooks
        self.plan = plan
        self.pack_hook = pack_hook
        self.packs_here = hooks is not None
        self.is_recomputation = hooks is None
        self.is_recording = torch.is_grad_enabled()
        self.verifies = verifies
        self.unable = unable
        self.holding: SaveOutputsMode | None = None
        self.frames: list[tuple[RegionCall, Reason | None, bool]] = []

    def goes_on(self) -> bool:
        """Whether what is saved now comes to this session, of which nothing has changed since it began."""
        return top_pack_hook() is self.pack_hook and torch.is_grad_enabled() == self.is_recording

    def why_unable(self) -> Unable | None:
        """Why a region whose forward begins now cannot run again, if so."""
        if not torch.is_grad_enabled():
            return Unable.NO_GRAD
        if top_pack_hook() is self.pack_hook:
            return None
        return Unable.USER_CHECKPOINT if is_inside_checkpoint() else Unable.OTHER_HOOKS

    def pack_input(self, stays: Reason | None) -> Pack:
        """What takes the tensors passed to a region: the desk, or the region around it, which can make them again."""
        if self.packs_here:
            return functools.partial(self.desk.pack_as, stays=stays)
        return cast(Pack, self.pack_hook)

    @contextlib.contextmanager
    def inside(
        self, pack_hook: object, holding: SaveOutputsMode | None, watched: contextlib.AbstractContextManager[None]
    ) -> Generator[RecomputeRecorder | None, None, None]:
        """A region that runs again is being run, with hooks of its own."""
        before = self.pack_hook, self.packs_here, self.holding
        self.pack_hook, self.packs_here, self.holding = pack_hook, False, holding
        try:
            with watched:
                yield None
        finally:
            self.pack_hook, self.packs_here, self.holding = before


class Owner(Protocol):
    """The handle, as its marks see it."""

    def session(self) -> Session | None: ...

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def enter_root(self) -> None: ...

    def leave_root(self, is_whole: bool) -> None: ...

    def recomputation(
        self, visit: RegionCall, plan: Plan, pack_hook: object, watch: StepRecorder | None, unable: Mapping[str, Unable]
    ) -> contextlib.AbstractContextManager[RecomputeRecorder | None]: ...

    def expensive_ops(self, recipe: Recipe) -> ExpensiveOps: ...

    def warn_if_root_is_bypassed(self) -> None: ...

    def was_traced(self, stands_outside: bool, module: torch.nn.Module) -> None: ...


class ModuleHook(abc.ABC):
    """Notes that the forward is inside a module. Both hooks do nothing while a compiler traces them."""

    def __init__(self, handle: Owner, module: torch.nn.Module) -> None:
        self._handle = handle
        self._module = module
        self._compiled: CompiledCall | None = None
        self.is_compiled = False
        """The module is, and the mark stands around its compiled call. An attribute, for the compiler to guard on."""
        self._removers = [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]
        self._copies: _Copies = vars(module).setdefault(_REDUCE, _Copies(module))
        self._copies.marks.append(self)
        self.stand_outside()

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: B027 (most marks do not care)
        """What the module is about to be called with; only where the mark stands outside."""

    @abc.abstractmethod
    def enter(self) -> None: ...

    @abc.abstractmethod
    def leave(self, is_whole: bool) -> None:
        """`is_whole`: the forward came to its end, no exception."""

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward, between `enter` and `leave`."""
        return call(*args, **kwargs)

    def stand_outside(self) -> bool:
        """If the module is compiled, wrap the compiled call, whose trace holds our hooks as nothing."""
        call = self._call_to_wrap()
        if call is None:
            return False
        if not isinstance(call, CompiledCall):
            was = cast("Callable[..., Any] | None", self._module._compiled_call_impl)
            self._compiled = CompiledCall(self, call, was)
            vars(self._module)["_compiled_call_impl"] = self._compiled  # wrappers may hand on what is set on them
            self.is_compiled = True
        return True

    def remove(self) -> None:
        for remover in self._removers:
            remover.remove()
        self.restore_calls(vars(self._module))
        self._copies.marks.remove(self)
        if not self._copies.marks:
            vars(self._module).pop(_REDUCE, None)

    def restore_calls(self, attributes: dict[str, Any]) -> None:
        """Put the calls that the mark wraps back, in the module's attributes or in a copy of them."""
        if self._compiled is not None:
            _restore(attributes, "_compiled_call_impl", self._compiled, self._compiled.was)

    def strip(self, attributes: dict[str, Any]) -> None:
        """Take the mark out of a copy of the module's attributes; the module keeps its own dicts of hooks."""
        self.restore_calls(attributes)
        numbers = {remover.id for remover in self._removers}
        for name in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
            attributes[name] = OrderedDict((n, hook) for n, hook in attributes[name].items() if n not in numbers)

    def _call_to_wrap(self) -> Callable[..., Any] | None:
        """The module's call that runs its hooks inside, if there is one to stand outside of."""
        return cast("Callable[..., Any] | None", self._module._compiled_call_impl)

    def _before(self, _module: torch.nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            self._notice_trace()
        elif self._compiled is None:
            self.enter()

    def _after(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._compiled is None:
            self.leave(is_whole=output is not None)

    @constant_in_traces
    def _notice_trace(self) -> None:
        """Runs once, while a compiler traces the module: from the next call on the mark stands outside."""
        # If it stands there already, what is traced is a caller of the module, and that is out of reach.
        is_callers = isinstance(self._module._compiled_call_impl, CompiledCall)
        self._handle.was_traced(not is_callers and self.stand_outside(), self._module)


class _Copies:
    """The `__reduce_ex__` of a marked module: copies and pickles are of the module without marks and handle.

    A class with its own `__deepcopy__` does not ask for `__reduce_ex__`: the copy comes to the handle, which refuses.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.marks: list[ModuleHook] = []

    def __call__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        kind = type(self._module)
        bare: torch.nn.Module = object.__new__(kind)
        attributes = vars(bare)
        attributes.update(vars(self._module))
        del attributes[_REDUCE]
        attributes.pop(HANDLE, None)
        for mark in reversed(self.marks):
            mark.strip(attributes)
        return bare.__reduce_ex__(protocol)


class CompiledCall:
    """A module's call with its mark around it. `was`: what stood in its place, None for a module not compiled."""

    def __init__(self, mark: ModuleHook, call: Callable[..., Any], was: Callable[..., Any] | None) -> None:
        self._mark = mark
        self.call = call
        self.was = was

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        self._mark.given(args, kwargs)
        self._mark.enter()
        is_whole = False
        try:
            output = self._mark.run(self.call, args, kwargs)
            is_whole = True
        finally:
            self._mark.leave(is_whole)
        return output


class RootHook(ModuleHook):
    def _call_to_wrap(self) -> Callable[..., Any] | None:
        """Any root's, also that of the wrapper which torch.compile returns: it keeps this one attribute for itself."""
        return super()._call_to_wrap() or cast("Callable[..., Any]", self._module._call_impl)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._handle.given(args, kwargs)

    def enter(self) -> None:
        self._handle.enter_root()

    def leave(self, is_whole: bool) -> None:
        self._handle.leave_root(is_whole)


class RegionHook(ModuleHook):
    """A region, a chosen module, or both."""

    def __init__(self, handle: Owner, module: torch.nn.Module, region: str | None, choice: Reason | bool) -> None:
        self._region = region
        self._is_block = region is not None
        self._choice = choice
        self._forward: _RegionForward | None = None
        self._traced = Traced()
        super().__init__(handle, module)

    def enter(self) -> None:
        session = self._handle.session()
        if session is None:
            self._handle.warn_if_root_is_bypassed()
            return
        desk = session.desk
        is_region = self._is_region(session.plan)
        session.frames.append((desk.visit, desk.stays, is_region))
        if is_region:
            assert self._region is not None
            if desk.watch is not None:
                desk.watch.entered(self._region)
            window_bytes = desk.visit.limits.window_bytes
            desk.visit = desk.visit.scope.visit(self._region)
            desk.visit.hold(window_bytes)
        self._follow(session)

    def leave(self, is_whole: bool) -> None:  # noqa: ARG002 (a region has nothing to conclude from it)
        session = self._handle.session()
        if session is None or not session.frames:
            return
        desk = session.desk
        window_bytes = desk.visit.limits.window_bytes
        desk.visit, desk.stays, was_region = session.frames.pop()
        desk.visit.hold(window_bytes)
        if was_region and desk.watch is not None:
            assert self._region is not None
            desk.watch.left(self._region)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._handle.session()
        recipe = None if session is None else session.plan.recipe_of(self._region)
        if session is None or recipe is None or not recipe.recomputes:
            return call(*args, **kwargs)
        if not (torch.is_grad_enabled() or session.is_recording):
            return call(*args, **kwargs)
        why = session.why_unable() or session.unable.get(self._name)
        if why is not None:
            session.desk.visit.scope.ledger.note_unable(self._name, recipe.action, why)
            return call(*args, **kwargs)
        if self.is_compiled and recipe.action == "selective":
            return self._run_partitioned(session, recipe, call, args, kwargs)
        return self._run_framed(session, recipe, call, args, kwargs)

    def wrap_forward(self, region: str, recipe: Recipe | None, dear: ExpensiveOps | None, modules: Modules) -> None:
        """Have the forward of the module, the region of this name, go through `run`; what it does is up to recipes.

        A compiler traces it by `recipe`, with the operators that are `dear` inside of `modules`.
        """
        self._region = region
        self._traced.follow(recipe, dear, modules)
        if self._forward is None:
            self._state = RegionState(self._name, self._module)
            self._courses = PruneCache()
            self._forward = _RegionForward(self, self._module, self._traced)

    @property
    def unable(self) -> Unable | None:
        """Why the region is never recomputed, if that was seen."""
        return None if self._forward is None else self._state.unable

    def restore_calls(self, attributes: dict[str, Any]) -> None:
        super().restore_calls(attributes)
        if self._forward is not None:
            self._forward.restore(attributes)

    def standing_again(self) -> contextlib.AbstractContextManager[object]:
        """After `remove`, for the second run of a region around this one, which counts on it."""
        return contextlib.nullcontext() if self._forward is None else self._forward.in_place()

    @property
    def _name(self) -> str:
        return self._region or type(self._module).__name__

    def _is_region(self, plan: Plan) -> bool:
        """What only a former plan made a region is none, nor is a block of which a plan that says it all says nothing:
        its saves belong to what is around it."""
        return self._region in plan.regions or (self._is_block and plan.outside is None)

    def _follow(self, session: Session) -> None:
        """Which saves leave from here on, and when: by `include`, then by the plan, and last by `exclude`."""
        desk, plan = session.desk, session.plan
        said = None if self._region is None else plan.regions.get(self._region)
        if self._choice is True and desk.stays is not Reason.KEEP_LAST:
            desk.stays = None
        if said is not None:
            if plan.outside is not None:
                desk.stays = None  # the plan says it all
            desk.follow(said)
        if isinstance(self._choice, Reason):
            desk.stays = self._choice

    def _run_framed(
        self, session: Session, recipe: Recipe, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        desk = session.desk
        desk.visit.recomputes = session.packs_here
        kept = Reason.RECIPE
        holding = None
        if recipe.action == "selective" and not session.is_recomputation:
            dear = self._handle.expensive_ops(recipe)
            stays = kept if recipe.outputs == "keep" else desk.stays
            holding = SaveOutputsMode(desk, dear, stays, recipe.sites, recipe.beyond, self._courses)
        pack_input = session.pack_input(kept if recipe.inputs == "keep" else desk.stays)
        visit, plan, unable, watch = desk.visit, session.plan, session.unable, desk.watch

        def around(
            pack_hook: Pack, is_recomputation: bool
        ) -> contextlib.AbstractContextManager[RecomputeRecorder | None]:
            if is_recomputation:
                return self._handle.recomputation(visit, plan, pack_hook, watch, unable)
            watched = contextlib.nullcontext() if watch is None else watch.running(visit.region)
            return session.inside(pack_hook, holding, watched)

        evidence = Evidence(desk.beside(visit.scope.visit(visit.region))) if session.verifies else None
        frame = Frame(self._name, call, desk, around, evidence)
        output = frame.run(args, kwargs, pack_input, holding, self._state)
        if frame.ends_early:
            visit.scope.ledger.note_unable(self._name, recipe.action, Unable.UNKNOWN_RNG)
        return output

    def _run_partitioned(
        self, session: Session, recipe: Recipe, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The compiled graph itself runs again what its policy does not hold; what it holds is saved by one node."""
        if recipe.sites is not None:
            raise sites_refused()  # before there is anything to undo: a policy raises in the middle of a trace
        if not session.packs_here:
            return call(*args, **kwargs)
        desk = session.desk
        inputs = {t.untyped_storage()._cdata for t in Arguments(args, kwargs).take_tensors() if type(t) is torch.Tensor}
        input_stays = Reason.RECIPE if recipe.inputs == "keep" else desk.stays
        output_stays = Reason.RECIPE if recipe.outputs == "keep" else desk.stays

        @hidden_from_compiler
        def pack(t: torch.Tensor) -> Any:
            is_input = type(t) is torch.Tensor and t.untyped_storage()._cdata in inputs
            return desk.pack_as(t, input_stays if is_input else output_stays)

        with torch.autograd.graph.saved_tensors_hooks(pack, desk.unpack):
            return call(*args, **kwargs)


class OpScopeHook(ModuleHook):
    """A module that an operator class of some recipe is limited to ("matmul@self_attn"): notes being inside of it."""

    def __init__(self, handle: Owner, module: torch.nn.Module, pattern: str) -> None:
        self._pattern = pattern
        super().__init__(handle, module)

    def enter(self) -> None:
        self._count(1)

    def leave(self, is_whole: bool) -> None:  # noqa: ARG002 (inside or not is all there is to it)
        self._count(-1)

    def _count(self, step: int) -> None:
        session = self._handle.session()
        if session is not None and session.holding is not None:
            session.holding.inside[self._pattern] += step


class _RegionForward:
    """Stands on a region's instance in place of its forward."""

    def __init__(self, mark: RegionHook, module: torch.nn.Module, traced: Traced) -> None:
        self._module = module
        self._was = cast("Callable[..., Any] | None", module.__dict__.get("forward"))
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced.call(original, mark.is_compiled, args, kwargs)
            if mark.is_compiled:
                return original(*args, **kwargs)  # code of the block that the compiler has left to Python
            return mark.run(original, args, kwargs)

        self._forward = forward
        module.forward = forward

    def restore(self, attributes: dict[str, Any]) -> None:
        """Put the former forward back. Below a later wrapper ours stays: without a session it does nothing."""
        _restore(attributes, "forward", self._forward, self._was)

    @contextlib.contextmanager
    def in_place(self) -> Generator[None, None, None]:
        now = cast("Callable[..., Any] | None", self._module.__dict__.get("forward"))
        self._put(self._forward)
        try:
            yield
        finally:
            self._put(now)

    def _put(self, forward: Callable[..., Any] | None) -> None:
        if forward is not None:
            self._module.forward = forward
        else:
            self._module.__dict__.pop("forward", None)


def _restore(attributes: dict[str, Any], name: str, ours: object, was: object) -> None:
    """Replace `ours` by `was`; None removes the attribute, so that the attribute of the class holds again."""
    if attributes.get(name) is not ours:
        return
    if was is None:
        del attributes[name]
    else:
        attributes[name] = was
