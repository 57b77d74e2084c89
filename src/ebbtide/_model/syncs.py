"""Synchronisations: code of the user in which the host waits for the device, by module and line (EBBTIDE_SYNCS=1).

Note [Synchronisations]
~~~~~~~~~~~~~~~~~~~~~~~
A waiting host queues neither kernels nor copies: copies no longer hide behind compute.
1. A dispatch mode sees every operator with its arguments, below the calling line, and times the wait. No GPU is needed:
   a model can be checked on a CPU. `torch.cuda.set_sync_debug_mode("warn")` knows CUDA alone, acts on all threads,
   passes through the user's filters of warnings, and tells of waits in backward at its end, without a line.
2. Backward takes the modes of the calling thread along, also to autograd's own threads. Hence the function that runs
   backwards is wrapped. Autograd numbers nodes as forward makes them, so the number of a node tells the forward and,
   of a node in C++ that selects by a mask, the line.
3. Operators of ebbtide are not counted: they are hidden from modes, or ebbtide is on the stack. Compiled code is left
   alone. A wait inside the kernel of an operator that `host_wait` does not know goes unseen.
4. Wrappers, and hooks on all modules of the process, are in place while a handle or an entered context needs them.
"""

import contextlib
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ebbtide._devices.accelerator import HOST_WAITS
from ebbtide._engine.stats import StatsRecorder, Sync
from ebbtide._model.hooks import HookOwner, RootHook
from ebbtide._model.session import Session
from ebbtide._recompute.ops import MASK, host_wait
from ebbtide._utils.torch_private import (
    RUN_BACKWARD,
    OperatorMode,
    current_node_name,
    current_node_number,
    dispatch_mode_stack,
    frames,
    graph_task_id,
    named_modules,
    next_node,
)

_MOST = 64  # forwards that wait for their backward; graphs that never run backward count as well


class SyncWatch:
    """Counts the synchronisations of a handle or a context.

    Args:
        root, session: the model, and the innermost session of the current thread; None for a context.
    """

    def __init__(
        self,
        recorder: StatsRecorder,
        root: torch.nn.Module | None = None,
        session: Callable[[], Session | None] = lambda: None,
    ) -> None:
        self.recorder = recorder
        self._root = root
        self._session = session
        self._names: dict[torch.nn.Module, str] = {}

    @contextlib.contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Around a forward."""
        if _watching_mode() is not None:  # a model that calls itself, or is called by another
            yield
            return
        modules, forward = _DETECTOR.running.modules, _Forward(self, next_node())
        depth = len(modules)
        self.recorder.stats.watched_forwards += 1
        with _DETECTOR, _SyncMode(forward):
            _DETECTOR.forwards.append(forward)
            try:
                yield
            finally:
                forward.end_node = next_node()
                del modules[depth:]  # KeyboardInterrupt skips the hooks of modules

    def module_name(self) -> str:
        """Name of the innermost running module, or of the region that recomputes."""
        modules = _DETECTOR.running.modules
        if self._root is None:
            return type(modules[-1]).__name__ if modules else ""
        if modules and modules[-1] not in self._names:
            self._names = {m: name or type(m).__name__ for name, m in named_modules(self._root)}
        session = self._session()
        region = "" if session is None else session.hooks.region_call.region
        return next((self._names[m] for m in reversed(modules) if m in self._names), region)


class SyncHook(RootHook):
    """A RootHook that watches every forward, and every backward until `remove`."""

    def __init__(self, owner: HookOwner, module: torch.nn.Module, watch: SyncWatch) -> None:
        super().__init__(owner, module)
        self._watch = watch
        _DETECTOR.__enter__()

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._watch.watching():
            return super().run(call, args, kwargs)

    def remove(self) -> None:
        super().remove()
        _DETECTOR.__exit__()


@dataclass(eq=False)
class _Forward:
    """A watched forward, and the numbers of its autograd nodes. Each thread numbers on its own.

    `masked`: nodes that select by a mask.
    """

    watch: SyncWatch
    first_node: int
    end_node: float = math.inf
    masked: dict[int, Sync] = field(default_factory=dict[int, Sync])


class _Running(threading.local):
    """Modules whose forward runs in a thread, innermost last."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []


class _Detector:
    """Hooks and wrappers of the process, in place while any user has entered."""

    def __init__(self) -> None:
        self.running = _Running()
        self.forwards: deque[_Forward] = deque(maxlen=_MOST)
        self._users = 0
        self._lock = threading.Lock()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._undo.callback(self.forwards.clear)
                self._undo.callback(register_module_forward_pre_hook(self._module_entered).remove)
                self._undo.callback(register_module_forward_hook(self._module_left, always_call=True).remove)
                self._replace(*RUN_BACKWARD, self._run_backward)
                for owner, name in HOST_WAITS:
                    self._replace(owner, name, functools.partial(self._wait, f"{owner.__name__}.{name}"))

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._undo.close()

    def note(self, kind: str, seconds: float, forward: _Forward | None) -> None:
        """The host has waited in the current line. `forward`: around the line; None in a backward."""
        line, is_backward, number = _line(), graph_task_id() != -1, current_node_number()
        if is_backward:
            made_in = (each for each in tuple(self.forwards) if each.first_node <= number < each.end_node)
            forward = next(made_in, forward)
        if line is None or forward is None:
            return
        if line:
            sync = Sync(kind, forward.watch.module_name(), line)
        else:
            sync = forward.masked.get(number, Sync(kind, "", current_node_name()))
        if kind == MASK and not is_backward:
            forward.masked[next_node() - 1] = sync  # autograd makes a node before the operator runs
        forward.watch.recorder.note_sync(sync._replace(kind=f"{kind} in backward") if is_backward else sync, seconds)

    def _module_entered(self, module: torch.nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.running.modules.append(module)

    def _module_left(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and self.running.modules[-1:] == [module]:
            self.running.modules.pop()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if torch.compiler.is_compiling() else function(original, *args, **kwargs)

        self._undo.callback(setattr, owner, name, original)
        setattr(owner, name, wrapper)

    def _run_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if _watching_mode() is not None else _SyncMode(None):
            return original(*args, **kwargs)

    def _wait(self, label: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mode = _watching_mode()
        began = time.perf_counter()
        result = original(*args, **kwargs)
        if mode is not None:
            self.note(label, time.perf_counter() - began, mode.forward)
        return result


_DETECTOR = _Detector()


class _SyncMode(OperatorMode):
    """Sees the operators of a forward, or of a backward in every thread that works on it; `forward` is None then."""

    def __init__(self, forward: _Forward | None) -> None:
        super().__init__()
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self._device_type = "cpu" if accelerator is None else accelerator.type
        self.forward = forward

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = host_wait(op, args, kwargs, self._device_type)
        began = time.perf_counter()
        out = self.run_op(op, args, kwargs)
        if kind:
            _DETECTOR.note(kind, time.perf_counter() - began, self.forward)
        return out


def _watching_mode() -> _SyncMode | None:
    return next((mode for mode in dispatch_mode_stack() if isinstance(mode, _SyncMode)), None)


def _line() -> str | None:
    """ "folder/file.py:12" of the innermost code that is neither ebbtide's nor torch's, modules of torch aside.

    "" in a node of autograd written in C++; None in ebbtide's own work.
    """
    is_ours = False
    for frame in frames():
        name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if name == __name__ and function == "_run_backward":  # the frames around have called backward
            break
        package = name.partition(".")[0]
        if name == __name__ or function == "__torch_dispatch__":  # a mode runs an operator of the frames around
            is_ours = False
        elif package == "ebbtide":
            is_ours = True
        elif package != "torch" or (name.startswith("torch.nn.modules.") and name != "torch.nn.modules.module"):
            return None if is_ours else f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"
    return None if is_ours else ""
