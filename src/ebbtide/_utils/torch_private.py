"""What ebbtide needs of torch that torch keeps behind underscores or leaves untyped: one line each, in one place.

All of it exists in torch 2.11 to 2.15.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Wrapper = TypeVar("Wrapper", bound=torch.Tensor)

_eval_frame = cast(Any, torch._C)._dynamo.eval_frame
_LEFT_ALONE = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Of the backward that runs in this thread; -1 outside of one."""

current_stream: Callable[[int], torch.Stream] = torch._C._accelerator_getStream
"""Of the accelerator with this index, in this thread. torch.accelerator.current_stream without parsing the index."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many TorchDispatchModes of the user are active."""

without_dispatch: Any = torch._C._DisableTorchDispatch
"""Context in which neither modes nor tensor subclasses see operations."""

cuda_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether the current CUDA stream records a graph; a build without CUDA has only the public function."""

storage_offset = cast("Callable[[torch.Tensor], int]", torch.Tensor.storage_offset)

neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view  # pyright: ignore[reportPrivateImportUsage]

_autograd = cast(Any, torch._C)._autograd

keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs in this thread was asked to retain the graph."""


_current_node = cast("Callable[[], Any]", torch._C._current_autograd_node)


def current_node_name() -> str:
    """Class of the autograd node that runs in this thread; "" outside of backward."""
    node = _current_node()
    return "" if node is None else type(node).__name__


def reads_random_slopes() -> bool:
    """Whether the autograd node that runs in this thread is rrelu's and reads the slopes that its forward drew.

    Without training the gradient is leaky_relu's, and the memory for slopes is saved but never read.
    """
    return current_node_name().startswith("RreluWithNoise") and _current_node()._saved_training


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` called when the backward that runs in this thread ends, on the stream that called it."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(callback)


def innermost_pack_module() -> str:
    """Module of the pack hook that is active now; "" if there is none."""
    top: Any = _autograd._top_saved_tensors_default_hooks(False)
    return "" if top is None else getattr(top[0], "__module__", "")


def is_inside_checkpoint() -> bool:
    """Whether saves are torch's checkpoint's: what runs is checkpointed, or runs again for it."""
    return innermost_pack_module() == "torch.utils.checkpoint"


def top_pack_hook() -> object:
    """The pack hook that is active now; None if there is none."""
    top: Any = _autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else top[0]


def top_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The pair of saved-tensor hooks that is active now; None if there is none."""
    return _autograd._top_saved_tensors_default_hooks(False)


def is_proxy_traced() -> bool:
    """Whether operations are being written down for a graph (make_fx, AOTAutograd) instead of only run."""
    return cast(Any, torch._C)._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def counting_versions() -> Any:
    """Context for code below autograd (in a dispatch mode): aliases made there share their version counter.

    Above autograd they do anyway.
    """
    return cast(Any, torch._C)._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def default_device() -> torch.device | None:
    """Of the `with torch.device(...)` that is active, or None."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def dispatch_mode_stack() -> list[Any]:
    """The TorchDispatchModes that are active, innermost last."""
    return cast("list[Any]", _get_current_dispatch_mode_stack())


def share_version_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an in-place change of one is seen on the other. Looked at by making one change and taking it back."""
    before = a._version
    with cast(Any, torch.autograd)._unsafe_preserve_version_counter(b):
        torch.autograd.graph.increment_version(b)
        return a._version != before


def is_called_from(function: Callable[..., Any]) -> bool:
    """Whether `function`, written in Python, is on the stack of this thread."""
    code = function.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def callers() -> Iterator[tuple[str, str]]:
    """Module and function of each frame written in Python on the stack of this thread, by name, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back


def store_of(group: "torch.distributed.ProcessGroup | None") -> Any:
    """The store that ranks of `group` (None: of the job) share; None for a kind of store that cannot count."""
    distributed: Any = torch.distributed
    store = distributed.distributed_c10d._world.pg_map.get(group or distributed.group.WORLD, (None, None))[1]
    base = store
    while isinstance(base, distributed.PrefixStore):
        base = base.underlying_store
    kinds = (distributed.TCPStore, distributed.FileStore, distributed.HashStore)
    return store if isinstance(base, kinds) else None


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that sees higher-order operators too, and leaves compiled code inside of it compiled.

    What it does with an operator is hidden from the compiler as hooks are: torch's own way takes as long as a small
    operator does, and imports torch._dynamo.
    """

    supports_higher_order_operators = True
    _autocast: tuple[int, tuple[str, ...]] = 0, ()
    """Where the mode was entered: how many autocasts stand around, and for which devices autocast is on."""

    def __enter__(self) -> Any:
        kinds = [kind for kind in _autocast_kinds() if torch.is_autocast_enabled(kind)]
        self._autocast = _autocasts_around() if kinds else 0, tuple(kinds)
        return super().__enter__()

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run `op` in the handler with the results of a run without a mode.

        torch excludes the dispatch keys of autocast in a handler. Some operators call operators that autocast casts
        (bilinear calls bmm, a custom operator calls anything) and would compute in another precision. Operators cast by
        autocast itself need nothing: autocast is excluded inside of them with or without a mode. A handler cannot ask
        for the state of an autocast that was entered behind the mode: the snapshot of a call's state ends the process
        where torch traces the function of a higher-order operator.
        """
        around, enabled = self._autocast
        if not enabled or _autocasts_around() != around:
            return op(*args, **kwargs)
        return _run_cast(op, args, kwargs, [kind for kind in _not_cast(op) if kind in enabled])

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in cls.__dict__:
            hidden_from_compiler(cast(Any, cls).__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def sizes_of(t: torch.Tensor) -> tuple[object, ...]:
    """The shape of `t`, or of each component if `t` is a strided nested tensor."""
    if t.is_nested and t.layout is torch.strided:
        return tuple(map(tuple, cast("list[list[int]]", t._nested_tensor_size().tolist())))
    return t.shape


def collectives_so_far() -> int | None:
    """How many collectives this rank has begun, in all process groups; 0 in a job of one rank, None if a group does not
    count."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return 0
    try:
        return sum(
            group._get_sequence_number_for_group() for group in cast(Any, distributed.distributed_c10d)._world.pg_map
        )
    except (RuntimeError, NotImplementedError):  # back ends without a count
        return None


def _run_cast(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kinds: Sequence[str]) -> Any:
    if not kinds:
        return op(*args, **kwargs)
    with cast(Any, torch._C)._SetExcludeDispatchKeyGuard(_autocast_key(kinds[0]), False):
        return _run_cast(op, args, kwargs, kinds[1:])


@functools.cache
def _not_cast(op: Any) -> Sequence[str]:
    """Kinds of devices whose autocast does not cast `op`, and casts operators that `op` calls.

    Of torch's own operators only bilinear's does so, by a sweep of torch's operator table under autocast on a CPU. All
    others are left alone: restored keys end the process where torch traces the function of a higher-order operator.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    caller = _BILINEAR.get(op.name(), op.name())
    if caller == op.name() and op.namespace in ("aten", "prims", "prim"):
        return ()
    casts = cast(Any, torch._C)._dispatch_has_kernel_for_dispatch_key
    return [
        kind for kind in _autocast_kinds() if not any(casts(name, _autocast_key(kind)) for name in (op.name(), caller))
    ]


_BILINEAR = {"aten::_trilinear": "aten::bilinear"}
"""The part of bilinear that a handler sees. Where autocast casts the whole, it is off inside."""


@functools.cache
def _autocast_kinds() -> Sequence[str]:
    """Kinds of devices that autocast knows, of this machine."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu", *([] if accelerator is None else [accelerator.type])]
    return [kind for kind in kinds if torch.amp.is_autocast_available(kind) and _autocast_key(kind) is not None]


def _autocasts_around() -> int:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


@functools.cache
def _autocast_key(kind: str) -> Any:
    """The dispatch key of autocast for `kind`; None if torch exposes no key."""
    name = "PrivateUse1" if kind == torch._C._get_privateuse1_backend_name() else kind.upper()
    return getattr(torch._C.DispatchKey, f"Autocast{name}", None)


def plain_tensors(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """`t` itself or, of a wrapper subclass, those in it: of a DTensor what this rank has of it."""
    if not is_traceable_wrapper_subclass(t):
        yield t
        return
    for name in t.__tensor_flatten__()[0]:
        part: object = getattr(t, name)
        if isinstance(part, torch.Tensor):
            yield from plain_tensors(part)


def wrapper_of(
    cls: "type[Wrapper]",
    size: torch.Size,
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> "Wrapper":
    """A tensor of the subclass `cls` that looks like this and has no memory."""
    return cast(Any, torch.Tensor)._make_wrapper_subclass(
        cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device
    )


def refuse_addresses(t: torch.Tensor) -> None:
    """Asked where its memory is, `t` raises from now on, and does not say 0."""
    cast(Any, torch._C)._set_throw_on_mutable_data_ptr(t)


def named_modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """`module` and all modules inside by name, each once, as the class of `module` says.

    A wrapper may keep data under the name of a method (Megatron's DDP has a list `buffers`), and a class may have its
    own walk (PEFT's attention restores weights first). So the class is asked, not the instance.
    """
    return cast(Any, type(module)).named_modules(module)


def parameters_of(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """All parameters of `module` and of the modules inside, each once."""
    return (cast(torch.nn.Parameter, p) for _, p in _named_tensors(module, "_parameters"))


def buffers_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All buffers of `module` and of the modules inside, each once."""
    return (buffer for _, buffer in named_buffers(module))


def named_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All buffers of `module` and of the modules inside by name, each once."""
    return _named_tensors(module, "_buffers")


def _named_tensors(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Module.parameters() calls named_parameters() of the instance, so data under that name would break the former."""
    seen: set[torch.Tensor] = set()
    for prefix, owner in named_modules(module):
        owned = cast("dict[str, torch.Tensor | None]", getattr(owner, kind))
        for name, t in owned.items():
            if t is not None and t not in seen:
                seen.add(t)
                yield f"{prefix}.{name}" if prefix else name, t


def named_children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules directly inside by name, as its class says."""
    return cast(Any, type(module)).named_children(module)


def modules_of(root: torch.nn.Module) -> list[torch.nn.Module]:
    """`root` and all modules inside of it, each once, as they are now: adapters and wrappers come and go.

    For code that runs at every forward: module.modules() takes thrice as long, with a generator for each level.
    """
    modules = [root]
    seen: set[torch.nn.Module | None] = {None, root}
    for module in modules:  # and those that are found meanwhile
        for child in module._modules.values():
            if child not in seen:
                seen.add(child)
                modules.append(cast(torch.nn.Module, child))
    return modules


def hidden_from_compiler(function: Function) -> Function:
    """`function`, which a compiler leaves alone wherever it runs, with all that it calls.

    What torch._dynamo.disable does, without the import, which takes a second, and without a wrapper: hooks are called
    for every save of a step. Compiled code that it calls stays compiled.
    """
    cast(Any, function)._torchdynamo_disable = True  # for one who traces a caller
    _eval_frame.set_code_exec_strategy(function.__code__, _LEFT_ALONE)  # for the frame itself
    return function


def has_compiled_code() -> bool:
    """Whether the compiler has made something in this process, and not been reset since."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    return convert_frame is not None and len(convert_frame.output_codes.seen) > 0


def constant_in_traces(function: Function) -> Function:
    """`function`, called by the compiler while it traces, its result put in its place.

    What torch._dynamo.assume_constant_result does, without the import.
    """
    cast(Any, function)._dynamo_marked_constant = True
    return function
