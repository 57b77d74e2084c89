"""The user's own torch.utils.checkpoint inside of a door. All that ebbtide knows of that file of torch is known here.

Note [A checkpoint inside of a door]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Saved-tensor hooks see a non-reentrant checkpoint's positional tensors and nothing else of it. What is in keywords,
containers, dataclasses and functools.partial it holds itself, and its selective mode runs again what a policy wants
offloaded. So from the first door on we stand in for the one function that keeps what a checkpoint retains:
`checkpoint` looks it up by name at each call, wherever a reference to `checkpoint` itself may have gone.
1. The forward is not touched: `checkpoint` calls the user's function with the user's arguments. Changed is what is
   retained, and with it what is called in backward.
2. An argument is replaced only if something in it travels; all others remain the very objects that were passed.
   What a region changes in place is by reference too, as in torch. Whatever is rebuilt is a snapshot of the call.
3. torch's selective modes stay in charge of everything but outputs whose policy is CPU_OFFLOAD. To torch those are
   calls to run again. Our mode outside of torch's takes them in forward; one inside of torch's hands them out when it
   comes to running them again. Where a policy offloads nothing, the second run is torch's alone.
4. All this only where the innermost hooks are ours, and never while a graph is traced; else calls are handed on.
5. From torch 2.14 on a checkpoint can hand outputs that a policy saves to the hooks around
   (respect_saved_tensors_hooks=True), and warns where a user has not chosen. torch calls hooks inside of operators,
   where aliases count no versions: so torch is always told False, and outputs that a user wants handed over go the way
   of CPU_OFFLOAD. Inside of another checkpoint, and in a region's second run, these stay.
"""

import contextlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._engine.parcel import Ticket
from ebbtide._errors import EbbtideWarning
from ebbtide._recompute.arguments import Arguments
from ebbtide._recompute.frame import Frame, Recomputation
from ebbtide._recompute.ops import returns_no_new_memory
from ebbtide._recompute.rng_autocast import rng_state, set_rng_state
from ebbtide._recompute.rng_ops import draws_on
from ebbtide._recompute.saved_outputs import OutputRecorder, ReplayOutputsMode, SavedOutputs, rng_after, rng_before
from ebbtide._utils.torch_private import (
    OperatorMode,
    dispatch_mode_stack,
    graph_task_id,
    is_proxy_traced,
    keeps_graph,
    top_hooks,
)

_BUNDLED = "_checkpoint_without_reentrant_generator_impl"
"""From torch 2.14 on: (fn, args, kwargs, *, options). Options of later releases are handed on."""
_SPREAD = "_checkpoint_without_reentrant_generator"
"""Before: (fn, options, *args, **kwargs)."""
_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
_RESPECTS = "respect_saved_tensors_hooks"
_MODE = "_CachingTorchDispatchMode"
_ENOUGH = "_StopRecomputationError"
# These have the function under its name too, once somebody has imported them.
_IMPORTERS = ("torch.distributed._composable.checkpoint_activation",)

_Contexts: TypeAlias = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
_Run: TypeAlias = Generator[None, None, None]
"""One checkpointed forward, as torch writes it: it runs between the generator's start and its end."""


# -- standing in -------------------------------------------------------------------------------------------------------


class _Adapter:
    """Stands in for torch's function while it is installed, once per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_settled = False
        self._name = ""
        self._original: Callable[..., _Run] | None = None
        self._options: frozenset[str] = frozenset()
        """Names of the options that the original knows."""
        self._stand_in: Callable[..., _Run] | None = None

    def install(self) -> None:
        """Called whenever a door is entered; does something the first time."""
        if self._is_settled:
            return
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
            name = _name_of_function()
            if name is None:
                _warn_of_unknown()
                return
            found = getattr(torch_checkpoint, name)
            if found is not self._stand_in:
                self._name, self._original = name, found
                self._options = frozenset(inspect.signature(found).parameters)
                self._stand_in = self._bundled if name == _BUNDLED else self._spread
                self._replace(found, self._stand_in)

    def undo(self) -> None:
        """As it was before any door. Checkpoints that ran inside of one still run backward."""
        with self._lock:
            self._is_settled = False
            if self._original is not None:
                self._replace(self._stand_in, self._original)

    def _bundled(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> _Run:
        return self._run(fn, args, kwargs, options)

    def _spread(
        self,
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Callable[[], _Contexts] = noop_context_fn,
        determinism_check: str = "default",
        debug: bool = False,
        early_stop: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> _Run:
        values = (preserve_rng_state, context_fn, determinism_check, debug, early_stop)
        return self._run(fn, args, kwargs, dict(zip(_OPTIONS, values, strict=True)))

    def _run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> _Run:
        if not self._is_settled or not torch.is_grad_enabled() or _is_traced():
            return self._call_original(fn, args, kwargs, options)
        place = _place_of(top_hooks())
        if place is None and _place_of(_hooks_of_user()) is None:
            return self._call_original(fn, args, kwargs, options)
        options = self._with_contexts(None if place is None else place.desk, options)
        if place is None:
            return self._call_original(fn, args, kwargs, options)
        rebound = _Rebound(place, fn, args, kwargs)
        if not rebound.is_needed:
            return self._call_original(fn, args, kwargs, options)
        return _closing(rebound, self._call_original(rebound, tuple(rebound.seen_by_torch(args)), {}, options))

    def _with_contexts(self, desk: SavedTensorHooks | None, options: dict[str, Any]) -> dict[str, Any]:
        """`options` for torch, which is to leave the hooks around alone: `desk` packs outputs, where there is one."""
        respects = bool(options.get(_RESPECTS))
        knows_hooks = _RESPECTS in self._options
        if knows_hooks:
            options = {**options, _RESPECTS: False}
        context_fn = options.get("context_fn", noop_context_fn)
        if context_fn is noop_context_fn or (desk is None and not knows_hooks):
            return options
        preserves_rng = options.get("preserve_rng_state", True)
        return {**options, "context_fn": _offloading(context_fn, desk, preserves_rng, respects)}

    def _call_original(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> _Run:
        assert self._original is not None
        if self._name == _BUNDLED:
            return self._original(fn, args, kwargs, **options)
        return self._original(fn, *(options[name] for name in _OPTIONS), *args, **kwargs)

    def _replace(self, old: object, new: object) -> None:
        for module in _modules():
            if getattr(module, self._name, None) is old:
                setattr(module, self._name, new)


_ADAPTER = _Adapter()
install = _ADAPTER.install
undo = _ADAPTER.undo


def _modules() -> list[ModuleType]:
    return [torch_checkpoint, *(sys.modules[name] for name in _IMPORTERS if name in sys.modules)]


def _name_of_function() -> str | None:
    """The function that `checkpoint` calls; None if torch's file is as in no release that this one was written for."""
    mode, enough = (getattr(torch_checkpoint, name, None) for name in (_MODE, _ENOUGH))
    if not inspect.isclass(mode) or not inspect.isclass(enough) or "policy_fn" not in _parameters(mode):
        return None
    bundled, spread = (_parameters(getattr(torch_checkpoint, name, None)) for name in (_BUNDLED, _SPREAD))
    if bundled[:3] == ("fn", "args", "kwargs") and {"preserve_rng_state", "context_fn"} <= set(bundled[3:]):
        return _BUNDLED
    return _SPREAD if not bundled and spread == ("fn", *_OPTIONS, "args", "kwargs") else None


def _parameters(function: object) -> tuple[str, ...]:
    """Their names; () if there are none to be seen."""
    if not callable(function):
        return ()
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # not written in Python
        return ()


def _warn_of_unknown() -> None:
    warnings.warn(
        f"this release of ebbtide does not know how torch {torch.__version__} keeps what a checkpoint retains: tensors "
        "passed to torch.utils.checkpoint by keyword or in containers stay on the device, operators whose policy is "
        "CPU_OFFLOAD run again, and everything else works",
        EbbtideWarning,
        stacklevel=4,
    )


class _Place(NamedTuple):
    """Where a checkpoint is, in terms of saved-tensor hooks.

    Attributes:
        pack, unpack: the innermost pair, which is ours.
        desk: where outputs may be packed; None in a region's second run, where nothing is worth keeping.
    """

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]
    desk: SavedTensorHooks | None


_Hooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def _place_of(hooks: _Hooks | None) -> _Place | None:
    """None unless the hooks are ours: the door's, or those of a region that runs again."""
    if hooks is None:
        return None
    pack, unpack = hooks
    owner = getattr(pack, "__self__", None)
    if isinstance(owner, SavedTensorHooks):
        return _Place(pack, unpack, owner)
    if isinstance(owner, Frame):
        return _Place(pack, unpack, owner.desk)
    return _Place(pack, unpack, None) if isinstance(owner, Recomputation) else None


def _hooks_of_user() -> _Hooks | None:
    """The innermost hooks that are not a checkpoint's own, to a torch that looks behind those."""
    return getattr(torch_checkpoint, "_current_user_saved_tensors_hooks", top_hooks)()


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or is_proxy_traced()


# -- inputs ------------------------------------------------------------------------------------------------------------


class _Rebound:
    """A checkpointed function with its arguments, as torch is to call it in backward: with its positional tensors.

    Those torch saves itself. All other tensors are packed here, by the hooks around.
    """

    def __init__(self, place: _Place, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._place = place
        self._keywords = tuple(kwargs)
        self._tensors = _Tensors(place)
        self._values = [
            _DIRECT if isinstance(value, torch.Tensor) and is_positional else self._retained(value)
            for value, is_positional in _labelled(fn, args, kwargs)
        ]

    @property
    def is_needed(self) -> bool:
        """Whether anything travels that torch would hold."""
        return any(isinstance(value, _Value) for value in self._values)

    def seen_by_torch(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The positional tensors; and, for torch to preserve their random numbers, something on all other devices."""
        direct = [value for value in args if isinstance(value, torch.Tensor)]
        known = {torch.device("cpu"), torch.device("meta"), *(t.device for t in direct)}
        return direct + [torch.empty(0, device=device) for device in self._tensors.devices if device not in known]

    def close(self) -> None:
        """The forward is over: from here on the hooks alone know where the tensors are."""
        self._tensors.close()

    def __call__(self, *direct: torch.Tensor) -> Any:
        tensors = self._tensors.read()
        positional = iter(direct)
        values = [
            next(positional) if value is _DIRECT else value.rebuild(tensors) if isinstance(value, _Value) else value
            for value in self._values
        ]
        del tensors
        count = len(values) - len(self._keywords)
        fn, args = cast("Callable[..., Any]", values[0]), values[1:count]
        kwargs = dict(zip(self._keywords, values[count:], strict=True))
        del values
        return fn(*args, **kwargs)

    def _retained(self, value: object) -> object:
        """`value` itself, if nothing in it travels."""
        arguments = Arguments((value,), {})
        numbers = [self._tensors.add(t) for t in arguments.take_tensors()]
        return _Value(arguments, numbers) if any(map(self._tensors.travels, numbers)) else value


_DIRECT = object()


def _labelled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[object, bool]]:
    """The function, the arguments and the keyword arguments, and which of them are passed by position."""
    return [(fn, False), *((value, True) for value in args), *((value, False) for value in kwargs.values())]


class _Value(NamedTuple):
    """An argument without its tensors, and their numbers."""

    arguments: Arguments
    numbers: list[int]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> object:
        (value,), _ = self.arguments.rebuild([tensors[number] for number in self.numbers])
        return value


class _Tensors:
    """The tensors of one call that torch does not show to hooks, packed."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self._limits = None if place.desk is None else place.desk.visit.limits
        self._entries: list[_Entry] = []
        self._numbers: dict[int, int] = {}
        self._versions: list[tuple[_Entry, int]] = []
        self.devices: dict[torch.device, None] = {}

    def add(self, t: torch.Tensor) -> int:
        """Its number; the same one for the same tensor."""
        number = self._numbers.setdefault(id(t), len(self._entries))
        if number == len(self._entries):
            self.devices[t.device] = None
            self._entries.append(self._pack(t))
        return number

    def travels(self, number: int) -> bool:
        return self._entries[number].travels

    def _pack(self, t: torch.Tensor) -> "_Entry":
        # By type alone, not by what the desk would say of this one: a region's second run must do the same again.
        if isinstance(t, torch.nn.Parameter) or t.is_inference():
            return _Entry(t)
        with torch.no_grad():
            packed = self._place.pack(t)
        entry = _Entry(t)
        if type(packed) is not tuple:  # the desk keeps it where it is: so may torch
            entry.packed = packed
            self._versions.append((entry, t._version))
        return entry

    def close(self) -> None:
        for entry, version in self._versions:
            t = entry.original
            assert t is not None
            if t._version != version:
                entry.packed = None  # changed in place by the region: torch hands out what it is then, and so do we
            else:
                entry.requires_grad = t.requires_grad
                entry.original = None
        self._versions.clear()
        self._numbers.clear()

    def read(self) -> list[torch.Tensor]:
        if self._place.desk is not None and self._limits is not None:
            packed = (entry.packed for entry in self._entries)
            tickets = [ticket for ticket in packed if type(ticket) is Ticket]
            self._place.desk.expect(tickets, self.devices, self._limits)
        return [entry.read(self._place.unpack) for entry in self._entries]


class _Entry:
    """A tensor of the call: itself if it stays, and while the forward runs, or as the hooks packed it."""

    __slots__ = ("original", "packed", "requires_grad")

    def __init__(self, original: torch.Tensor) -> None:
        self.original: torch.Tensor | None = original
        self.packed: Any = None
        self.requires_grad = False

    @property
    def travels(self) -> bool:
        return self.packed is not None

    def read(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        if self.original is not None:
            return self.original
        return unpack(self.packed).detach().requires_grad_(self.requires_grad)


def _closing(rebound: _Rebound, run: _Run) -> _Run:
    yield from run
    rebound.close()


# -- outputs -----------------------------------------------------------------------------------------------------------

_AWAY = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_NOT_ASKED = object()


def _offloading(
    context_fn: Callable[[], _Contexts], desk: SavedTensorHooks | None, preserves_rng: bool, moves_saved: bool
) -> Callable[[], _Contexts]:
    """The user's pair of contexts, and what policies in them want offloaded between the two."""

    def contexts() -> _Contexts:
        forward, second = context_fn()
        outputs = None if desk is None else _Outputs(desk, preserves_rng)
        return _Forward(forward, outputs, moves_saved), second if outputs is None else _Second(second, outputs)

    return contexts


class _Outputs:
    """What one checkpointed forward sends away of its operators' outputs."""

    def __init__(self, desk: SavedTensorHooks, preserves_rng: bool) -> None:
        self.desk = desk
        self.limits = desk.visit.limits
        self.preserves_rng = preserves_rng
        self.held: SavedOutputs | None = None
        """None while no policy has asked for any."""
        self.was_served = False


class _Forward:
    """The user's context around the forward, and our mode outside of the selective one that it enters, if it does.

    Args:
        outputs: None where none can be packed.
        moves_saved: whether outputs that a policy saves are packed too.
    """

    def __init__(
        self, context: contextlib.AbstractContextManager[Any], outputs: _Outputs | None, moves_saved: bool
    ) -> None:
        self._context = context
        self._outputs = outputs
        self._moves_saved = moves_saved
        self._mode: _PolicyHolding | None = None

    def __enter__(self) -> Any:
        selective: Any = getattr(torch_checkpoint, _MODE)
        depth = len(dispatch_mode_stack())
        entered = self._context.__enter__()
        modes = dispatch_mode_stack()[depth:]
        for mode in modes:
            if isinstance(mode, selective) and hasattr(mode, _RESPECTS):
                setattr(mode, _RESPECTS, False)  # torch tells only those that it is given bare
        # The innermost and of this very class: calls then come to it, and on from it, one by one and as they are.
        if self._outputs is not None and modes and type(modes[-1]) is selective:
            self._mode = _PolicyHolding(modes[-1], self._outputs, self._moves_saved)
            self._mode.__enter__()
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)
            self._mode.close(is_whole=error is None)
        return self._context.__exit__(kind, error, trace)


class _PolicyHolding(OperatorMode):
    """Asks what the policy of a selective mode has said of each call, and packs the outputs that it wants offloaded.

    Depending on its version, torch asks before the call or after it, so this stands outside of torch's mode and looks
    when the call has returned.
    """

    def __init__(self, selective: Any, outputs: _Outputs, moves_saved: bool) -> None:
        super().__init__()
        self._selective = selective
        self._policy = selective.policy_fn
        self._moves_saved = moves_saved
        self._answer: object = _NOT_ASKED
        self._outputs = outputs
        self._intake = OutputRecorder(outputs.desk, compares=True)
        selective.policy_fn = self._ask

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._answer = _NOT_ASKED
        before = rng_before(op, args, kwargs) if self._outputs.preserves_rng else None
        try:
            out = op(*args, **kwargs)
        finally:
            answer = self._answer
            recomputes = not (answer is _NOT_ASKED or _is_saved(op, answer))
            if recomputes:
                self._intake.count(op)  # torch will let this call through in the second run
        if recomputes and answer in _AWAY and not returns_no_new_memory(op):
            self._outputs.held = self._intake.held
            self._intake.take(op, args, out, self._outputs.desk.stays, rng_after(before))
        self._intake.follow(op, args, out)
        return out

    def close(self, is_whole: bool) -> None:
        """The forward is over, or has raised."""
        self._selective.policy_fn = self._policy
        self._intake.close(is_whole)
        self._intake.held.drop_modified()

    def _ask(self, context: Any, op: Any, /, *args: Any, **kwargs: Any) -> Any:
        answer = self._policy(context, op, *args, **kwargs)
        is_moved = self._moves_saved and (answer is True or answer in _SAVED)
        # An output that changes in place runs again: random numbers that nobody restores would be others.
        if is_moved and (self._outputs.preserves_rng or draws_on(op, args, kwargs) is None):
            answer = CheckpointPolicy.MUST_CPU_OFFLOAD
        self._answer = answer
        return answer


def _is_saved(op: Any, answer: object) -> bool:
    """Whether torch saves the output itself: the policy says so, or `op` has an effect (torch 2.15), as a second call
    would have it again."""
    if answer is True or answer in _SAVED:
        return True
    is_effect: Callable[[Any], bool] | None = getattr(torch_checkpoint, "_is_cacheable_effect", None)
    return is_effect is not None and answer is not CheckpointPolicy.MUST_RECOMPUTE and is_effect(op)


class _Second:
    """The user's context around the second run, and inside of its modes what hands out outputs that were away."""

    def __init__(self, context: contextlib.AbstractContextManager[Any], outputs: _Outputs) -> None:
        self._context = context
        self._outputs = outputs
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as stack:
            if self._outputs.held is not None:
                stack.enter_context(_served(self._outputs, self._outputs.held))
            entered = stack.enter_context(self._context)
            self._entered.append(stack.pop_all())
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)


@contextlib.contextmanager
def _served(outputs: _Outputs, held: SavedOutputs) -> Generator[None, None, None]:
    outputs.desk.expect(held.tickets(), held.devices, outputs.limits)
    states = [(device, rng_state(device)) for device in held.devices_drawn_on()]
    is_whole = False
    try:
        with ReplayOutputsMode(held, outputs.desk):
            yield
        is_whole = True
    except getattr(torch_checkpoint, _ENOUGH):
        is_whole = True
        raise
    finally:
        for device, state in states:  # torch restores those that it knows of; we may have set others
            set_rng_state(device, state)
        if is_whole and not outputs.was_served and graph_task_id() != -1 and not keeps_graph():
            held.learn_unasked()
        outputs.was_served = True
