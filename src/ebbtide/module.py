"""The door with a model: regions get names, patterns choose, and one handle watches and undoes it all.

Note [One pair of hooks, many marks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Only the root module's forward pushes saved-tensor hooks. Regions and chosen modules inside just mark where the forward
is. Pushing hooks there would, inside somebody's checkpointed block, replace the checkpoint's own hooks and silently
switch its recomputation off.
A compiled module traces its hooks, so a mark has to stand outside of it: around `_compiled_call_impl`. The root's mark
always does: torch calls forward hooks after an Exception, but not after KeyboardInterrupt, and saved-tensor hooks that
stay behind would go on working for every other model of the thread.
"""

import abc
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch

from ebbtide import _knobs
from ebbtide._errors import EbbtideWarning, ModuleError
from ebbtide._events import Listener
from ebbtide._regions import find_named, find_regions
from ebbtide._torch import constant_in_traces, graph_task_id, innermost_pack_module, named_modules
from ebbtide.config import Mode, Names, OffloadConfig, make_config
from ebbtide.devices import device_for
from ebbtide.engine.engines import Engines
from ebbtide.engine.hooks import Desk
from ebbtide.engine.ledger import Stats
from ebbtide.engine.process import PROCESS
from ebbtide.engine.scope import Scope, Visit
from ebbtide.reports.table import stats_text
from ebbtide.stores import serves
from ebbtide.types import Reason, StoreFactory

_ATTRIBUTE = "_ebbtide_handle"


class _Session:
    """One forward of the root module in one thread: the desk, and where the marks inside have put it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.hooks = desk.hooks()
        self.frames: list[tuple[Visit, Reason | None]] = []


class _Mark(abc.ABC):
    """Notes that the forward is inside a module. Both hooks do nothing while a compiler traces them."""

    def __init__(self, handle: "OffloadHandle", module: torch.nn.Module) -> None:
        self._handle = handle
        self._module = module
        self._compiled: _CompiledCall | None = None
        self._removers = [
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_hook(self._after, always_call=True),
        ]
        self.stand_outside()

    @abc.abstractmethod
    def enter(self) -> None: ...

    @abc.abstractmethod
    def leave(self, is_whole: bool) -> None:
        """`is_whole`: the forward came to its end, no exception."""

    def stand_outside(self) -> bool:
        """If the module is compiled, wrap the compiled call, whose trace holds our hooks as nothing."""
        call = self._call_to_wrap()
        if call is None:
            return False
        if not isinstance(call, _CompiledCall):
            was = cast("Callable[..., Any] | None", self._module._compiled_call_impl)
            self._compiled = _CompiledCall(self, call, was)
            self._module._compiled_call_impl = self._compiled
        return True

    def remove(self) -> None:
        for remover in self._removers:
            remover.remove()
        if self._compiled is not None and self._module._compiled_call_impl is self._compiled:
            del self._module._compiled_call_impl  # what the class says, None, holds again
            if self._compiled.was is not None:
                self._module._compiled_call_impl = self._compiled.was

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
        is_callers = isinstance(self._module._compiled_call_impl, _CompiledCall)
        self._handle.was_traced(not is_callers and self.stand_outside(), self._module)


class _CompiledCall:
    """A module's call with its mark around it. `was`: what stood in its place, None for a module not compiled."""

    def __init__(self, mark: _Mark, call: Callable[..., Any], was: Callable[..., Any] | None) -> None:
        self._mark = mark
        self.call = call
        self.was = was

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        self._mark.enter()
        output = None
        try:
            output = self.call(*args, **kwargs)
        finally:
            self._mark.leave(is_whole=output is not None)
        return output


class _RootMark(_Mark):
    def _call_to_wrap(self) -> Callable[..., Any] | None:
        if "_orig_mod" in self._module._modules:
            return None  # what torch.compile returns hands its attributes on to the module inside: there are only hooks
        return super()._call_to_wrap() or cast("Callable[..., Any]", self._module._call_impl)

    def enter(self) -> None:
        self._handle.enter_root()

    def leave(self, is_whole: bool) -> None:
        self._handle.leave_root(is_whole)


class _InnerMark(_Mark):
    """A region, a chosen module, or both."""

    def __init__(
        self, handle: "OffloadHandle", module: torch.nn.Module, region: str | None, choice: "Reason | bool"
    ) -> None:
        self._region = region
        self._choice = choice
        super().__init__(handle, module)

    def enter(self) -> None:
        session = self._handle.session()
        if session is None:
            self._handle.warn_if_root_is_bypassed()
            return
        desk = session.desk
        session.frames.append((desk.visit, desk.stays))
        if self._region is not None:
            desk.visit = desk.visit.scope.visit(self._region)
        if isinstance(self._choice, Reason):
            desk.stays = self._choice
        elif self._choice and desk.stays is not Reason.KEEP_LAST:
            desk.stays = None

    def leave(self, is_whole: bool) -> None:  # noqa: ARG002 (a region has nothing to conclude from it)
        session = self._handle.session()
        if session is not None and session.frames:
            session.desk.visit, session.desk.stays = session.frames.pop()


class OffloadHandle:
    """What `offload` returns: figures, and the way back.

    A module with a handle cannot be copied or pickled, for a copy would share streams and hooks with the original:
    copy it first, or `remove()` and apply `offload` again.
    """

    def __init__(self, module: torch.nn.Module, config: OffloadConfig, engines: Engines, scope: Scope) -> None:
        self._module = module
        self._config = config
        self._engines = engines
        self._scope = scope
        self._sessions = threading.local()
        self._was_entered = False
        self._marks: list[_Mark] = []
        self.regions = find_regions(module)
        """Module of each region, by name."""

    def stats(self) -> Stats:
        """Totals since `offload`."""
        return self._scope.ledger.read(self._engines)

    def report(self) -> str:
        """The figures of `stats` as a table."""
        return stats_text(self.stats())

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with an Event for whatever happens to parcels; what is returned ends it."""
        return self._scope.ledger.listeners.add(listener)

    def remove(self) -> None:
        """Undo `offload`. Graphs under way still run backward."""
        for mark in self._marks:
            mark.remove()
        self._marks.clear()
        if self._module.__dict__.get(_ATTRIBUTE) is self:
            delattr(self._module, _ATTRIBUTE)

    def session(self) -> _Session | None:
        stack = self._stack()
        return stack[-1] if stack else None

    def enter_root(self) -> None:
        self._was_entered = True
        if _is_inside_checkpoint() or _knobs.is_disabled():
            self._stack().append(None)
            return
        for mark in self._marks:
            mark.stand_outside()  # a block may have been compiled after `offload`
        self._scope.buffers = {b.untyped_storage()._cdata for b in self._module.buffers() if _has_storage(b)}
        desk = Desk(self._engines, self._scope.visit(""))
        desk.stays = Reason.OUTSIDE if self._config.include else None
        session = _Session(desk)
        session.hooks.__enter__()  # before it counts as entered: torch.func refuses hooks
        self._stack().append(session)

    def warn_if_root_is_bypassed(self) -> None:
        """A part of the model saves for backward, and the model itself was never called."""
        if self._was_entered or not torch.is_grad_enabled() or graph_task_id() != -1 or _knobs.is_disabled():
            return
        self._was_entered = True
        name = type(self._module).__name__
        warnings.warn(
            f"nothing moves while {name} is not called itself, and a part of it was: offload() covers model(...), not "
            "model.forward(...) or model.part(...). Call the model, apply offload() to the part, or use "
            "offload_activations() around the step",
            EbbtideWarning,
            stacklevel=2,
        )

    def leave_root(self, is_whole: bool) -> None:
        stack = self._stack()
        session = stack.pop() if stack else None
        if session is None:
            return
        session.hooks.__exit__()
        if is_whole and torch.is_grad_enabled():
            self._scope.ledger.warn_if_nothing_moved(f"offload({type(self._module).__name__})")

    def was_traced(self, stands_outside: bool, module: torch.nn.Module) -> None:
        """A compiler has inlined the hooks of `module`."""
        if module is self._module and not stands_outside and self.session() is None:
            warnings.warn(
                f"{type(module).__name__} was compiled as a whole with offloading inside, where it cannot work: apply "
                "ebbtide.offload to what torch.compile returns or, better, compile the blocks one by one "
                "(block.compile()): inside a single graph nothing can leave before forward ends",
                EbbtideWarning,
                stacklevel=2,
            )

    def install(self) -> None:
        """Put the marks in place. Raises ModuleError for names that mean nothing."""
        choices: dict[torch.nn.Module, Reason | bool] = dict.fromkeys(self.regions.values(), False)
        choices.update(dict.fromkeys(find_named(self._module, self._config.include, "include"), True))
        choices.update(dict.fromkeys(find_named(self._module, self._config.exclude, "exclude"), Reason.OUTSIDE))
        choices.update(dict.fromkeys(_last(self.regions, self._config.keep_last), Reason.KEEP_LAST))
        names = {block: name for name, block in self.regions.items()}
        root_choice = choices.pop(self._module, False)
        if root_choice:
            raise ModuleError(
                "include and exclude choose among the modules inside the one given to offload(), and a name here "
                f"means {type(self._module).__name__} itself: leave include out to move everything"
            )
        for module, choice in choices.items():
            self._marks.append(_InnerMark(self, module, names.get(module), choice))
        self._marks.append(_RootMark(self, self._module))
        setattr(self._module, _ATTRIBUTE, self)

    def _stack(self) -> list[_Session | None]:
        stack: list[_Session | None] | None = getattr(self._sessions, "stack", None)
        if stack is None:
            stack = self._sessions.stack = []
        return stack

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ModuleError("a module with offload() applied cannot be copied: copy it before, or handle.remove() first")

    def __reduce__(self) -> NoReturn:
        raise ModuleError(
            "a module with offload() applied cannot be pickled: save its state_dict(), or handle.remove() first"
        )


def offload(
    module: torch.nn.Module,
    *,
    mode: Mode = "all",
    include: Names | list[Names] | tuple[Names, ...] = (),
    exclude: Names | list[Names] | tuple[Names, ...] = (),
    keep_last: int = 0,
    store: str | StoreFactory | None = None,
    window: int | str = "512MiB",
    prefetch: int | str = "512MiB",
    min_bytes: int | str = "1MiB",
    host_limit: int | str | None = None,
) -> OffloadHandle:
    """Move what is saved in `module`'s forward out of device memory until backward needs it.

    Loss and gradients are those of the plain run, bit for bit; names and `state_dict` are unchanged::

        handle = ebbtide.offload(model, include=["layers.*.mlp"])
        ...  # train as before
        print(handle.report())
        handle.remove()

    Args:
        module: a model, before or after compile(), fully_shard, DDP or PEFT.
        mode: "all", or "off" for a handle that does nothing.
        include, exclude: names or patterns of modules inside ("layers.*.mlp") or module classes. With `include`, only
            what is saved inside these modules' forward travels; what is saved inside `exclude` stays. Of nested ones
            the innermost decides.
        keep_last: what the last so many blocks save stays: backward needs it at once.
        store: "host" (pinned memory), "disk" or "disk:/folder", "mock", or a function that makes a store for a
            device. Default: host for accelerators; disk where the model is on the CPU of a machine without one.
        window: most bytes on their way out whose device memory is not yet released; beyond it compute waits.
        prefetch: most bytes brought back before backward asks for them.
        min_bytes: saves of smaller storages stay where they are.
        host_limit: most host memory to take; what does not fit stays on the device, counted. Default: 80 % of free
            memory, divided among the processes of this host.

    Returns:
        A handle with `stats()`, `report()` and `remove()`.

    Raises:
        ConfigError: a setting that cannot be.
        ModuleError: the module is on the meta device, has a handle already (or has one inside), a name means nothing.
        DeviceError: the module is on a device without streams.
    """
    config = make_config(
        mode=mode,
        include=include,
        exclude=exclude,
        keep_last=keep_last,
        store=store,
        window=window,
        prefetch=prefetch,
        min_bytes=min_bytes,
        host_limit=host_limit,
    )
    _check_module(module, config)
    handle = OffloadHandle(module, config, PROCESS.engines(config), PROCESS.new_scope(config))
    if config.mode != "off":
        handle.install()
    return handle


def _check_module(module: torch.nn.Module, config: OffloadConfig) -> None:
    for fqn, inner in named_modules(module):
        if _ATTRIBUTE in inner.__dict__:
            raise ModuleError(
                f"offload() is already applied to {fqn or type(module).__name__!r}: keep the first handle, "
                "or call its remove() before applying it with other settings"
            )
    devices = {t.device for t in (*module.parameters(), *module.buffers())}
    if any(device.type == "meta" for device in devices):
        raise ModuleError(
            f"{type(module).__name__} is on the meta device: materialise it first, by to_empty() or loading weights"
        )
    if devices and not any(serves(config.store, device) for device in devices):
        for device in devices:
            device_for(device)  # raises DeviceError for one that ebbtide cannot serve at all
        raise ModuleError(
            f"store={config.store!r} frees nothing for {type(module).__name__} on {sorted(map(str, devices))}: for a "
            "model on the CPU write store='disk' or 'disk:/folder'"
        )


def _last(regions: dict[str, torch.nn.Module], count: int) -> list[torch.nn.Module]:
    if count > len(regions):
        raise ModuleError(
            f"keep_last={count}, but only {len(regions)} repeated blocks were found: "
            "write a smaller number, or name what should stay with exclude="
        )
    return list(regions.values())[len(regions) - count :]


def _has_storage(buffer: torch.Tensor) -> bool:
    return type(buffer) is torch.Tensor and buffer.layout is torch.strided


def _is_inside_checkpoint() -> bool:
    """The saves of a checkpointed call are its own hooks' business: it drops and recomputes them."""
    return innermost_pack_module() == "torch.utils.checkpoint"
