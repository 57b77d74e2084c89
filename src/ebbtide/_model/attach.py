"""An attachment puts hooks on the modules of a model, and opens a session for each forward."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Generator, Hashable
from typing import Any, NoReturn

import torch

from ebbtide._config import OffloadConfig
from ebbtide._control.batch_size import bucket_of
from ebbtide._control.controller import PlanController
from ebbtide._engine.context import HookContext, RegionCall
from ebbtide._engine.derive_parameters import RegionParameters
from ebbtide._engine.engine import Engine
from ebbtide._engine.engines import Engines
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._errors import EbbtideWarning, ModuleError
from ebbtide._model.batches import likeness_of, tokens_of
from ebbtide._model.hooks import ModuleHook, OpScopeHook, RegionHook, RootHook
from ebbtide._model.optimizers import Optimizers
from ebbtide._model.placement import PlacementCache, is_on_meta, made_for, memory_of
from ebbtide._model.regions import WHOLE, find_named, find_norm, find_planned, find_regions
from ebbtide._model.session import NEVER_MOVE, Kept, Session, UnableRegions
from ebbtide._model.syncs import SyncHook, SyncWatch
from ebbtide._plans import Plan
from ebbtide._recompute import megatron_checkpoint, torch_checkpoint
from ebbtide._recompute.compiled import compiler_id
from ebbtide._recompute.ops import ExpensiveOps
from ebbtide._recompute.partitions import Partitions, within_whole
from ebbtide._recompute.verify import Schedule
from ebbtide._types import Reason, RecomputeRecorder, StepRecorder
from ebbtide._utils import env
from ebbtide._utils.torch_private import (
    class_of,
    graph_task_id,
    is_inside_checkpoint,
    modules_of,
    parameters_of,
    top_pack_hook,
)

_LOOK_EVERY = 16  # forwards: models seldom replace their buffers, and a look takes as long as some hundred operators


class Attachment:
    """The hooks of one root module, the plan in force, and everything a forward or a planner asks about the model.

    Implements `HookOwner` for the hooks and `PlannedModel` for a controller.
    """

    def __init__(self, module: torch.nn.Module, config: OffloadConfig, engines: Engines, context: HookContext) -> None:
        self.module = module
        self.config = config
        self.engines = engines
        self.partitions = Partitions()
        self.context = context
        self.blocks = find_regions(module)
        self.norm = find_norm(module, self.blocks)
        self.regions = dict(self.blocks)
        self.plan = Plan({})
        self.controller: PlanController | None = None
        self.plan_step: Callable[[int, bool], tuple[StepRecorder | None, bool]] | None = None
        """Sets the plan of a forward; see `Planning.step_begins`. None without a controller."""
        self.optimizers = Optimizers()
        self.tokens = 0
        self.start_when_placed: Callable[[], None] | None = None
        """Runs in the first forward that finds parameters off the meta device."""
        self._root_hook: RootHook | None = None
        self._region_hooks: dict[torch.nn.Module, RegionHook] = {}
        self._scope_hooks: list[OpScopeHook] = []
        self._former_hooks: list[RegionHook] = []
        self._sessions = _Sessions()
        self._placement = PlacementCache(module)
        self._schedule = Schedule(config.verify)
        self._kept: Kept | None = None
        self._rested = 0  # forwards since `_kept`
        self._moves: Plan | None = None  # by which some forward has moved, derived or recomputed
        self.expensive_ops = functools.cache(ExpensiveOps)
        self._weight_storages: tuple[int, ...] | None = None
        self._knows_buffers = False
        self._forwards = 0
        self._was_entered = False
        self._has_warned = False

    # -- hooks on, hooks off ---------------------------------------------------------------------------------------

    @property
    def is_installed(self) -> bool:
        """Whether the hooks are on the model."""
        return self._root_hook is not None

    def install(self) -> None:
        """Put the hooks on. Raises ModuleError for a name without a module."""
        config = self.config
        choices: dict[torch.nn.Module, Reason | bool] = dict.fromkeys(self.regions.values(), False)
        choices.update(dict.fromkeys(find_named(self.module, config.include, "include"), True))
        choices.update(dict.fromkeys(find_named(self.module, config.exclude, "exclude"), Reason.EXCLUDED))
        if config.keep_last > len(self.regions):
            raise ModuleError(
                f"keep_last={config.keep_last}, but only {len(self.regions)} repeated blocks were found: "
                "write a smaller number, or name what should stay with exclude="
            )
        last = list(self.regions.values())[len(self.regions) - config.keep_last :]
        choices.update(dict.fromkeys(last, Reason.KEEP_LAST))
        names = {block: name for name, block in self.regions.items()}
        if choices.pop(self.module, False):
            raise ModuleError(
                "include and exclude choose among the modules inside the one given to offload(), and a name here "
                f"means {type(self.module).__name__} itself: leave include out to move everything"
            )
        self._region_hooks = {
            module: RegionHook(self, module, names.get(module), choice) for module, choice in choices.items()
        }
        if env.watches_syncs():
            watch = SyncWatch(self.context.recorder, self.module, self.session)
            self._root_hook = SyncHook(self, self.module, watch)
        else:
            self._root_hook = RootHook(self, self.module)

    def remove(self) -> None:
        """Take the hooks off. Graphs in flight still run backward."""
        for hook in self._all_hooks():
            hook.remove()
        root, self._root_hook = self._root_hook, None
        self._former_hooks += self._region_hooks.values()
        if root is not None:
            self._former_hooks.append(root)
        self._region_hooks.clear()
        self._scope_hooks.clear()

    def follow_plan(self, plan: Plan, regions: dict[str, torch.nn.Module]) -> None:
        """Follow `plan` from the next forward on; backward follows the plan of its forward."""
        recipes = {name: region.recipe for name, region in plan.regions.items()}
        ops = {name: self.expensive_ops(r.ops) for name, r in recipes.items() if r.action == "selective"}
        # The modules that operator classes of recipes are limited to, by region and pattern.
        inside = {
            name: {p: find_named(regions[name], (p,), f"the recipe of {name}: @") for p in chosen.modules}
            for name, chosen in ops.items()
        }
        former, self.regions = self.regions, regions
        for hook in self._scope_hooks:
            hook.remove()
        pairs = [(module, p) for found in inside.values() for p, modules in found.items() for module in modules]
        self._scope_hooks = [OpScopeHook(self, module, pattern) for module, pattern in dict.fromkeys(pairs)]
        has_regions = bool(plan.regions or self.plan.regions)
        self.plan = plan
        self.context.follow(recipes if plan.outside is None else {**recipes, "": plan.outside.recipe})
        known = self.context.parameters
        self.context.parameters = {
            name: known[name] if name in known and former[name] is module else RegionParameters(name, module)
            for name, module in regions.items()
        }
        for parameters in self.context.parameters.values() if plan.predicted is not None else ():
            parameters.trust()
        for name, module in {**former, **regions}.items() if has_regions else ():
            hook = self._hook_of(module)
            if hook is None:
                hook = self._region_hooks[module] = RegionHook(self, module, None, False)
            ids = {p: frozenset(map(compiler_id, modules)) for p, modules in inside.get(name, {}).items()}
            hook.wrap_forward(name, recipes.get(name), ops.get(name), ids)
        for module, hook in self._region_hooks.items():
            hook.is_alone = self._region_hooks.keys().isdisjoint(modules_of(module)[1:])

    @property
    def is_whole(self) -> bool:
        """Whether the model is compiled as a whole, as far as known: `torch.compile` shows in a forward."""
        return self._root_hook is not None and self._root_hook.is_whole

    def plan_as_whole(self) -> None:
        """Have the model itself as the only region: the compiler has taken in the blocks."""
        self.blocks, self.norm = {WHOLE: self.module}, {}

    def _check_whole(self) -> None:
        """Raises ModuleError if the plan gives blocks inside of the one graph a partition of their own."""
        for name, region in self.plan.regions.items():
            budget = region.recipe.activation_memory_budget
            if name != WHOLE and budget is not None:
                raise within_whole(name, class_of(self.module).__name__, budget, WHOLE)

    def _hook_of(self, module: torch.nn.Module) -> RegionHook | None:
        return self._root_hook if module is self.module else self._region_hooks.get(module)

    def _all_hooks(self) -> list[ModuleHook]:
        root = [] if self._root_hook is None else [self._root_hook]
        return [*self._region_hooks.values(), *self._scope_hooks, *root]

    # -- for the controller (see PlannedModel) ---------------------------------------------------------------------

    def apply_plan(self, plan: Plan, size: int = 0) -> None:
        """Follow `plan`, unchecked. Plans for batches of another `size` learn an order of their own."""
        self.context.set_batch_size(size)
        has_same_names = plan.regions.keys() == self.plan.regions.keys()  # planners change plans often, names never
        self.follow_plan(plan, self.regions if has_same_names else find_planned(self.module, self.blocks, plan))

    def engine(self) -> Engine | None:
        device = self._placement.device()
        if device is None or not self.context.serves(device):
            return None
        engine = self.engines.on(device)
        return None if isinstance(engine, Reason) or not engine.device.supports_timing else engine

    def is_captured(self) -> bool:
        device = self._placement.device()
        return device is not None and self.context.serves(device) and self.engines.is_captured(device)

    def made_for(self) -> dict[str, str]:
        return {**made_for(self.module, self._placement.device()), "min_bytes": str(self.config.min_bytes)}

    def compiled(self) -> set[str]:
        hooks = ((name, self._hook_of(module)) for name, module in self.regions.items())
        return {name for name, hook in hooks if hook is not None and hook.is_compiled}

    def partitionable(self) -> dict[str, Hashable]:
        hooks = ((name, self._hook_of(module)) for name, module in self.regions.items())
        found = {name: hook.compiled_class for name, hook in hooks if hook is not None and hook.is_partitionable}
        return {name: cls for name, cls in found.items() if cls not in self.partitions.broken}

    def compilations(self) -> tuple[int, float]:
        return self.partitions.compilations, self.partitions.seconds

    def never_recomputed(self) -> UnableRegions:
        if not self.context.recorder.stats.unable:
            return {}
        hooks = ((name, self._hook_of(module)) for name, module in self.regions.items())
        return {name: hook.unable for name, hook in hooks if hook is not None and hook.unable is not None}

    def have_stepped(self) -> bool:
        return self.optimizers.have_stepped()

    def memory_before(self) -> tuple[dict[str, int], dict[str, int]]:
        device = self._placement.device()
        base, future_grads = memory_of(self.module, self.regions, device)
        state_bytes = self.optimizers.state_bytes(list(parameters_of(self.module)), device)
        return (base | {"optimizer": state_bytes} if state_bytes > 0 else base), future_grads

    # -- for the hooks (see HookOwner) -----------------------------------------------------------------------------

    def session(self) -> Session | None:
        """The innermost session of the current thread."""
        stack = self._sessions.stack
        return stack[-1] if stack and isinstance(stack[-1], Session) else None

    def around_session(self) -> contextlib.AbstractContextManager[Any]:
        """A context around the life of a session, from before its begin until after its end.

        An interrupt (KeyboardInterrupt) may come at either, and leave the session and the hooks behind. The context is
        a lock of the thread, whose entry and exit no interrupt divides: sessions without a held lock are left over.
        """
        sessions = self._sessions
        if sessions.running.locked():
            return contextlib.nullcontext()  # a model that calls itself
        while sessions.stack:
            session = sessions.stack[-1]
            if isinstance(session, Session):
                session.forget()
            sessions.stack.pop()
        return sessions.running

    def enter_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open a session: choose the plan, push the saved-tensor hooks."""
        if self.controller is not None or not self._schedule.is_off:
            self.tokens = tokens_of(args, kwargs)
        self._was_entered = True
        if env.is_disabled():
            self._sessions.stack.append(None)
            return
        if is_inside_checkpoint():
            self._sessions.stack.append(None)
            if torch.is_grad_enabled() and graph_task_id() == -1:  # the recomputation has been counted as a forward
                self.context.recorder.note_checkpointed(type(self.module).__name__)
            return
        outer = self.session()
        if self._sessions.stack and isinstance(self._sessions.stack[-1], Kept):
            self._sessions.stack.append(self._sessions.stack[-1])  # a model at rest that calls itself
            return
        if outer is not None and outer.receives_saved_tensors():
            self._sessions.stack.append(outer)  # a model that calls itself: one step
            return
        if self.start_when_placed is not None and not is_on_meta(self.module):
            # Parameters on the meta device are replaced as a rule, and RegionParameters take that for a swap.
            self.context.parameters = {name: RegionParameters(name, module) for name, module in self.regions.items()}
            self.start_when_placed()
            self.start_when_placed = None
        recorder, verifies = None, False
        if torch.is_grad_enabled():
            verifies = self._schedule.is_due((bucket_of(max(1, self.tokens)), self.module.training))
            if self.plan_step is not None:
                recorder, verifies = self.plan_step(self.tokens, verifies)
        kept = self._kept
        if recorder is None and kept is not None and top_pack_hook() is None and self._repeats(kept, args, kwargs):
            self._sessions.stack.append(kept)  # the whole model rests
            self._rested += 1
            return
        if self.is_whole:
            self._check_whole()
        for hook in self._all_hooks():
            hook.wrap_compiled_call()  # a block may have been compiled after `offload`
        if not self._knows_buffers:
            self._note_buffers()
        self._note_weights()
        torch_checkpoint.install()
        megatron_checkpoint.install()
        self.context.forward_begins()
        hooks = SavedTensorHooks(self.engines, self.context.new_call(""))
        hooks.step_recorder = recorder
        hooks.stays = Reason.OUTSIDE if self.config.include else None
        if self.plan.outside is not None:
            hooks.apply_plan(self.plan.outside)
        pushed = hooks.hooks()
        session = Session(hooks, self.plan, pushed.pack_hook, pushed, verifies, self.never_recomputed())
        if not self.config.include and torch.is_grad_enabled() and self._moves is not self.plan:
            hooks.kept, session.likeness = {}, likeness_of(args, kwargs)
        try:
            pushed.__enter__()  # before the session counts as open: torch.func refuses hooks
            self._sessions.stack.append(session)
        except BaseException:
            session.forget()
            raise

    def leave_root(self, is_complete: bool) -> None:
        """Close the session that `enter_root` has opened."""
        stack = self._sessions.stack
        session = stack[-1] if stack else None
        is_inner = stack[-2:-1] == [session]
        if isinstance(session, Session) and not is_inner:
            if is_complete:
                self._note_kept(session)
            session.close()
        del stack[-1:]  # behind the close: an interrupt leaves the session in sight
        if isinstance(session, Kept) and is_complete and not stack and torch.is_grad_enabled():
            session.repeat(self.context.recorder)
        if not isinstance(session, Session) or is_inner:
            return
        if is_complete and torch.is_grad_enabled() and (engine := self.engine()) is not None:
            engine.forward_ended(session.hooks.region_call.limits)
        if self.controller is not None and session.hooks.step_recorder is not None:
            session.hooks.step_recorder.forward_ended() if is_complete else self.controller.forward_failed()
        self._forwards += 1
        if self._forwards % _LOOK_EVERY == 1:
            self._note_buffers()  # for the next forward: the device is busy now, and would wait for the host before one
        if is_complete and torch.is_grad_enabled() and self.start_when_placed is None:
            self._warn_if_nothing_moved(session.plan)

    def _note_kept(self, session: Session) -> None:
        """Let later forwards rest if the forward of `session` has kept everything, and they will (see Note [Rest])."""
        hooks, plan, kept = session.hooks, session.plan, session.hooks.kept
        if kept is None or not session.receives_saved_tensors():
            return
        if plan.keeps_all:
            self._kept = Kept(plan, kept)
        elif hooks.has_moved or any(region.recipe.names_any for region in plan.regions.values()):
            self._moves = plan
        elif kept and session.likeness and hooks.small_bytes < self.config.min_bytes and kept.keys() <= NEVER_MOVE:
            self._kept, self._rested = Kept(plan, kept, only_for=self._conditions(session.likeness)), 0

    def _repeats(self, kept: Kept, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the forward that begins keeps what the forward of `kept` kept."""
        if kept.plan is not self.plan or kept.only_for is None:
            return kept.plan is self.plan
        return self._rested < _LOOK_EVERY and kept.only_for == self._conditions(likeness_of(args, kwargs))

    def _conditions(self, likeness: tuple[Hashable, ...]) -> Hashable:
        """What decides which tensors a forward saves, and of which sizes, unless the values of tensors do."""
        owners = modules_of(self.module)
        trained = [p.requires_grad for owner in owners for p in owner._parameters.values() if p is not None]
        modes = [owner.training for owner in owners]
        return likeness, tuple(modes), tuple(trained), self._placement.storages()

    @contextlib.contextmanager
    def recomputation(
        self, call: RegionCall, plan: Plan, pack_hook: object, recorder: StepRecorder | None, unable: UnableRegions
    ) -> Generator[RecomputeRecorder | None, None, None]:
        """The session of a region that recomputes in backward, in the thread of backward."""
        hooks = SavedTensorHooks(self.engines, call)
        with self.around_session(), contextlib.ExitStack() as stack:
            recomputed = None if recorder is None else stack.enter_context(recorder.recomputing(call.region))
            for hook in self._former_hooks:  # removed since; a graph in flight follows the recipes of its forward
                stack.enter_context(hook.reinstalled())
            self._sessions.stack.append(Session(hooks, plan, pack_hook, unable=unable))
            try:
                yield recomputed
            finally:
                self._sessions.stack.pop()

    def warn_if_root_is_bypassed(self) -> None:
        """Warn once if a part of the model saves tensors for backward and the root was never called."""
        if self._was_entered or not torch.is_grad_enabled() or graph_task_id() != -1 or env.is_disabled():
            return
        self._was_entered = True
        name = type(self.module).__name__
        warnings.warn(
            f"nothing moves while {name} is not called itself, and a part of it was: offload() covers model(...), not "
            "model.forward(...) or model.part(...). Call the model, apply offload() to the part, or use "
            "offload_activations() around the step",
            EbbtideWarning,
            stacklevel=2,
        )

    def on_trace(self, is_wrapped: bool, module: torch.nn.Module) -> None:
        """A compiler has inlined the hooks of `module`. `is_wrapped`: a hook wraps the compiled call from now on."""
        if is_wrapped:
            return
        # A norm is a region where possible, and goes unplanned inside a larger graph.
        is_wanted_region = module in self.regions.values() and module not in self.norm.values()
        if module is self.module and self.session() is None:
            text = (
                f"{type(module).__name__} was compiled as a whole with offloading inside, where it cannot work: "
                "apply ebbtide.offload to what torch.compile returns or, better, compile the blocks one by one "
                "(block.compile()): inside a single graph nothing can leave before forward ends"
            )
        elif WHOLE in self.plan.regions or (self.plan_step is not None and self.is_whole):
            return  # the plan is, or will be, for the model as one region
        elif is_wanted_region and not self._region_hooks[module].is_compiled and not self._has_warned:
            text = (
                f"{type(self.module).__name__} was compiled into graphs larger than its blocks. A graph hands over "
                "all that it saves at its end and takes it back at its start, so nothing inside of it leaves or comes "
                "while it runs: peak memory falls less and copies overlap with nothing. Compile the blocks one by one "
                "(block.compile()): plans then choose for each block what its graph saves, and what moves"
            )
        else:
            return
        self._has_warned = True
        warnings.warn(text, EbbtideWarning, stacklevel=2)

    def _warn_if_nothing_moved(self, plan: Plan) -> None:
        """Not for measured steps, nor for a plan that keeps everything because everything fits the budget."""
        has_no_plan = self.controller is not None and self.controller.status
        derives = any(region.recipe.derives for region in plan.regions.values())
        if any(region.recipe.activation_memory_budget is not None for region in plan.regions.values()):
            return  # the compiled graphs save less
        learns_to_derive = self._forwards <= 1 and derives and plan.predicted is None
        if has_no_plan or learns_to_derive or (plan.keeps_all and plan.budget_bytes is not None):
            return
        entry_point = f"offload({type(self.module).__name__})"
        if plan.predicted is None:
            self.context.recorder.warn_if_nothing_moved(entry_point)
            self.context.recorder.warn_if_window_holds_all(entry_point)
            return
        causes = dict.fromkeys(region.reason.rpartition(": ")[2] for region in plan.regions.values())
        forward = f"planned forward ({'; '.join(filter(None, causes))})"
        advice = ". Within a budget, such as budget='40GiB', what has to leave does; mode='all' moves everything"
        self.context.recorder.warn_if_nothing_moved(entry_point, forward, advice)

    def _note_weights(self) -> None:
        """Look up the storages of the parameters again if the parameters have moved or were replaced."""
        storages = self._placement.storages()
        if storages != self._weight_storages and not is_on_meta(self.module):
            self._weight_storages = storages
            self.context.register_weights(parameters_of(self.module))

    def _note_buffers(self) -> None:
        """Look up the storages of buffers: moving a saved buffer frees no memory. Before the next look a new buffer is
        moved, or an activation in the place of an old buffer kept: wasteful, never wrong."""
        self._knows_buffers = True
        self.context.buffers = {
            b.untyped_storage()._cdata
            for owner in modules_of(self.module)
            for b in owner._buffers.values()
            if type(b) is torch.Tensor and b.layout is torch.strided
        }

    def __reduce__(self) -> NoReturn:
        raise ModuleError(
            "a handle of offload() belongs to one module and cannot be copied or pickled with it: call "
            "handle.remove() first, or save the module's state_dict()"
        )


class _Sessions(threading.local):
    """Open sessions of a thread, innermost last; Kept for a forward at rest, None for one that is left alone."""

    def __init__(self) -> None:
        self.stack: list[Session | Kept | None] = []
        self.running = threading.Lock()
