"""Recipes inside compiled graphs: the compiler's partitioner takes the place of a frame.

A selective recipe turns a compiled block into a checkpoint for the compiler to trace, with a policy for the outputs
that the graph has to save; those saved tensors reach our hooks like any other. A block with the recipe "recompute"
needs no checkpoint, because a frame stands outside of the compiled call, unless one graph holds several regions (a
model compiled as a whole).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.fx import traceback as tracing
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from ebbtide._errors import ModuleError
from ebbtide._plans import Recipe
from ebbtide._recompute.ops import ExpensiveOps

_checkpoint: Callable[..., Any] = cast(Any, torch_checkpoint).checkpoint
_selective_contexts: Callable[..., Any] = cast(Any, torch_checkpoint).create_selective_checkpoint_contexts

Modules = Mapping[str, frozenset[str]]
"""Pattern to ids of the matching modules, in the compiler's notation; see `compiler_id`."""


class CompiledRecipe:
    """The recipe of a region in traces. The compiler reads the attributes and guards on them.

    Attributes:
        action: of the recipe; "" without recomputation.
        context_fn: argument of torch's checkpoint for a selective recipe.
    """

    def __init__(self) -> None:
        self.action = ""
        self.context_fn: Callable[[], Any] | None = None

    def follow(self, recipe: Recipe | None, ops: ExpensiveOps | None, modules: Modules) -> None:
        """Trace with `recipe` from now on. Graphs compiled with another recipe are recompiled."""
        self.action = "" if recipe is None or not recipe.recomputes else recipe.action
        self.context_fn = None
        if recipe is not None and ops is not None:
            self.context_fn = functools.partial(_selective_contexts, _policy(ops, modules, recipe.sites is not None))

    def call(self, forward: Callable[..., Any], is_framed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `forward` in a trace. `is_framed`: a frame outside of the trace recomputes whole regions."""
        # With a frame outside, the trace reads nothing that differs between the other recipes: one graph serves all.
        if self.context_fn is None and (is_framed or self.action == ""):
            return forward(*args, **kwargs)
        if self.action == "recompute":
            return _checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return _checkpoint(forward, *args, use_reentrant=False, context_fn=self.context_fn, **kwargs)


def _policy(ops: ExpensiveOps, modules: Modules, has_sites: bool) -> Callable[..., CheckpointPolicy]:
    # A closure: the compiler guards a function by its code, but a callable object by identity, and would recompile.
    def policy(_context: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if has_sites:
            raise sites_error()
        is_expensive = ops.is_expensive(op, args, kwargs, _patterns_around(modules))
        return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _patterns_around(modules: Modules) -> set[str]:
    """Patterns of the modules that contain the operator being traced."""
    stack: Mapping[str, Any] = tracing.current_meta.get("nn_module_stack") or {}
    ids = {key.split("@")[0] for key in stack}
    return {pattern for pattern, matching in modules.items() if matching & ids}


def sites_error() -> ModuleError:
    return ModuleError(
        "sites= of a selective recipe numbers calls as they run, and this region is compiled: choose with ops="
    )


def compiler_id(module: torch.nn.Module) -> str:
    """The compiler's name of `module` in its stacks of modules."""
    return str(id(module))
