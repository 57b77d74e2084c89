"""Private and untyped functions of torch that ebbtide calls, all in one file. Tested with torch 2.11 to 2.15."""

import contextlib
import contextvars
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

Function = TypeVar("Function", bound=Callable[..., Any])
Wrapper = TypeVar("Wrapper", bound=torch.Tensor)

_C = cast(Any, torch._C)
_autograd = _C._autograd
_eval_frame = _C._dynamo.eval_frame
_SKIP, _DEFAULT = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the backward running in this thread; -1 outside of backward."""

current_stream: Callable[[int], torch.Stream] = torch._C._accelerator_getStream
"""torch.accelerator.current_stream(index) without the cost of parsing the index."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Number of active TorchDispatchModes of the user."""

dispatch_mode_stack = cast("Callable[[], list[Any]]", _get_current_dispatch_mode_stack)
"""The active TorchDispatchModes, innermost last."""

without_dispatch: Any = torch._C._DisableTorchDispatch
"""Context that hides operations from dispatch modes and tensor subclasses."""

cuda_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether the current CUDA stream records a graph. A build without CUDA has only the public function."""

allocator_is_ready: Callable[[], bool] = torch._C._accelerator_isAllocatorInitialized
"""Whether the accelerator's allocator has statistics."""

device_stats: Callable[[int], dict[str, Any]] = torch._C._accelerator_getDeviceStats
"""Statistics of an accelerator's allocator, nested. The public function sorts hundreds of names at each call."""

storage_offset = cast("Callable[[torch.Tensor], int]", torch.Tensor.storage_offset)

forbid_data_ptr: Callable[[torch.Tensor], None] = _C._set_throw_on_mutable_data_ptr
"""Make `data_ptr()` of a tensor raise instead of returning 0."""

neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view  # pyright: ignore[reportPrivateImportUsage]

keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
"""Whether the backward running in this thread retains the graph."""

next_node: Callable[[], int] = _autograd._get_sequence_nr
"""Sequence number of the node that autograd makes next in this thread."""

_current_node = cast("Callable[[], Any]", torch._C._current_autograd_node)


def current_node_name() -> str:
    """Return the class name of the autograd node running in this thread; "" outside of backward."""
    node = _current_node()
    return "" if node is None else type(node).__name__


def current_node_number() -> int:
    """Return the sequence number of the autograd node running in this thread; -1 outside of backward."""
    node = _current_node()
    return -1 if node is None else node._sequence_nr()


RUN_BACKWARD: tuple[Any, str] = (torch.autograd, "_engine_run_backward")
"""Owner and name of the function that runs every backward called from Python."""


def is_in_custom_function() -> bool:
    """Whether the autograd node running in this thread may read a saved tensor more than once: `ctx.saved_tensors`
    reads all of them each time. Nodes of operators read each saved tensor once."""
    node = _current_node()
    return node is None or isinstance(node, torch._C._FunctionBase)


def saved_by(node: Any, attribute: str) -> tuple[Any, Callable[[Any], torch.Tensor] | None]:
    """Return what autograd holds for a tensor saved by `node`, and the unpack hook of the tensor.

    The tensor itself without a hook, otherwise the pack hook's result; None without a tensor, or after its release.

    Args:
        attribute: "_raw_saved_" and the name of the tensor.
    """
    saved = getattr(node, attribute)
    return saved.data, saved.unpack_hook


def output_of(node: Any, number: int = 0) -> Any:
    """Return `dtype`, `device` and `shape` of output `number` of `node`."""
    return node._input_metadata[number]  # of the gradient that the node receives


def reads_random_slopes() -> bool:
    """Whether the autograd node running in this thread is rrelu's and reads random slopes drawn in forward.

    In evaluation mode rrelu has the gradient of leaky_relu: the tensor of slopes is saved but never read.
    """
    return current_node_name().startswith("RreluWithNoise") and _current_node()._saved_training


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward running in this thread, on the stream that called backward."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(callback)


def is_inside_checkpoint() -> bool:
    """Whether torch's checkpoint packs saved tensors now: in a checkpointed forward or a recomputation."""
    return getattr(top_pack_hook(), "__module__", "") == "torch.utils.checkpoint"


def top_pack_hook() -> object:
    """Return the active pack hook or None."""
    top: Any = _autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else top[0]


def top_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """Return the active pair of saved-tensor hooks (pack, unpack) or None."""
    return _autograd._top_saved_tensors_default_hooks(False)


def push_below(pair: torch.autograd.graph.saved_tensors_hooks) -> None:
    """Push a pair of saved-tensor hooks below all active pairs."""
    above: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = []
    while (top := top_hooks()) is not None:
        above.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    pair.__enter__()
    for pack, unpack in reversed(above):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)


def is_proxy_traced() -> bool:
    """Whether make_fx or AOTAutograd traces operations into a graph."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None


def sharing_versions() -> Any:
    """Context for code below autograd (in a dispatch mode): aliases share the version counter of their base.

    Above autograd, aliases always share the version counter.
    """
    return _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False)


def default_device() -> torch.device | None:
    """Return the device of the active `with torch.device(...)` or None."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def share_version_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an in-place change of `b` increments the version of `a`, tried with a change that is undone."""
    before = a._version
    with cast(Any, torch.autograd)._unsafe_preserve_version_counter(b):
        torch.autograd.graph.increment_version(b)
        return a._version != before


def is_called_from(function: Callable[..., Any]) -> bool:
    """Whether the Python function `function` is on the stack of this thread."""
    return any(frame.f_code is function.__code__ for frame in frames())


def callers() -> Iterator[tuple[str, str]]:
    """Iterate over the names of module and function of each Python frame of this thread, innermost first."""
    return ((frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames())


def frames() -> Iterator[FrameType]:
    """Iterate over the Python frames of this thread, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def store_of(group: "torch.distributed.ProcessGroup | None") -> Any:
    """Return the key-value store shared by the ranks of `group` (None: all ranks); None if the store cannot count."""
    distributed: Any = torch.distributed
    store = distributed.distributed_c10d._world.pg_map.get(group or distributed.group.WORLD, (None, None))[1]
    base = store
    while isinstance(base, distributed.PrefixStore):
        base = base.underlying_store
    kinds = (distributed.TCPStore, distributed.FileStore, distributed.HashStore)
    return store if isinstance(base, kinds) else None


def collective_device(group: "torch.distributed.ProcessGroup | None") -> torch.device:
    """Return the device of tensors for a collective of `group`: the CPU if the group can reduce there."""
    distributed: Any = torch.distributed.distributed_c10d
    return torch.device(distributed._get_object_coll_device(group))


class OperatorMode(TorchDispatchMode):
    """Dispatch mode that handles higher-order operators and leaves compiled code inside of the mode compiled.

    `hidden_from_compiler` hides the handler. torch's own decorator costs as much as a small operator and imports
    torch._dynamo.
    """

    supports_higher_order_operators = True
    _autocast: tuple[int, tuple[str, ...]] = 0, ()
    """State of autocast at the entry of the mode: nesting depth and device types with autocast enabled."""

    def __enter__(self) -> Any:
        kinds = [kind for kind in _autocast_kinds() if torch.is_autocast_enabled(kind)]
        self._autocast = _autocast_depth() if kinds else 0, tuple(kinds)
        return super().__enter__()

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run `op` in the handler with the result of a run without a mode.

        torch excludes the dispatch keys of autocast in a handler. Operators that call operators cast by autocast
        (bilinear calls bmm, a custom operator calls anything) would compute in another precision. Operators cast by
        autocast need no care: autocast is excluded inside of each, with or without a mode.

        The state of an autocast entered inside of the mode stays unknown: reading the state of a call ends the process
        while torch traces the function of a higher-order operator.
        """
        depth, enabled = self._autocast
        if not enabled or _autocast_depth() != depth:
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
    """Return the shape of `t`, or the shape of each component of a strided nested tensor."""
    if t.is_nested and t.layout is torch.strided:
        return tuple(map(tuple, cast("list[list[int]]", t._nested_tensor_size().tolist())))
    return t.shape


def collective_count() -> int | None:
    """Return the number of collectives started by this rank in all process groups.

    0 in a job of one rank. None if a group does not count.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return 0
    try:
        return sum(
            group._get_sequence_number_for_group() for group in cast(Any, distributed.distributed_c10d)._world.pg_map
        )
    except (RuntimeError, NotImplementedError):  # back ends without a counter
        return None


def _run_cast(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kinds: Sequence[str]) -> Any:
    if not kinds:
        return op(*args, **kwargs)
    with _C._SetExcludeDispatchKeyGuard(_autocast_key(kinds[0]), False):
        return _run_cast(op, args, kwargs, kinds[1:])


@functools.cache
def _not_cast(op: Any) -> Sequence[str]:
    """Return the device types whose autocast casts operators called by `op` but not `op`.

    Custom operators qualify. Of torch's own operators only bilinear does, by a sweep of the operator table under
    autocast on a CPU. No other operator may get restored keys: restored keys end the process while torch traces the
    function of a higher-order operator.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    caller = _BILINEAR.get(op.name(), op.name())
    if caller == op.name() and op.namespace in ("aten", "prims", "prim"):
        return ()
    casts = _C._dispatch_has_kernel_for_dispatch_key
    return [
        kind for kind in _autocast_kinds() if not any(casts(name, _autocast_key(kind)) for name in (op.name(), caller))
    ]


_BILINEAR = {"aten::_trilinear": "aten::bilinear"}
"""Operator seen by a handler -> operator called by the user. If autocast casts the latter, autocast is off inside."""


@functools.cache
def _autocast_kinds() -> Sequence[str]:
    """Return the device types of the machine with support for autocast."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu", *([] if accelerator is None else [accelerator.type])]
    return [kind for kind in kinds if torch.amp.is_autocast_available(kind) and _autocast_key(kind) is not None]


def casts_arguments() -> bool:
    """Whether autocast is on for any device type."""
    return any(map(torch.is_autocast_enabled, _autocast_kinds()))


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """Context in which no operator casts its arguments."""
    kinds = [kind for kind in _autocast_kinds() if torch.is_autocast_enabled(kind)]
    return _without_autocast(kinds) if kinds else contextlib.nullcontext()


@contextlib.contextmanager
def _without_autocast(kinds: Sequence[str]) -> Generator[None, None, None]:
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _autocast_depth() -> int:
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting


@functools.cache
def _autocast_key(kind: str) -> Any:
    """Return the dispatch key of autocast for `kind`; None if torch exposes no key."""
    name = "PrivateUse1" if kind == _C._get_privateuse1_backend_name() else kind.upper()
    return getattr(_C.DispatchKey, f"Autocast{name}", None)


def plain_tensors(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `t`, or the tensors inside of a wrapper subclass: the local shard of a DTensor."""
    if not is_traceable_wrapper_subclass(t):
        yield t
        return
    for name in t.__tensor_flatten__()[0]:
        part: object = getattr(t, name)
        if isinstance(part, torch.Tensor):
            yield from plain_tensors(part)


def nbytes_of(t: torch.Tensor) -> int:
    """Bytes of the elements of `t` on this rank."""
    if type(t) is torch.Tensor or type(t) is torch.nn.Parameter:
        try:
            return t.nbytes
        except RuntimeError:  # asking every tensor whether it is sparse takes longer
            return t.numel() * t.element_size()
    return sum(part.numel() * part.element_size() for part in plain_tensors(t))


def is_pending(t: torch.Tensor) -> bool:
    """Whether `t`, or a tensor inside of `t`, is the result of a collective that nobody has waited for yet."""
    if not is_traceable_wrapper_subclass(t):
        return False
    if type(t).__name__ == "AsyncCollectiveTensor":
        return not cast(Any, t).completed
    return any(
        is_pending(part) for name in t.__tensor_flatten__()[0] if isinstance(part := getattr(t, name), torch.Tensor)
    )


def wrapper_of(
    cls: "type[Wrapper]",
    size: torch.Size,
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> "Wrapper":
    """Return a tensor of the wrapper subclass `cls` with the given metadata and no memory."""
    return cast(Any, torch.Tensor)._make_wrapper_subclass(
        cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device
    )


def class_of(module: torch.nn.Module) -> type:
    """The user's class of `module`: `fully_shard` and `replicate` derive another from the user's and one of torch, and
    `torch.compile` puts the module into one of torch's."""
    cls = type(module._modules.get("_orig_mod") or module)
    is_made = cls.__module__.startswith("torch.distributed.") and cls.__name__.endswith(cls.__bases__[-1].__name__)
    return cls.__bases__[-1] if is_made else cls


def named_modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield name and module of `module` and all submodules, each once.

    The method is looked up on the class: an instance may have data under the name of a method (Megatron's DDP has a
    list `buffers`), and a class may override the method (PEFT's attention restores weights first).
    """
    return cast(Any, type(module)).named_modules(module)


def parameters_of(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of `module` and all submodules, each once."""
    return (cast(torch.nn.Parameter, p) for _, p in _named_tensors(module, "_parameters"))


def buffers_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers of `module` and all submodules, each once."""
    return (buffer for _, buffer in named_buffers(module))


def named_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and buffer of `module` and all submodules, each once."""
    return _named_tensors(module, "_buffers")


def _named_tensors(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    # Module.parameters() calls named_parameters() of the instance: an attribute of the name would break the call.
    seen: set[torch.Tensor] = set()
    for prefix, owner in named_modules(module):
        owned = cast("dict[str, torch.Tensor | None]", getattr(owner, kind))
        for name, t in owned.items():
            if t is not None and t not in seen:
                seen.add(t)
                yield f"{prefix}.{name}" if prefix else name, t


def named_children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield name and module of the direct children, by the method of the class."""
    return cast(Any, type(module)).named_children(module)


def modules_of(root: torch.nn.Module) -> list[torch.nn.Module]:
    """List `root` and all submodules, each once, at the time of the call: adapters and wrappers come and go.

    For code that runs at every forward: module.modules() takes three times as long, with a generator for each level.
    """
    modules = [root]
    seen: set[torch.nn.Module | None] = {None, root}
    for module in modules:  # grows in the loop
        if children := module._modules:  # most modules have none
            for child in children.values():
                if child not in seen:
                    seen.add(child)
                    modules.append(cast(torch.nn.Module, child))
    return modules


def hidden_from_compiler(function: Function) -> Function:
    """Keep the compiler from tracing `function` and all functions called by `function`.

    Like torch._dynamo.disable, but without importing torch._dynamo (a second) and without a wrapper: hooks are called
    for every saved tensor of a step. Compiled code called by `function` stays compiled.
    """
    cast(Any, function)._torchdynamo_disable = True  # read when a caller is traced
    return entered_in_python(function)


def entered_in_python(function: Function, callees: bool = True) -> Function:
    """Keep the compiler from starting a trace at `function`, or at functions called by `function` if `callees`. A trace
    of a caller takes `function` in."""
    strategy = _eval_frame._FrameExecStrategy(_SKIP, _SKIP if callees else _DEFAULT)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


@entered_in_python
def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the caller.

    While a thread compiles, `torch.compiler.is_compiling()` is true in all threads.
    """
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


set_frame_callback: Callable[[object], object] = _eval_frame.set_eval_frame
"""Set what compiles functions called in this thread, and return what did so before; None: nothing."""


class OuterCompiler:
    """The compiler around a call: `torch.compile(model)` calls the model and its hooks in Python, and compiles the
    functions called in between.

    Args:
        callback: as `set_frame_callback` returns it.
    """

    def __init__(self, callback: object) -> None:
        self._callback = callback

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, compiled with the settings of the user."""

        def call(*args: Any, **kwargs: Any) -> Any:
            former = set_frame_callback(self._callback)
            try:
                return function(*args, **kwargs)
            finally:
                set_frame_callback(former)

        return call

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OuterCompiler) and self._callback is other._callback

    def __hash__(self) -> int:
        return id(self._callback)

    @property
    def compiler_config(self) -> dict[str, Any] | None:
        """Settings of inductor; None for another backend."""
        backend: Any = cast(Any, torch)._dynamo.eval_frame.innermost_backend(self._callback)
        read = getattr(backend, "get_compiler_config", None)
        return None if read is None else read()


def has_compiled_code() -> bool:
    """Whether torch.compile has compiled code in this process since the last reset."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    return convert_frame is not None and len(convert_frame.output_codes.seen) > 0


def compiler_of(compiled: object) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return what compiles functions with the settings `compiled` was made with: backend, mode, options, dynamic=.

    Args:
        compiled: a module returned by torch.compile, or the compiled call of a module after `module.compile()`.

    Returns:
        None for anything else, or if this release of torch keeps the settings elsewhere.
    """
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    context: object = getattr(compiled, "dynamo_ctx", None)
    if inspect.isfunction(compiled) and "self" in compiled.__code__.co_freevars:
        cells = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)
        context = dict(cells)["self"].cell_contents
    is_known = eval_frame is not None and isinstance(context, eval_frame.OptimizeContext)
    return cast(Any, context) if is_known else None


def uses_cuda_graphs(compiler: object) -> bool:
    """Whether what `compiler_of` returns compiles into CUDA graphs: `mode="reduce-overhead"`, or the option."""
    config: object = getattr(compiler, "compiler_config", None)
    return isinstance(config, dict) and bool(cast("dict[str, Any]", config).get("triton.cudagraphs"))


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calls of `module` run hooks of its own."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


class _MemoryBudget:
    """torch's activation memory budget where all threads share the setting: the last compilation to end restores it.

    torch compiles in one thread at a time, and each compilation sets its own budget.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._former = 1.0

    def set(self, config: Any, value: float) -> None:
        with self._lock:
            if self._count == 0:
                self._former = config.activation_memory_budget
            self._count += 1
            config.activation_memory_budget = value

    def restore(self, config: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                config.activation_memory_budget = self._former


_shared_budget = _MemoryBudget()


def set_activation_memory_budget(value: float) -> Callable[[], None]:
    """Set the share of saved bytes that graphs compiled in this thread keep, and return what restores the former share.

    `torch.autograd.graph.region_activation_memory_budget` (2.13) changes no setting, but refuses graphs with operators
    outside of the context, such as those of hooks.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    if not _has_settings_by_thread(config):
        _shared_budget.set(config, value)
        return functools.partial(_shared_budget.restore, config)
    former, config.activation_memory_budget = config.activation_memory_budget, value
    return functools.partial(setattr, config, "activation_memory_budget", former)


def _has_settings_by_thread(config: Any) -> bool:
    """Whether a change of a setting holds for one thread: in torch 2.11 settings are of the process."""
    return isinstance(config._config["activation_memory_budget"].user_override, contextvars.ContextVar)


def compiled_backwards() -> int:
    """Return the number of backwards that compiled autograd has compiled, since the counters were cleared."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["compiled_autograd"]["captures"]


def graph_breaks() -> int:
    """Return the number of places at which torch.compile has split a function, since the counters were cleared."""
    return sum(cast(Any, torch)._dynamo.utils.counters["graph_break"].values())


def constant_in_traces(function: Function) -> Function:
    """Make the compiler call `function` while tracing and treat the result as a constant.

    Like torch._dynamo.assume_constant_result, but without importing torch._dynamo.
    """
    cast(Any, function)._dynamo_marked_constant = True
    return function


class PipelineAction(NamedTuple):
    """Forward ("F"), backward ("B"), or the half of a backward for inputs ("I") or weights ("W") of a microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def pipeline_stages(schedule: Any) -> list[Any]:
    """The stages of this rank in a schedule of torch.distributed.pipelining; empty for any other object."""
    return list(getattr(schedule, "_stages", None) or filter(None, [getattr(schedule, "_stage", None)]))


def pipeline_actions(schedule: Any) -> list[PipelineAction] | None:
    """What this rank computes in a step, in order; None if the class of the schedule does not tell.

    Schedules of one stage a rank keep no list, and the list that 1F1B makes numbers the last rank's forwards from 1.
    """
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    order = getattr(schedule, "pipeline_order_with_comms", None)
    if order is not None:
        outer = (each for each in order[schedule.rank] if each is not None)
        flat = (inner for each in outer for inner in each.sub_actions or (each,))
        kinds = {"F", "B", "I", "W"}
        actions = ((each.stage_index, each.computation_type.value, each.microbatch_index) for each in flat)
        return [PipelineAction(*each) for each in actions if each[1] in kinds]
    if type(schedule) not in (ScheduleGPipe, Schedule1F1B):
        return None
    stage, count = schedule._stage.stage_index, schedule._n_microbatches
    ahead = count if type(schedule) is ScheduleGPipe else min(count, schedule._num_stages - stage)
    turns = [[PipelineAction(stage, "F", k)] for k in range(ahead)]
    turns += [[PipelineAction(stage, "B", k), PipelineAction(stage, "F", k + ahead)] for k in range(count)]
    return [action for turn in turns for action in turn if action.microbatch < count]


def pipeline_tensors(stage: Any) -> dict[str, list[torch.Tensor]]:
    """Tensors that a stage itself holds: outputs, with arguments, until backward, and those received from others."""
    states = getattr(stage, "_forward_chunk_states", None)  # from 2.15 on
    chunks = stage.fwd_cache if states is None else [(s.live_outputs, s.input_values) for s in states.values()]
    received = [info for each in (stage.args_recv_info, stage.grad_recv_info) for info in tree_leaves(each)]
    held = {
        "outputs": [chunks, stage.output_chunks],
        "received": [getattr(r, "buffer", None) for r in received],
    }
    found = {name: [t for t in tree_leaves(each) if isinstance(t, torch.Tensor)] for name, each in held.items()}
    return {name: [part for t in each for part in plain_tensors(t)] for name, each in found.items()}


def is_pipeline_compute(computation_type: Any) -> bool:
    """Whether stages compute in actions of this type. Other actions gather or drop weights, send or receive."""
    return computation_type.value in {"F", "B", "I", "W", "OVERLAP_F_B"}


def replaces_pipeline_actions(schedule: Any) -> bool:
    """Whether the user has registered functions of their own for the computations of `schedule`."""
    return any(map(is_pipeline_compute, getattr(schedule, "_comp_type_to_function_map", ())))


def donates_buffers() -> bool:
    """Whether compiled backward may overwrite saved tensors. torch refuses to keep the graph of such a backward."""
    config: Any = sys.modules.get("torch._functorch.config")
    return config is not None and config.donated_buffer
