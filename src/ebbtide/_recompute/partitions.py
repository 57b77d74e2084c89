"""Compiled regions at points of the curve of torch's partitioner.

Note [Partitions]
~~~~~~~~~~~~~~~~~
1. torch's partitioner decides what a compiled graph saves, and which operators the graph's backward repeats.
   `torch._functorch.config.activation_memory_budget` goes from 1, the fastest, to 0, where a graph saves its inputs.
2. A class of modules is compiled once for each budget of a recipe, by the user's own compiler: backend, mode, options,
   `dynamic=` and `fullgraph=` stay. Each function has a code object of its own, because torch keeps guards and counts
   recompilations by code object: no function uses up the recompilations of another, nor of the user's call.
3. As with `module.compile()`, the compiler takes the forward and leaves the hooks of the module to Python.
4. The budget is in force only while a function is traced and compiled. A call inside of the trace sets the budget, and
   the former budget returns at the end of the traced call. Guards ignore the setting; keys of torch's caches hold the
   setting.
"""

import functools
import threading
import time
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ebbtide._errors import ModuleError
from ebbtide._utils.logs import logger_of
from ebbtide._utils.torch_private import constant_in_traces, graph_breaks, is_traced, set_activation_memory_budget

_log = logger_of(__name__)

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles a function with the settings of the user."""


class Partitions:
    """The compiled functions of one model, by class and activation memory budget.

    Attributes:
        broken: classes with a forward that the compiler splits into several graphs. All parts but the first are
            shared with the user's own call, at the user's budget.
    """

    def __init__(self) -> None:
        self.broken: set[type] = set()
        self._functions: dict[tuple[type, float], _Partition] = {}

    def forward_at(self, budget: float, cls: type, compiler: Compiler) -> Callable[..., Any]:
        """A function of a module's forward and its arguments, compiled at `budget` by `compiler` when first called.

        Args:
            cls: class of the module.
        """
        found = self._functions.setdefault((cls, budget), _Partition(cls, budget, self.broken))
        return functools.partial(found.run, compiler(found.function))

    @property
    def compilations(self) -> int:
        """Number of calls so far that have compiled."""
        return sum(each.compilations for each in self._functions.values())

    @property
    def seconds(self) -> float:
        """Time of these calls."""
        return sum(each.seconds for each in self._functions.values())


class _Compilation(threading.local):
    """The running compilation of a thread. `restore` ends the budget; None without a compilation."""

    restore: Callable[[], None] | None = None
    began_s = 0.0
    breaks = 0


class _Partition:
    """The forward of a class of modules, compiled at one budget.

    Attributes:
        function: to be compiled; takes the forward of a module and its arguments.
        compilations, seconds: calls so far that have compiled, and their time.
    """

    def __init__(self, cls: type, budget: float, broken: set[type]) -> None:
        self._cls = cls
        self._broken = broken
        self._budget = budget
        self._current = _Compilation()
        self.compilations = 0
        self.seconds = 0.0
        self.function = self._new_function()

    def run(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `compiled`, the compiled `function`."""
        try:
            return compiled(*args, **kwargs)
        finally:
            if self._current.restore is not None:
                self._current.restore()
                self._current.restore = None
                self._note_compilation()

    def _new_function(self) -> Callable[..., Any]:
        @constant_in_traces
        def begin() -> None:  # no method: torch 2.11 takes no `self` for a constant
            current = self._current
            if current.restore is None:  # a trace may start over
                current.began_s, current.breaks = time.perf_counter(), graph_breaks()
                current.restore = set_activation_memory_budget(self._budget)

        def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_traced():
                begin()
            return forward(*args, **kwargs)

        code = call.__code__.replace(co_name=f"{self._cls.__name__}_at_{self._budget:g}")
        return types.FunctionType(code, call.__globals__, code.co_name, closure=call.__closure__)

    def _note_compilation(self) -> None:
        seconds = time.perf_counter() - self._current.began_s
        self.compilations += 1
        self.seconds += seconds
        self._note_breaks(graph_breaks() - self._current.breaks)
        again, name = " again" if self.compilations > 1 else "", self._cls.__name__
        _log.info("compiled %s%s at an activation memory budget of %g: %.1f s", name, again, self._budget, seconds)

    def _note_breaks(self, count: int) -> None:
        if count > 0 and self._cls not in self._broken:
            self._broken.add(self._cls)
            name = self._cls.__name__
            _log.info("%s is compiled into several graphs: no plan gives it an activation memory budget", name)


def not_compiled(region: str, is_compiled: bool, budget: float) -> ModuleError:
    """The error for a recipe with a budget whose region has no compiler."""
    found = f"the recipe of {region} has activation_memory_budget={budget:g}"
    if is_compiled:
        return ModuleError(
            f"{found}, and torch {torch.__version__} does not tell how the region was compiled: omit it, or set "
            "torch._functorch.config.activation_memory_budget before the first forward"
        )
    return ModuleError(f"{found}, and the region is not compiled: call its compile(), or omit it")


def within_whole(region: str, model: str, budget: float, whole: str) -> ModuleError:
    """The error for a recipe with a budget whose region is a part of a model compiled as a whole.

    Args:
        whole: name of the region that the model is.
    """
    return ModuleError(
        f"the recipe of {region} has activation_memory_budget={budget:g}, and {model} is compiled as a whole, into one "
        f"partition: give the recipe to the model, recipe={{{whole!r}: ...}}, or compile the blocks one by one "
        "(block.compile())"
    )


def in_cuda_graphs(region: str, budget: float) -> ModuleError:
    """The error for a recipe with a budget whose region is compiled into CUDA graphs: each budget would need memory
    pools and captures of its own."""
    return ModuleError(
        f"the recipe of {region} has activation_memory_budget={budget:g}, and the region is compiled into CUDA graphs "
        "(mode='reduce-overhead'): compile it with mode='max-autotune-no-cudagraphs', or omit the budget"
    )
