"""Recipes inside of compiled graphs: the compiler's own partition does what a frame does elsewhere.

A selective recipe of a compiled block becomes a checkpoint that the compiler traces, with a policy that says which
outputs its graph has to save; what it saves then comes to the desk like any save. A block that runs again as a whole
needs none of this, since the frame stands outside of its compiled call. Only where one graph holds several regions (a
model compiled as a whole) it is traced as a checkpoint too.
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
"""By pattern: the ids of the modules it means, as the compiler writes them."""


class Traced:
    """How a region's forward is to be traced. The compiler reads these attributes and guards on them.

    Attributes:
        action: of the region's recipe, "" without one.
        context_fn: what torch's checkpoint is given for a selective one.
    """

    def __init__(self) -> None:
        self.action = ""
        self.context_fn: Callable[[], Any] | None = None

    def follow(self, recipe: Recipe | None, dear: ExpensiveOps | None, modules: Modules) -> None:
        """Trace by `recipe` from now on: graphs compiled for another one are compiled anew."""
        self.action = "" if recipe is None or not recipe.recomputes else recipe.action
        self.context_fn = None
        if recipe is not None and dear is not None:
            self.context_fn = functools.partial(_selective_contexts, _policy(dear, modules, recipe.sites is not None))

    def call(self, forward: Callable[..., Any], is_framed: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`forward`, while a compiler traces it. `is_framed`: what runs again as a whole does so from outside."""
        if self.action == "" or (is_framed and self.action == "recompute"):
            return forward(*args, **kwargs)
        if self.action == "recompute":
            return _checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return _checkpoint(forward, *args, use_reentrant=False, context_fn=self.context_fn, **kwargs)


def _policy(dear: ExpensiveOps, modules: Modules, has_sites: bool) -> Callable[..., CheckpointPolicy]:
    def policy(_context: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if has_sites:
            raise sites_refused()
        is_dear = dear.is_dear(op, args, kwargs, _inside(modules))
        return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _inside(modules: Modules) -> set[str]:
    """The patterns of those modules that the operator being traced belongs to."""
    stack: Mapping[str, Any] = tracing.current_meta.get("nn_module_stack") or {}
    ids = {key.split("@")[0] for key in stack}
    return {pattern for pattern, meant in modules.items() if meant & ids}


def sites_refused() -> ModuleError:
    return ModuleError(
        "sites= of a selective recipe numbers calls as they run, and this region is compiled: choose with ops="
    )


def compiler_id(module: torch.nn.Module) -> str:
    """What the compiler calls `module` in the stacks of modules it keeps."""
    return str(id(module))
