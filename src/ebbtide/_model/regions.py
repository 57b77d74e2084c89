"""Which modules of a model are regions, and which ones a name means. Pure: looks, changes nothing."""

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from ebbtide._config import Names
from ebbtide._errors import ModuleError, PlanError
from ebbtide._plans import Plan, Recipe, RecipeLike, as_recipe
from ebbtide._utils.torch_private import modules_of, named_children, named_modules

# What wrappers (DDP, FSDP, compile, checkpoint, Fabric) put into a name and users do not write.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


_LIST = torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict
_TOO_SMALL = torch.nn.Linear | torch.nn.Identity
_MODULES_OF_A_LAYER = 2  # a projection, a norm, or one with a wrapper around it


def clean_name(fqn: str) -> str:
    """The name without what wrappers add: "module.layers.0._orig_mod.mlp" -> "layers.0.mlp"."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def find_regions(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The blocks of the outermost lists of `root`, by name, in order; empty if it has none.

    A list counts if its blocks repeat. Where none does (a model with one layer, a stage of a pipeline with one block),
    a list of one block counts. A list inside of such a list is never called itself: its blocks are.
    """
    lists = _lists(root, "", _list_kind(root))
    return {clean_name(fqn): block for at, blocks in lists for fqn, block in _called_in(blocks, at)}


_IsList: TypeAlias = Callable[[str, torch.nn.Module], bool]
"""Whether a module, by its name in the model and itself, is a list of blocks."""


def _list_kind(root: torch.nn.Module) -> _IsList:
    """Experts inside of the only block repeat too, and are parts of the block: they count if no such block is there."""
    if any(not _is_of_experts(fqn) for fqn, _ in _lists(root, "", _is_repeated)):
        return _is_repeated
    return _is_single if any(_lists(root, "", _is_single)) else _is_repeated


def _lists(module: torch.nn.Module, fqn: str, is_list: _IsList) -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost ones, by name."""
    if is_list(fqn, module):
        yield fqn, module
        return
    for name, child in named_children(module):
        yield from _lists(child, _joined(fqn, name), is_list)


def _joined(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name


def _is_repeated(_fqn: str, module: torch.nn.Module) -> bool:
    """At least two blocks in a list or dict, or lists of them, most of one class."""
    if not isinstance(module, _LIST) or len(module) < 2:
        return False
    children = [child for _, child in named_children(module)]
    classes = Counter(map(type, children))
    most, count = classes.most_common(1)[0]
    if count < 2 or 2 * count <= len(module):
        return False
    blocks = Counter(type(block) for child in children if type(child) is most for _, block in called(child, ""))
    return bool(blocks) and not issubclass(blocks.most_common(1)[0][0], _TOO_SMALL)


def _is_single(fqn: str, module: torch.nn.Module) -> bool:
    """One block, a module of several others, in a list or dict, or in one inside of the list; no expert."""
    if not isinstance(module, _LIST) or len(module) != 1 or _is_of_experts(fqn):
        return False
    return any(len(modules_of(block)) > _MODULES_OF_A_LAYER for _, block in _called_in(module, ""))


def _is_of_experts(fqn: str) -> bool:
    """A list that a mixture of experts has: `experts`, `local_experts`, as all of them name it."""
    return "expert" in fqn.rpartition(".")[2].lower()


def called(module: torch.nn.Module, fqn: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """`module` itself or, if it has no forward and only holds others, those of them that forward enters."""
    if getattr(module.forward, "__func__", None) is torch.nn.Module.forward:
        yield from _called_in(module, fqn)
    else:
        yield fqn, module


def _called_in(module: torch.nn.Module, fqn: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in named_children(module):
        yield from called(child, _joined(fqn, name))


def find_norm(root: torch.nn.Module, blocks: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """The norm that forward most likely enters behind the last of `blocks`, by name; empty if there is no such one.

    Models register modules in about the order in which they call them: what is meant is the only norm behind the last
    repeated list ("layers", then "norm") or, if there is none, behind what holds that list ("encoder", then "norm").
    """
    norms = _norms_behind(root, "", _list_kind(root)) or []
    inside = {module for block in blocks.values() for module in modules_of(block)}
    if len(norms) != 1 or not inside.isdisjoint(modules_of(norms[0][1])):
        return {}
    return {clean_name(fqn): norm for fqn, norm in norms}


def _norms_behind(module: torch.nn.Module, fqn: str, is_list: _IsList) -> list[tuple[str, torch.nn.Module]] | None:
    """Those nearest behind the last list of blocks in `module`; None if there is no such list in it."""
    if is_list(fqn, module):
        return []
    behind: list[tuple[str, torch.nn.Module]] = []
    for name, child in reversed(list(named_children(module))):
        norms = _norms_behind(child, _joined(fqn, name), is_list)
        if norms is not None:
            return norms or behind
        if _is_norm(child):
            behind.append((_joined(fqn, name), child))
    return None


def _is_norm(module: torch.nn.Module) -> bool:
    """By its class or, as most models bring norms of their own, by the name of that."""
    is_known = isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm | torch.nn.GroupNorm)
    return is_known or "Norm" in type(module).__name__


def refuse_nested(regions: Mapping[str, torch.nn.Module]) -> None:
    """Raises PlanError if one of `regions` is inside of another: each would be measured with what is the other's."""
    names = {module: name for name, module in regions.items()}
    for name, module in regions.items():
        nested = next((names[inner] for inner in modules_of(module) if inner is not module and inner in names), None)
        if nested is not None:
            raise PlanError(
                f"region {nested!r} is inside of region {name!r}, and regions are planned one by one: let regions= "
                "name one of them"
            )


def find_named(root: torch.nn.Module, names: Sequence[Names], option: str) -> list[torch.nn.Module]:
    """All modules that one of `names` means. Raises ModuleError for a name that means none, with near names."""
    found: dict[torch.nn.Module, None] = {}
    for name in names:
        matches = list(_matches(root, name))
        if not matches:
            raise ModuleError(_no_match(root, name, option))
        found.update(dict.fromkeys(matches))
    return list(found)


def choose_recipes(
    root: torch.nn.Module,
    regions: Mapping[str, torch.nn.Module],
    given: RecipeLike | Mapping[Names, RecipeLike] | None,
) -> tuple[dict[str, Recipe], dict[str, torch.nn.Module]]:
    """The recipe of each region that gets one, and all regions: a name may mean a module that was none so far.

    Raises ConfigError for what is no recipe, ModuleError for names that mean nothing.
    """
    if given is None:
        return {}, dict(regions)
    if not isinstance(given, Mapping):
        if not regions:
            raise ModuleError(
                f"{type(root).__name__} has no repeated blocks to give recipe={given!r} to: name the modules that are "
                "to be regions, recipe={'encoder': 'recompute', ...}"
            )
        return dict.fromkeys(regions, as_recipe(given)), dict(regions)
    recipes: dict[str, Recipe] = {}
    all_regions = dict(regions)
    for pattern, like in given.items():
        modules = find_named(root, (pattern,), "recipe")
        if root in modules:
            raise ModuleError(
                f"recipe={{{pattern!r}: ...}} means {type(root).__name__} itself: regions are modules inside of it"
            )
        blocks = {name: block for name, block in regions.items() if block in modules}
        meant = blocks or {clean_name(fqn): module for fqn, module in named_modules(root) if module in modules}
        all_regions.update(meant)
        recipes.update(dict.fromkeys(meant, as_recipe(like)))
    return recipes, all_regions


def find_planned(
    root: torch.nn.Module, regions: Mapping[str, torch.nn.Module], plan: Plan
) -> dict[str, torch.nn.Module]:
    """The regions of `root`, and those that only the plan makes one. Raises ModuleError for one that is not there."""
    modules: dict[str, torch.nn.Module] = {}
    for fqn, module in named_modules(root):
        modules.setdefault(clean_name(fqn), module)  # of a wrapper and what it wraps, the wrapper, as with blocks
    if "" in plan.regions:
        raise ModuleError(
            f"the plan has a region '', which is {type(root).__name__} itself: regions are modules inside of it, and "
            "outside= says what is done with the rest"
        )
    for name in plan.regions:
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=5, cutoff=0.4) or [n for n in modules if n]
            raise ModuleError(
                f"the plan has a region {name!r} and {type(root).__name__} has no module of that name: it was made for "
                f"another model. Near names: {_some(near)}"
            )
    return dict(regions) | {name: modules[name] for name in plan.regions}


def _matches(root: torch.nn.Module, name: Names) -> Iterator[torch.nn.Module]:
    for fqn, module in named_modules(root):
        if isinstance(name, str):
            if _means(name, clean_name(fqn)) or _means(name, fqn):
                yield module
        elif isinstance(module, name):
            yield module


def _means(pattern: str, fqn: str) -> bool:
    """A pattern may leave out the front: "layers.*.mlp" means "model.layers.0.mlp" too.

    A star stays between two dots: "layers.*" means the blocks and not all that is inside them, or what is excluded
    inside a block would be included again, being the innermost match.
    """
    wanted = pattern.split(".")
    parts = fqn.split(".")[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _no_match(root: torch.nn.Module, name: Names, option: str) -> str:
    if not isinstance(name, str):
        classes = sorted({type(module).__name__ for module in modules_of(root)})
        return f"{option}={name.__name__}: {type(root).__name__} has no module of this class. It has {_some(classes)}"
    patterns = sorted({_pattern(clean_name(fqn)) for fqn, _ in named_modules(root) if fqn})
    near = difflib.get_close_matches(name, patterns, n=5, cutoff=0.4) or patterns
    return f"{option}={name!r} matches no module of {type(root).__name__}. Near names: {_some(near)}"


def _pattern(fqn: str) -> str:
    """The name with its numbers as wildcards, the way users write it."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:8])) + (", ..." if len(listed) > 8 else "")


def names_of(root: torch.nn.Module, modules: list[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """`modules` of `root` by name, in order."""
    return {clean_name(fqn): module for fqn, module in named_modules(root) if module in modules}
