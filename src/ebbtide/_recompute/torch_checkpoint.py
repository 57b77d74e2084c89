"""torch.utils.checkpoint called by the user inside an entry point. The only file that knows torch's implementation.

Note [A user's checkpoint]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Saved-tensor hooks see the positional tensors of a non-reentrant checkpoint and nothing else. The checkpoint itself
holds tensors in keywords, containers, dataclasses and functools.partial, and its selective mode recomputes outputs that
a policy wants offloaded. The first entry point therefore replaces the one function that stores a checkpoint's state:
`checkpoint` looks the function up by name at each call, however `checkpoint` itself was imported.
1. The forward is not touched: `checkpoint` calls the user's function with the user's arguments. The replacement changes
   the stored state, and with it the calls of backward.
2. An argument is replaced only if tensors inside travel; an argument without remains the original object, and in-place
   changes of a region stay visible to the caller, as in torch. A rebuilt argument is a snapshot of the call.
3. torch's selective modes decide about everything but outputs with the policy CPU_OFFLOAD. For torch such a call is to
   be recomputed: our mode outside of torch's packs the output in forward, and a mode inside of torch's hands the output
   out in recomputation. Without such a policy the recomputation is torch's alone.
4. The replacement acts only if the innermost hooks are ours, and never in a trace; all other calls pass through.
5. From torch 2.14 on, a checkpoint can pass saved outputs to the hooks around (respect_saved_tensors_hooks=True), and
   warns users without a choice. torch calls the hooks inside operators, and aliases do not count versions inside. Hence
   torch always receives False, and a user's True is treated like CPU_OFFLOAD. Outputs inside another checkpoint, and in
   recomputation of a region, stay.
"""

import contextlib
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._engine.parcel import Ticket
from ebbtide._errors import EbbtideWarning
from ebbtide._recompute.arguments import Arguments
from ebbtide._recompute.frame import Frame, Recomputation
from ebbtide._recompute.ops import returns_no_new_memory, rng_device
from ebbtide._recompute.replay import ReplayOutputsMode
from ebbtide._recompute.rng_autocast import rng_state, set_rng_state
from ebbtide._recompute.saved_outputs import OutputRecorder, SavedOutputs, rng_after, rng_before
from ebbtide._utils.torch_private import (
    OperatorMode,
    dispatch_mode_stack,
    graph_task_id,
    is_proxy_traced,
    is_traced,
    keeps_graph,
    top_hooks,
)

_BUNDLED = "_checkpoint_without_reentrant_generator_impl"
"""From torch 2.14 on: (fn, args, kwargs, *, options). Unknown options of later releases pass through."""
_SPREAD = "_checkpoint_without_reentrant_generator"
"""Before: (fn, options, *args, **kwargs)."""
_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
_RESPECTS = "respect_saved_tensors_hooks"
_MODE = "_CachingTorchDispatchMode"
_EARLY_STOP = "_StopRecomputationError"
# Modules that import the function by name.
_IMPORTERS = ("torch.distributed._composable.checkpoint_activation",)

_Contexts: TypeAlias = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
_Run: TypeAlias = Generator[None, None, None]
"""One checkpointed forward, in torch's form: the forward runs between the generator's start and end."""


# -- the replaced function ---------------------------------------------------------------------------------------------


class _Adapter:
    """Replaces torch's function. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_installed = False
        self._name = ""
        self._original: Callable[..., _Run] | None = None
        self._options: frozenset[str] = frozenset()  # names of the original's options
        self._replacement: Callable[..., _Run] | None = None

    def install(self) -> None:
        """Replace torch's function at the first call; every entry point calls this method."""
        if self._is_installed:
            return
        with self._lock:
            if self._is_installed:
                return
            self._is_installed = True
            name = _name_of_function()
            if name is None:
                _warn_of_unknown()
                return
            found = getattr(torch_checkpoint, name)
            if found is not self._replacement:
                self._name, self._original = name, found
                self._options = frozenset(inspect.signature(found).parameters)
                self._replacement = self._bundled if name == _BUNDLED else self._spread
                self._replace(found, self._replacement)

    def undo(self) -> None:
        """Restore torch's function. Checkpoints of earlier forwards still run backward."""
        with self._lock:
            self._is_installed = False
            if self._original is not None:
                self._replace(self._replacement, self._original)

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
        if not self._is_installed or not torch.is_grad_enabled() or _is_traced():
            return self._call_original(fn, args, kwargs, options)
        ours = _ours(top_hooks())
        if ours is None and _ours(_hooks_of_user()) is None:
            return self._call_original(fn, args, kwargs, options)
        options = self._with_contexts(None if ours is None else ours.hooks, options)
        if ours is None:
            return self._call_original(fn, args, kwargs, options)
        packed = _PackedCall(ours, fn, args, kwargs)
        if not packed.is_needed:
            return self._call_original(fn, args, kwargs, options)
        return _closing(packed, self._call_original(packed, tuple(packed.seen_by_torch(args)), {}, options))

    def _with_contexts(self, hooks: SavedTensorHooks | None, options: dict[str, Any]) -> dict[str, Any]:
        """`options` that keep torch from calling the hooks around. `hooks` pack offloaded outputs, if given."""
        respects = bool(options.get(_RESPECTS))
        knows_hooks = _RESPECTS in self._options
        if knows_hooks:
            options = {**options, _RESPECTS: False}
        context_fn = options.get("context_fn", noop_context_fn)
        if context_fn is noop_context_fn or (hooks is None and not knows_hooks):
            return options
        preserves_rng = options.get("preserve_rng_state", True)
        return {**options, "context_fn": functools.partial(_contexts, context_fn, hooks, preserves_rng, respects)}

    def _call_original(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> _Run:
        assert self._original is not None
        if self._name == _BUNDLED:
            return self._original(fn, args, kwargs, **options)
        return self._original(fn, *(options[name] for name in _OPTIONS), *args, **kwargs)

    def _replace(self, old: object, new: object) -> None:
        for module in (torch_checkpoint, *(sys.modules[name] for name in _IMPORTERS if name in sys.modules)):
            if getattr(module, self._name, None) is old:
                setattr(module, self._name, new)


# One object per process, because torch's module is one: a second replacement would wrap the first.
_ADAPTER = _Adapter()
install = _ADAPTER.install
undo = _ADAPTER.undo


def _name_of_function() -> str | None:
    """The function that `checkpoint` calls; None for an unknown implementation."""
    mode, early_stop = (getattr(torch_checkpoint, name, None) for name in (_MODE, _EARLY_STOP))
    if not inspect.isclass(mode) or not inspect.isclass(early_stop) or "policy_fn" not in _parameters(mode):
        return None
    bundled, spread = (_parameters(getattr(torch_checkpoint, name, None)) for name in (_BUNDLED, _SPREAD))
    if bundled[:3] == ("fn", "args", "kwargs") and {"preserve_rng_state", "context_fn"} <= set(bundled[3:]):
        return _BUNDLED
    return _SPREAD if not bundled and spread == ("fn", *_OPTIONS, "args", "kwargs") else None


def _parameters(function: object) -> tuple[str, ...]:
    """Names of the parameters; () if unknown."""
    if not callable(function):
        return ()
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # not written in Python
        return ()


def _warn_of_unknown() -> None:
    warnings.warn(
        f"this release of ebbtide does not know the checkpoints of torch {torch.__version__}: tensors passed to "
        "torch.utils.checkpoint by keyword or in containers stay on the device, operators with the policy CPU_OFFLOAD "
        "are recomputed, and everything else works",
        EbbtideWarning,
        stacklevel=4,
    )


class _OurHooks(NamedTuple):
    """Our hooks around a checkpoint.

    Attributes:
        pack, unpack: the innermost pair.
        hooks: pack outputs; None in recomputation of a region, where every saved tensor is needed at once.
    """

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]
    hooks: SavedTensorHooks | None


_HookPair: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def _ours(pair: _HookPair | None) -> _OurHooks | None:
    """None unless an entry point or a region's recomputation owns the pair."""
    if pair is None:
        return None
    pack, unpack = pair
    owner = getattr(pack, "__self__", None)
    if isinstance(owner, SavedTensorHooks):
        return _OurHooks(pack, unpack, owner)
    if isinstance(owner, Frame):
        return _OurHooks(pack, unpack, owner.hooks)
    return _OurHooks(pack, unpack, None) if isinstance(owner, Recomputation) else None


def _hooks_of_user() -> _HookPair | None:
    """The innermost hooks besides those of torch's checkpoints, where torch tells them apart."""
    return getattr(torch_checkpoint, "_current_user_saved_tensors_hooks", top_hooks)()


def _is_traced() -> bool:
    return is_traced() or is_proxy_traced()


# -- inputs ------------------------------------------------------------------------------------------------------------


class _PackedCall:
    """A checkpointed function with packed arguments, for torch to call in backward with the positional tensors.

    torch saves the positional tensors itself. The hooks around pack all other tensors.
    """

    def __init__(self, ours: _OurHooks, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keywords = tuple(kwargs)
        self._tensors = _PackedTensors(ours)
        self._values = [
            self._packed(fn),
            *(_POSITIONAL if isinstance(value, torch.Tensor) else self._packed(value) for value in args),
            *map(self._packed, kwargs.values()),
        ]

    @property
    def is_needed(self) -> bool:
        """Whether any tensor travels that torch would hold."""
        return any(isinstance(value, _PackedArgument) for value in self._values)

    def seen_by_torch(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The positional tensors, and an empty tensor for each further device whose RNG state torch is to preserve."""
        positional = [value for value in args if isinstance(value, torch.Tensor)]
        known = {torch.device("cpu"), torch.device("meta"), *(t.device for t in positional)}
        return positional + [torch.empty(0, device=device) for device in self._tensors.devices if device not in known]

    def close(self) -> None:
        """End of the forward: only the hooks know the tensors from here on."""
        self._tensors.close()

    def __call__(self, *positional: torch.Tensor) -> Any:
        tensors = self._tensors.read()
        remaining = iter(positional)
        values = [
            next(remaining)
            if value is _POSITIONAL
            else value.rebuild(tensors)
            if isinstance(value, _PackedArgument)
            else value
            for value in self._values
        ]
        del tensors
        count = len(values) - len(self._keywords)
        fn, args = cast("Callable[..., Any]", values[0]), values[1:count]
        kwargs = dict(zip(self._keywords, values[count:], strict=True))
        del values
        return fn(*args, **kwargs)

    def _packed(self, value: object) -> object:
        """`value` itself unless tensors inside travel."""
        arguments = Arguments((value,), {})
        numbers = [self._tensors.add(t) for t in arguments.take_tensors()]
        return _PackedArgument(arguments, numbers) if any(map(self._tensors.travels, numbers)) else value


_POSITIONAL = object()


class _PackedArgument(NamedTuple):
    """An argument without tensors, and the tensors' numbers."""

    arguments: Arguments
    numbers: list[int]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> object:
        (value,), _ = self.arguments.rebuild([tensors[number] for number in self.numbers])
        return value


class _PackedTensors:
    """The tensors of one call that torch hides from hooks."""

    def __init__(self, ours: _OurHooks) -> None:
        self._ours = ours
        self._limits = None if ours.hooks is None else ours.hooks.region_call.limits
        self._tensors: list[_PackedTensor] = []
        self._numbers: dict[int, int] = {}
        self.devices: dict[torch.device, None] = {}

    def add(self, t: torch.Tensor) -> int:
        """The number of `t`, equal for equal objects."""
        number = self._numbers.setdefault(id(t), len(self._tensors))
        if number == len(self._tensors):
            self.devices[t.device] = None
            self._tensors.append(_PackedTensor(t, self._pack(t)))
        return number

    def travels(self, number: int) -> bool:
        return self._tensors[number].packed is not None

    def _pack(self, t: torch.Tensor) -> Any:
        # Decided by type alone, not by the hooks: recomputation of a region has to decide alike.
        if isinstance(t, torch.nn.Parameter) or t.is_inference():
            return None
        with torch.no_grad():
            packed = self._ours.pack(t)
        return None if type(packed) is tuple else packed  # a tuple is a kept tensor: torch may hold the original

    def close(self) -> None:
        for tensor in self._tensors:
            tensor.close()
        self._numbers.clear()

    def read(self) -> list[torch.Tensor]:
        if self._ours.hooks is not None and self._limits is not None:
            packed = (tensor.packed for tensor in self._tensors)
            tickets = [ticket for ticket in packed if type(ticket) is Ticket]
            self._ours.hooks.expect(tickets, self.devices, self._limits)
        return [tensor.read(self._ours.unpack) for tensor in self._tensors]


class _PackedTensor:
    """A tensor of the call: the original if kept, and until the forward ends; or as the hooks packed the tensor."""

    __slots__ = ("_original", "_requires_grad", "_version", "packed")

    def __init__(self, original: torch.Tensor, packed: Any) -> None:
        self._original: torch.Tensor | None = original
        self.packed = packed
        self._version = -1 if packed is None else original._version
        self._requires_grad = False

    def close(self) -> None:
        """End of the forward. Like torch, a tensor changed in place by the region is returned with the change."""
        t = self._original
        assert t is not None
        if self.packed is not None and t._version == self._version:
            self._requires_grad = t.requires_grad
            self._original = None
        else:
            self.packed = None

    def read(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        if self._original is not None:
            return self._original
        return unpack(self.packed).detach().requires_grad_(self._requires_grad)


def _closing(packed: _PackedCall, run: _Run) -> _Run:
    yield from run
    packed.close()


# -- outputs -----------------------------------------------------------------------------------------------------------

_OFFLOADED = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_NOT_CALLED = object()


def _contexts(
    context_fn: Callable[[], _Contexts], hooks: SavedTensorHooks | None, preserves_rng: bool, moves_saved: bool
) -> _Contexts:
    """The user's contexts of forward and recomputation, with offloaded outputs passed from the first to the second."""
    forward, recomputation = context_fn()
    outputs = None if hooks is None else _OffloadedOutputs(hooks, preserves_rng)
    recomputation = recomputation if outputs is None else _RecomputeContext(recomputation, outputs)
    return _forward_context(forward, outputs, moves_saved), recomputation


class _OffloadedOutputs:
    """Outputs of one checkpointed forward. `saved` is None until a policy offloads an output."""

    def __init__(self, hooks: SavedTensorHooks, preserves_rng: bool) -> None:
        self.hooks = hooks
        self.limits = hooks.region_call.limits
        self.preserves_rng = preserves_rng
        self.saved: SavedOutputs | None = None
        self.was_replayed = False


@contextlib.contextmanager
def _forward_context(
    context: contextlib.AbstractContextManager[Any], outputs: _OffloadedOutputs | None, moves_saved: bool
) -> Generator[Any, None, None]:
    """The user's `context` around the forward, and our mode outside of the selective mode that the context enters.

    With `moves_saved`, outputs that a policy saves are offloaded too.
    """
    selective: Any = getattr(torch_checkpoint, _MODE)
    depth = len(dispatch_mode_stack())
    with context as entered:
        modes = dispatch_mode_stack()[depth:]
        for mode in modes:
            if isinstance(mode, selective) and hasattr(mode, _RESPECTS):
                setattr(mode, _RESPECTS, False)  # torch sets the option only on modes that are passed bare
        # The innermost mode, and of exactly this class: the mode then receives every single call unchanged.
        if outputs is None or not modes or type(modes[-1]) is not selective:
            yield entered
            return
        mode, is_whole = _PolicyMode(modes[-1], outputs, moves_saved), False
        try:
            with mode:
                yield entered
            is_whole = True
        finally:
            mode.close(is_whole)


class _PolicyMode(OperatorMode):
    """Records the answers of a selective mode's policy, and packs the outputs that the policy offloads.

    torch asks the policy before or after a call, depending on the release. This mode stands outside of torch's, and
    reads the answer after the call.
    """

    def __init__(self, selective: Any, outputs: _OffloadedOutputs, moves_saved: bool) -> None:
        super().__init__()
        self._selective = selective
        self._policy = selective.policy_fn
        self._moves_saved = moves_saved
        self._answer: object = _NOT_CALLED
        self._outputs = outputs
        self._recorder = OutputRecorder(outputs.hooks, compares=True)
        selective.policy_fn = self._ask

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._answer = _NOT_CALLED
        before = rng_before(op, args, kwargs) if self._outputs.preserves_rng else None
        try:
            out = op(*args, **kwargs)
        finally:
            answer = self._answer
            recomputes = not (answer is _NOT_CALLED or _is_saved(op, answer))
            if recomputes:
                self._recorder.count(op)  # also a call that raises: torch runs such calls in recomputation
        if recomputes and answer in _OFFLOADED and not returns_no_new_memory(op):
            self._outputs.saved = self._recorder.outputs
            self._recorder.save(op, args, out, self._outputs.hooks.stays, rng_after(before))
        self._recorder.follow(op, args, out)
        return out

    def close(self, is_whole: bool) -> None:
        """The forward has ended or raised."""
        self._selective.policy_fn = self._policy
        self._recorder.close(is_whole)
        self._recorder.outputs.drop_modified()

    def _ask(self, context: Any, op: Any, /, *args: Any, **kwargs: Any) -> Any:
        answer = self._policy(context, op, *args, **kwargs)
        is_moved = self._moves_saved and (answer is True or answer in _SAVED)
        # An output changed in place is recomputed: without preserved RNG states the numbers would differ.
        if is_moved and (self._outputs.preserves_rng or rng_device(op, args, kwargs) is None):
            answer = CheckpointPolicy.MUST_CPU_OFFLOAD
        self._answer = answer
        return answer


def _is_saved(op: Any, answer: object) -> bool:
    """Whether torch saves the output: by the policy, or because `op` has an effect not to be repeated (torch 2.15)."""
    if answer is True or answer in _SAVED:
        return True
    is_effect: Callable[[Any], bool] | None = getattr(torch_checkpoint, "_is_cacheable_effect", None)
    return is_effect is not None and answer is not CheckpointPolicy.MUST_RECOMPUTE and is_effect(op)


class _RecomputeContext:
    """The user's context around the recomputation. A mode behind the context's modes hands out offloaded outputs."""

    def __init__(self, context: contextlib.AbstractContextManager[Any], outputs: _OffloadedOutputs) -> None:
        self._context = context
        self._outputs = outputs
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as stack:
            if self._outputs.saved is not None:
                stack.enter_context(_replayed(self._outputs, self._outputs.saved))
            entered = stack.enter_context(self._context)
            self._entered.append(stack.pop_all())
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)


@contextlib.contextmanager
def _replayed(outputs: _OffloadedOutputs, saved: SavedOutputs) -> Generator[None, None, None]:
    outputs.hooks.expect(saved.tickets(), saved.devices, outputs.limits)
    states = [(device, rng_state(device)) for device in saved.rng_devices()]
    is_whole = False
    try:
        with ReplayOutputsMode(saved, outputs.hooks):
            yield
        is_whole = True
    except getattr(torch_checkpoint, _EARLY_STOP):
        is_whole = True
        raise
    finally:
        for device, state in states:  # torch restores only the devices of its arguments
            set_rng_state(device, state)
        if is_whole and not outputs.was_replayed and graph_task_id() != -1 and not keeps_graph():
            saved.drop_unused()
        outputs.was_replayed = True
