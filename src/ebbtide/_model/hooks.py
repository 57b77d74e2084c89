"""Hooks on the modules of a model: they follow a forward, and run regions by their recipes.

Note [One pair of hooks]
~~~~~~~~~~~~~~~~~~~~~~~~
1. Only the forward of the root module pushes saved-tensor hooks; a recomputing region pushes a pair of its own inside.
   Hooks of all further modules only note where the forward is. A pair pushed inside a checkpoint of the user would
   replace the hooks of the checkpoint and silently switch recomputation off. For the same reason a region recomputes
   only if the innermost saved-tensor hooks are ours.
2. The compiler traces hooks of a compiled module, so our hook wraps the compiled call, `_compiled_call_impl`. The call
   of the root is always wrapped: torch runs forward hooks after an Exception, but not after KeyboardInterrupt, and
   saved-tensor hooks left behind would act on every model of the thread.
3. `torch.compile(model)` calls the model in Python, and compiles functions called from there. Around our wrapper of the
   root the compiler is off: hooks are no part of a graph, and the compiler goes on inside of the wrapped call.
4. The forward of a region is replaced on the instance. Hooks of others (FSDP gathers weights in hooks) thus stand
   outside of the recomputed code and run once.

Note [Compiled into CUDA graphs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`mode="reduce-overhead"` has inductor capture forward and backward of a block in graphs that share a pool of memory.
1. A captured backward reads its saved tensors at the addresses of the capture. After a move they are elsewhere: each
   backward is captured anew, 128 times, and then runs without a graph. The pool's memory stays with the pool. So all
   tensors that such a block saves stay.
2. A forward called within backward begins a new step in the pool, whose outputs may overwrite tensors that earlier
   blocks have saved. So no such block is recomputed.
"""

import abc
import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Any, Protocol, SupportsIndex, cast

import torch

from ebbtide._engine.context import RegionCall
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._model.session import Enclosing, Kept, Session, UnableRegions, add_counts
from ebbtide._plans import OpChoice, Plan, Recipe
from ebbtide._recompute.arguments import Arguments
from ebbtide._recompute.compiled import CompiledRecipe, Modules, sites_error
from ebbtide._recompute.frame import Frame, Pack
from ebbtide._recompute.ops import ExpensiveOps
from ebbtide._recompute.partitions import Compiler, Partitions, in_cuda_graphs, not_compiled
from ebbtide._recompute.prune import PruneCache
from ebbtide._recompute.saved_outputs import SaveOutputsMode
from ebbtide._recompute.state import RegionState
from ebbtide._recompute.verify import Evidence
from ebbtide._types import Reason, RecomputeRecorder, StepRecorder, Unable
from ebbtide._utils.torch_private import (
    OuterCompiler,
    compiler_of,
    constant_in_traces,
    entered_in_python,
    has_hooks,
    hidden_from_compiler,
    is_traced,
    set_frame_callback,
    uses_cuda_graphs,
)

HANDLE = "_ebbtide_handle"
"""Attribute of a root module with the handle of `offload`."""

_REDUCE = "__reduce_ex__"


class HookOwner(Protocol):
    """An attachment, as its hooks see it.

    Attributes:
        partitions: the compiled calls of regions at activation memory budgets of recipes.
    """

    partitions: Partitions

    def session(self) -> Session | None: ...

    def around_session(self) -> contextlib.AbstractContextManager[Any]: ...

    def enter_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def leave_root(self, is_complete: bool) -> None: ...

    def recomputation(
        self, call: RegionCall, plan: Plan, pack_hook: object, recorder: StepRecorder | None, unable: UnableRegions
    ) -> contextlib.AbstractContextManager[RecomputeRecorder | None]: ...

    def expensive_ops(self, choices: tuple[OpChoice, ...], /) -> ExpensiveOps: ...

    def warn_if_root_is_bypassed(self) -> None: ...

    def on_trace(self, is_wrapped: bool, module: torch.nn.Module) -> None: ...


class ModuleHook(abc.ABC):
    """Calls `enter` before and `leave` after the forward of a module. Does nothing while a compiler traces."""

    def __init__(self, owner: HookOwner, module: torch.nn.Module) -> None:
        self._owner = owner
        self._module = module
        self._compiled: CompiledCall | None = None
        self.outer: OuterCompiler | None = None
        """The latest compiler around a call of the module."""
        self.is_compiled = False
        """Whether the hook wraps the compiled call of the module: an attribute, for guards of the compiler."""
        self._removers = [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]
        self._reducer: _Reducer = vars(module).setdefault(_REDUCE, _Reducer(module))
        self._reducer.hooks.append(self)
        self.wrap_compiled_call()

    @abc.abstractmethod
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`kwargs` are known only if the hook wraps the call."""

    @abc.abstractmethod
    def leave(self, is_complete: bool) -> None:
        """`is_complete`: the forward has raised no exception."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """A context around a wrapped call, with `enter` and `leave` inside."""
        return contextlib.nullcontext()

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the module, between `enter` and `leave`."""
        return call(*args, **kwargs)

    def found(self, compiler: OuterCompiler) -> None:
        """The module is called in the reach of `compiler`."""
        self.outer = compiler

    def wrap_compiled_call(self) -> bool:
        """Wrap the compiled call of a compiled module: the trace holds our hooks as no-ops. False if not compiled."""
        call = self._call_to_wrap()
        if call is None:
            return False
        if not isinstance(call, CompiledCall):
            former = cast("Callable[..., Any] | None", self._module._compiled_call_impl)
            self._compiled = CompiledCall(self, call, former)
            vars(self._module)["_compiled_call_impl"] = self._compiled  # wrappers may forward attribute writes
            self.is_compiled = True
        return True

    def remove(self) -> None:
        for remover in self._removers:
            remover.remove()
        self.restore_calls(vars(self._module))
        self._reducer.hooks.remove(self)
        if not self._reducer.hooks:
            vars(self._module).pop(_REDUCE, None)

    def restore_calls(self, attributes: dict[str, Any]) -> None:
        """Restore the wrapped calls in `attributes`: the dict of the module, or a copy of the dict."""
        if self._compiled is not None:
            _restore(attributes, "_compiled_call_impl", self._compiled, self._compiled.former)

    def strip(self, attributes: dict[str, Any]) -> None:
        """Remove the hook from `attributes`, a copy of the dict of the module. The hooks of the module stay."""
        self.restore_calls(attributes)
        ids = {remover.id for remover in self._removers}
        for name in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
            attributes[name] = OrderedDict((n, hook) for n, hook in attributes[name].items() if n not in ids)

    def _call_to_wrap(self) -> Callable[..., Any] | None:
        return cast("Callable[..., Any] | None", self._module._compiled_call_impl)

    def _before(self, _module: torch.nn.Module, args: Any) -> None:
        if is_traced():
            self._on_trace()
        elif self._compiled is None:
            self.enter(args, {})

    def _after(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if not is_traced() and self._compiled is None:
            self.leave(is_complete=output is not None)

    @constant_in_traces
    def _on_trace(self) -> None:
        """Runs once, during the trace of the module; the next call finds the hook around the compiled call."""
        # A hook that wraps the call already is traced with a caller of the module, out of reach.
        is_traced_with_caller = isinstance(self._module._compiled_call_impl, CompiledCall)
        self._owner.on_trace(not is_traced_with_caller and self.wrap_compiled_call(), self._module)


class _Reducer:
    """`__reduce_ex__` of a hooked module: copies and pickles have neither hooks nor handle.

    A class with a `__deepcopy__` of its own does not use `__reduce_ex__`: the copy reaches the handle, which refuses.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.hooks: list[ModuleHook] = []

    def __call__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        cls = type(self._module)
        bare: torch.nn.Module = object.__new__(cls)
        attributes = vars(bare)
        attributes.update(vars(self._module))
        del attributes[_REDUCE]
        attributes.pop(HANDLE, None)
        for hook in reversed(self.hooks):
            hook.strip(attributes)
        return bare.__reduce_ex__(protocol)


class CompiledCall:
    """The call of a module with a hook around. `former`: the attribute that was replaced; None if not compiled."""

    def __init__(self, hook: ModuleHook, call: Callable[..., Any], former: Callable[..., Any] | None) -> None:
        self._hook = hook
        self.call = call
        self.former = former

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return self.call(*args, **kwargs)
        callback = set_frame_callback(None)
        try:
            return self._run(None if callback is None else OuterCompiler(callback), args, kwargs)
        finally:
            set_frame_callback(callback)

    entered_in_python(__call__, callees=False)  # or nothing is left for the compiler around

    def _run(self, compiler: OuterCompiler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.call
        if compiler is not None:
            call = compiler(call)
            if compiler != self._hook.outer:
                self._hook.found(compiler)
        with self._hook.around():
            self._hook.enter(args, kwargs)
            is_complete = False
            try:
                output = self._hook.run(call, args, kwargs)
                is_complete = True
            finally:
                self._hook.leave(is_complete)
            return output


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` is compiled in place, with or without a hook of ours around the call."""
    call = cast("Callable[..., Any] | None", module._compiled_call_impl)
    return (call.former if isinstance(call, CompiledCall) else call) is not None


class _CompiledForward(threading.local):
    """What the current call of a region, in this thread, runs the forward by; None: as the user compiled it."""

    compiled: Callable[..., Any] | None = None


class RegionHook(ModuleHook):
    """Hook of a region, of a module named by `include` or `exclude`, or both.

    Args:
        region: name of a repeated block; None for a module that is no block.
        choice: True for `include`, a Reason to stay for `exclude` and `keep_last`, False for neither.
    """

    def __init__(self, owner: HookOwner, module: torch.nn.Module, region: str | None, choice: Reason | bool) -> None:
        self._region = region
        self._is_block = region is not None
        self._choice = choice
        self._forward: Callable[..., Any] | None = None
        self._traced = CompiledRecipe()
        self._kept: Kept | None = None
        self._partitions: dict[float, Callable[..., Any]] = {}
        self._at = _CompiledForward()
        self.is_alone = False
        """Whether no other hooked module is inside: set by the owner."""
        self.is_in_cuda_graphs = False
        """Whether the compiler captures the graphs of the module: see Note [Compiled into CUDA graphs]."""
        super().__init__(owner, module)
        self._compiler_changes()  # the module in torch.compile's wrapper has no compiled call

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        session = self._owner.session()
        if session is None:
            self._owner.warn_if_root_is_bypassed()
            return
        hooks = session.hooks
        region = self._region_of(session.plan)
        if region is not None and hooks.step_recorder is not None:
            hooks.step_recorder.entered(region)
        known = self._kept if self._kept is not None and self._kept.plan is session.plan else None
        if known is not None and not known.noticed and session.pause():
            session.enclosing.append(Enclosing(hooks.region_call, hooks.stays, region, known, rests=True))
            hooks.stays = Reason.RECIPE
            for point in session.plan.regions[self._name].release:  # at the entry: a region with others never rests
                hooks.region_call.keep_window(point.window_bytes)
                self._release(session)
            return
        around, was_paused = (hooks.region_call, hooks.stays, region), session.is_paused
        session.resume()  # if called by a region at rest, without being a part of the region
        if region is not None:
            window_bytes = hooks.region_call.limits.window_bytes
            hooks.switch_to(hooks.region_call.context.new_call(region))
            hooks.region_call.keep_window(window_bytes)
        self._apply_plan(session)
        reaches_point = region is not None and hooks.region_call.reaches_point(0)
        if not self._keeps_alike(session):
            enclosing = Enclosing(*around, was_paused=was_paused)
        elif known is not None and not session.is_watched:
            enclosing = Enclosing(*around, kept=known, was_paused=was_paused)
            hooks.region_call.noticed, hooks.region_call.operands = known.noticed, known.operands
        else:
            enclosing = Enclosing(*around, is_counted=True, kept_around=hooks.kept, was_paused=was_paused)
            hooks.kept, hooks.apart = {}, hooks.named_sites or frozenset()
        session.enclosing.append(enclosing)
        if reaches_point:
            self._release(session)

    def _release(self, session: Session) -> None:
        """At the entry, where a saved tensor of a region at rest would not. An evaluation between a forward and its
        backward makes nothing leave: in inference mode, the store could not write later to the memory that it takes."""
        if session.is_recording:
            session.hooks.release()

    def _keeps_alike(self, session: Session) -> bool:
        """Whether the plan keeps the same tensors in each forward: counted once, later forwards need not look."""
        recipe = session.plan.recipe_of(self._region)
        is_planned = self.is_alone and self._choice is False and recipe is not None and not recipe.recomputes
        if session.hooks.region_call.points and not session.hooks.named_sites:
            return False  # somebody has to reach the other release points
        receives = torch.is_grad_enabled() and session.receives_saved_tensors()
        return is_planned and receives and session.hooks.named_sites is not None

    def leave(self, is_complete: bool) -> None:
        session = self._owner.session()
        if session is None or not session.enclosing:
            return
        hooks = session.hooks
        around = session.enclosing.pop()
        region = around.region
        if around.kept is not None and is_complete and torch.is_grad_enabled():
            around.kept.repeat(around.region_call.context.recorder)
            add_counts(around.kept.counts, hooks.kept)
        if around.rests:
            hooks.stays = around.stays
            session.resume()
        else:
            if around.is_counted:
                kept, noticed, self._kept = hooks.kept or {}, hooks.noticed(), None
                if is_complete and noticed is not None:
                    self._kept = Kept(session.plan, kept, noticed, noticed - hooks.apart)
                hooks.kept, hooks.apart = around.kept_around, frozenset()
                add_counts(kept, hooks.kept)
            if hooks.has_lost_operands:
                self._kept, hooks.has_lost_operands = None, False
            window_bytes = hooks.region_call.limits.window_bytes
            hooks.switch_to(around.region_call)
            hooks.stays = around.stays
            hooks.region_call.keep_window(window_bytes)
            if around.was_paused:
                session.pause()
        if region is not None and hooks.step_recorder is not None:
            hooks.step_recorder.left(region)

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session = self._owner.session()
        recipe = None if session is None else session.plan.recipe_of(self._region)
        if session is None or recipe is None:
            return call(*args, **kwargs)
        if recipe.activation_memory_budget is not None and torch.is_grad_enabled():
            call = self._partitioned(recipe.activation_memory_budget)
        if not recipe.recomputes:
            return call(*args, **kwargs)
        if not (torch.is_grad_enabled() or session.is_recording):
            return call(*args, **kwargs)
        why = session.why_unable() or session.unable.get(self._name) or self.unable
        if why is not None:
            session.hooks.region_call.context.recorder.note_unable(self._name, recipe.action, why)
            return call(*args, **kwargs)
        if self.is_compiled and recipe.action == "selective":
            return self._run_partitioned(session, recipe, call, args, kwargs)
        return self._run_framed(session, recipe, call, args, kwargs)

    @property
    def compiler(self) -> Compiler | None:
        """What compiles functions as the user compiled the module. None if not compiled, if torch does not tell, or if
        the module in torch.compile's wrapper has hooks, which the compiler would leave to Python."""
        inner = self._module._modules.get("_orig_mod")
        if inner is not None:
            return None if has_hooks(inner) else compiler_of(self._module)
        return None if self._compiled is None else compiler_of(self._compiled.call)

    @property
    def is_compiled_by_user(self) -> bool:
        """Whether the module, or the module in torch.compile's wrapper, is compiled."""
        return self.is_compiled or "_orig_mod" in self._module._modules

    @property
    def is_partitionable(self) -> bool:
        """Whether recipes may set an activation memory budget."""
        return self.compiler is not None and not self.is_in_cuda_graphs

    @property
    def compiled_class(self) -> type[torch.nn.Module]:
        """Of the module, or of the module in torch.compile's wrapper."""
        inner = self._module._modules.get("_orig_mod")
        return type(self._module if inner is None else inner)

    def wrap_compiled_call(self) -> bool:
        former = self._compiled
        is_compiled = super().wrap_compiled_call()
        if self._compiled is not former:  # the user has compiled the module anew, maybe with other settings
            self._compiler_changes()
        return is_compiled

    def _compiler_changes(self) -> None:
        self._partitions = {}
        self.is_in_cuda_graphs = uses_cuda_graphs(self.compiler)

    def _partitioned(self, budget: float) -> Callable[..., Any]:
        """The call of the module with the forward compiled at an activation memory budget."""
        if budget not in self._partitions:
            compiler, inner = self.compiler, self._module._modules.get("_orig_mod")
            if compiler is None:
                raise not_compiled(self._name, self.is_compiled_by_user, budget)
            if self.is_in_cuda_graphs:
                raise in_cuda_graphs(self._name, budget)
            compiled = self._owner.partitions.forward_at(budget, self.compiled_class, compiler)
            self._partitions[budget] = functools.partial(self._call_with, compiled)
            if self._compiled is None and inner is not None:
                self._partitions[budget] = functools.partial(compiled, inner.forward)
        return self._partitions[budget]

    def _call_with(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the module and its hooks. `compiled`: the compiled function of the forward, in this thread."""
        former, self._at.compiled = self._at.compiled, compiled
        try:
            return cast(Any, self._module)._call_impl(*args, **kwargs)
        finally:
            self._at.compiled = former

    def wrap_forward(self, region: str, recipe: Recipe | None, ops: ExpensiveOps | None, modules: Modules) -> None:
        """Route the forward of the module, region `region` from now on, through `run`.

        A compiler traces the forward by `recipe`, with the expensive operators `ops` inside `modules`.
        """
        self._region = region
        self._traced.follow(recipe, ops, modules)
        if self._forward is None:
            self._state = RegionState(self._name, self._module)
            self._prune_cache = PruneCache()
            self._former_forward = cast("Callable[..., Any] | None", vars(self._module).get("forward"))
            self._module.forward = self._forward = self._forward_around(self._module.forward)

    @property
    def unable(self) -> Unable | None:
        """Reason never to recompute the region again, once there is a reason."""
        if self.is_in_cuda_graphs:
            return Unable.CUDA_GRAPHS
        return None if self._forward is None else self._state.unable

    def restore_calls(self, attributes: dict[str, Any]) -> None:
        super().restore_calls(attributes)
        if self._forward is not None:
            # Below a later wrapper ours stays: without a session ours does nothing.
            _restore(attributes, "forward", self._forward, self._former_forward)

    @contextlib.contextmanager
    def reinstalled(self) -> Generator[None, None, None]:
        """After `remove`: the region forward as in the forward of a graph in flight, while the graph recomputes."""
        if self._forward is None:
            yield
            return
        current = cast("Callable[..., Any] | None", vars(self._module).get("forward"))
        self._module.forward = self._forward
        try:
            yield
        finally:
            if current is None:
                vars(self._module).pop("forward", None)
            else:
                self._module.forward = current

    @property
    def _name(self) -> str:
        return self._region or type(self._module).__name__

    def _forward_around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        traced, inner = self._traced, self._module._modules.get("_orig_mod")

        # A function, not an object with attributes: wrappers of others copy the attributes of a forward, and copies of
        # a model copy the function as it is.
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return traced.call(original, self.is_compiled, args, kwargs)
            compiled = self._at.compiled
            if compiled is not None:
                return compiled(original if inner is None else inner.forward, *args, **kwargs)
            if self.is_compiled:
                return original(*args, **kwargs)  # code of the block that the compiler leaves to Python
            return self.run(original, args, kwargs)

        return forward

    def _region_of(self, plan: Plan) -> str | None:
        """None for a region of a former plan only, and for a block missing from a plan that also covers `outside`:
        tensors saved inside belong to the region around."""
        return self._region if self._region in plan.regions or (self._is_block and plan.outside is None) else None

    def _apply_plan(self, session: Session) -> None:
        """Choose the saved tensors to move from here on: `include` first, then the plan, `exclude` last."""
        hooks, plan = session.hooks, session.plan
        region_plan = None if self._region is None else plan.regions.get(self._region)
        if self._choice is True and hooks.stays is not Reason.KEEP_LAST:
            hooks.stays = None
        if region_plan is not None:
            if plan.outside is not None:
                hooks.stays = None  # the plan covers everything
            hooks.apply_plan(region_plan)
        if isinstance(self._choice, Reason):
            hooks.stays = self._choice
        elif self.is_in_cuda_graphs:
            hooks.stays = Reason.COMPILED_CAPTURE

    def _run_framed(
        self, session: Session, recipe: Recipe, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hooks = session.hooks
        region_call = hooks.region_call
        region_call.recomputes = session.packs_directly
        outputs_mode = None
        # Code behind the last saved tensor may read what pruning leaves out.
        may_prune = not (recipe.prune and self._state.runs_to_end)
        if recipe.action == "selective" and may_prune and not session.is_recomputation:
            ops = self._owner.expensive_ops(recipe.ops)
            stays = Reason.RECIPE if recipe.outputs == "keep" else hooks.stays
            outputs_mode = SaveOutputsMode(hooks, ops, stays, recipe.sites, recipe.prune, self._prune_cache)
        pack_input = cast(Pack, session.pack_hook)  # a recomputing region around can make the inputs again
        if session.packs_directly:
            stays = Reason.RECIPE if recipe.inputs == "keep" else hooks.stays
            pack_input = functools.partial(hooks.pack_as, stays=stays)
        # Later regions change the session; backward follows the forward of this region.
        plan, unable, recorder = session.plan, session.unable, hooks.step_recorder

        def around(
            pack_hook: Pack, is_recomputation: bool
        ) -> contextlib.AbstractContextManager[RecomputeRecorder | None]:
            if is_recomputation:
                return self._owner.recomputation(region_call, plan, pack_hook, recorder, unable)
            recorded = contextlib.nullcontext() if recorder is None else recorder.running(region_call.region)
            return session.recording(pack_hook, outputs_mode, recorded)

        evidence = None
        if session.verifies:
            evidence = Evidence(hooks.for_call(region_call.context.new_call(region_call.region)))
        frame = Frame(self._name, call, hooks, around, evidence)
        output = frame.run(args, kwargs, pack_input, outputs_mode, self._state)
        if frame.ends_early:
            region_call.context.recorder.note_unable(self._name, recipe.action, Unable.UNKNOWN_RNG)
        return output

    def _run_partitioned(
        self, session: Session, recipe: Recipe, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The compiled graph recomputes by its own partition; one node of autograd saves everything else."""
        if recipe.sites is not None:
            raise sites_error()  # a policy would raise in the middle of a trace
        if not session.packs_directly:
            return call(*args, **kwargs)
        pack = _PackPartitioned(session.hooks, recipe, Arguments(args, kwargs)).pack
        with torch.autograd.graph.saved_tensors_hooks(pack, session.hooks.unpack):
            return call(*args, **kwargs)


class RootHook(RegionHook):
    """Opens a session for each forward of the root module. A model compiled as a whole is a region, the only one."""

    def __init__(self, owner: HookOwner, module: torch.nn.Module) -> None:
        super().__init__(owner, module, None, False)

    def _call_to_wrap(self) -> Callable[..., Any] | None:
        """Of any root: the wrapper returned by torch.compile keeps this one attribute to itself."""
        return super()._call_to_wrap() or cast("Callable[..., Any]", self._module._call_impl)

    def found(self, compiler: OuterCompiler) -> None:
        super().found(compiler)
        self._compiler_changes()

    @property
    def is_compiled_by_user(self) -> bool:
        return self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether the model is compiled as a whole, as far as known: `torch.compile` shows in a forward."""
        is_compiled_in_place = self._compiled is not None and self._compiled.former is not None
        return is_compiled_in_place or "_orig_mod" in self._module._modules or self.outer is not None

    @property
    def compiler(self) -> Compiler | None:
        return self.outer or super().compiler

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return self._owner.around_session()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._owner.enter_root(args, kwargs)
        if self._region is not None or self.is_in_cuda_graphs:
            try:
                super().enter(args, kwargs)
            except BaseException:
                self._owner.leave_root(is_complete=False)  # around a compiled call, nobody calls `leave`
                raise

    def leave(self, is_complete: bool) -> None:
        if self._region is not None or self.is_in_cuda_graphs:
            super().leave(is_complete)
        self._owner.leave_root(is_complete)


class _PackPartitioned:
    """Pack hook for the node of a partitioned graph: inputs and outputs of the region may stay for separate reasons."""

    def __init__(self, hooks: SavedTensorHooks, recipe: Recipe, arguments: Arguments) -> None:
        tensors = (t for t in arguments.take_tensors() if type(t) is torch.Tensor)
        self._inputs = {t.untyped_storage()._cdata for t in tensors}
        self._hooks = hooks
        self._input_stays = Reason.RECIPE if recipe.inputs == "keep" else hooks.stays
        self._output_stays = Reason.RECIPE if recipe.outputs == "keep" else hooks.stays

    @hidden_from_compiler
    def pack(self, t: torch.Tensor) -> Any:
        is_input = type(t) is torch.Tensor and t.untyped_storage()._cdata in self._inputs
        return self._hooks.pack_as(t, self._input_stays if is_input else self._output_stays)


class OpScopeHook(ModuleHook):
    """Counts entries of a module that an operator class of some recipe is limited to ("matmul@self_attn")."""

    def __init__(self, owner: HookOwner, module: torch.nn.Module, pattern: str) -> None:
        self._pattern = pattern
        super().__init__(owner, module)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        self._count(1)

    def leave(self, is_complete: bool) -> None:  # noqa: ARG002
        self._count(-1)

    def _count(self, step: int) -> None:
        session = self._owner.session()
        if session is not None and session.outputs_mode is not None:
            session.outputs_mode.inside[self._pattern] += step


def _restore(attributes: dict[str, Any], name: str, ours: object, former: object) -> None:
    """Replace `ours` by `former`; None removes the attribute: the attribute of the class holds again."""
    if attributes.get(name) is not ours:
        return
    if former is None:
        del attributes[name]
    else:
        attributes[name] = former
