"""Finds the regions of a model, and the modules meant by names. Changes nothing."""

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

# Parts of names added by wrappers: DDP, FSDP, compile, checkpoint, Fabric. Users do not write them.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
WHOLE = "(the model)"
"""Name of the region that a model is when compiled as a whole: no module has a name with parentheses."""

_LIST = torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict
_NORM = torch.nn.LayerNorm | torch.nn.RMSNorm | torch.nn.GroupNorm
_MOSTLY = 0.7  # of the parameters of a stage are in blocks, or most of its memory is outside of regions and stays
_TOO_SMALL = torch.nn.Linear | torch.nn.Identity


def clean_name(fqn: str) -> str:
    """The name without the parts added by wrappers: "module.layers.0._orig_mod.mlp" -> "layers.0.mlp"."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def find_regions(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The blocks of the outermost lists of `root`, by name, in order; empty without a list.

    A list counts if the blocks repeat. In a model without repeating blocks (one layer, or a pipeline stage with one
    block) a list of one block counts. Forward never calls a list inside a list, only the blocks of the inner list.
    Blocks of different sizes are stages, as in a U-Net or a Swin transformer: each holds a share of the memory that no
    single recomputation should need, and the blocks of the lists inside are the regions.
    """
    lists = _lists(root, "", _list_kind(root))
    return {clean_name(fqn): block for name, blocks in lists for fqn, block in _blocks(blocks, name)}


def _blocks(blocks: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The blocks of a list; of a list of stages, the blocks of the lists in each stage with such a list."""
    found = list(_called_in(blocks, name))
    are_stages = len({_size(block) for _, block in found}) > 1
    for fqn, block in found:
        yield from _parts(block, fqn) if are_stages else ((fqn, block),)


def _parts(block: torch.nn.Module, fqn: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The blocks in a stage, or the stage itself. A block of a stage that repeats a smaller block is a stage too; the
    layers of a bottleneck repeat nothing. A stage is nearly nothing but blocks: heads or experts in a block are not."""
    lists = list(_lists(block, fqn, _is_of_blocks))
    inside = sum(_size(blocks) for _, blocks in lists)
    if not any(_is_repeated(*each) for each in lists) or inside < _MOSTLY * _size(block):
        yield fqn, block
        return
    for name, blocks in lists:
        for inner_fqn, inner in _called_in(blocks, name):
            is_stage = any(_are_equal(each) for _, each in _lists(inner, inner_fqn, _is_repeated))
            yield from _parts(inner, inner_fqn) if is_stage else ((inner_fqn, inner),)


def _are_equal(blocks: torch.nn.Module) -> bool:
    return len({_size(block) for _, block in _called_in(blocks, "")}) == 1


def _size(module: torch.nn.Module) -> int:
    return sum(0 if torch.nn.parameter.is_lazy(p) else p.numel() for p in module.parameters())


def _is_of_blocks(fqn: str, module: torch.nn.Module) -> bool:
    """Whether a list in a stage holds blocks, maybe one: not experts, and not the layers of a single block."""
    if not isinstance(module, _LIST) or _is_of_experts(fqn):
        return False
    blocks = [block for _, block in _called_in(module, fqn)]
    return bool(blocks) and all(len(modules_of(b)) > 1 and not isinstance(b, torch.nn.Sequential) for b in blocks)


_IsList: TypeAlias = Callable[[str, torch.nn.Module], bool]
"""Given a name and a module: whether the module is a list of blocks."""


def _list_kind(root: torch.nn.Module) -> _IsList:
    """Experts inside the only block of a model repeat too. The block is the region; without a block, experts are."""
    if any(not _is_of_experts(fqn) for fqn, _ in _lists(root, "", _is_repeated)):
        return _is_repeated
    return _is_single if any(_lists(root, "", _is_single)) else _is_repeated


def _lists(module: torch.nn.Module, fqn: str, is_list: _IsList) -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost lists, by name."""
    if is_list(fqn, module):
        yield fqn, module
        return
    for name, child in named_children(module):
        yield from _lists(child, _joined(fqn, name), is_list)


def _joined(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name


def _is_repeated(_fqn: str, module: torch.nn.Module) -> bool:
    """Whether the module is a list or dict of at least two blocks (or lists of blocks), most of one class."""
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
    """Whether the module is a list or dict with a single block of several modules, maybe nested; no expert."""
    if not isinstance(module, _LIST) or len(module) != 1 or _is_of_experts(fqn):
        return False
    # Up to 2 modules: a projection or a norm, bare or in a wrapper.
    return any(len(modules_of(block)) > 2 for _, block in _called_in(module, ""))


def _is_of_experts(fqn: str) -> bool:
    """Whether the name is that of a list in a mixture of experts: `experts`, `local_experts`."""
    return "expert" in fqn.rpartition(".")[2].lower()


def called(module: torch.nn.Module, fqn: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """`module` itself; of a container without a forward, the modules inside that forward calls."""
    if getattr(module.forward, "__func__", None) is torch.nn.Module.forward:
        yield from _called_in(module, fqn)
    else:
        yield fqn, module


def _called_in(module: torch.nn.Module, fqn: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in named_children(module):
        yield from called(child, _joined(fqn, name))


def find_norm(root: torch.nn.Module, blocks: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """The norm that forward most likely calls after the last of `blocks`, by name; empty if unclear.

    Models register modules in about the order of calls. The result is the only norm after the last repeated list
    ("layers", then "norm") or, without a norm beside the list, after the parent of the list ("encoder", then "norm").
    """
    norms = _norms_after(root, "", _list_kind(root)) or []
    inside = {module for block in blocks.values() for module in modules_of(block)}
    if len(norms) != 1 or not inside.isdisjoint(modules_of(norms[0][1])):
        return {}
    return {clean_name(fqn): norm for fqn, norm in norms}


def _norms_after(module: torch.nn.Module, fqn: str, is_list: _IsList) -> list[tuple[str, torch.nn.Module]] | None:
    """The norms nearest after the last list of blocks in `module`; None without a list of blocks."""
    if is_list(fqn, module):
        return []
    after: list[tuple[str, torch.nn.Module]] = []
    for name, child in reversed(list(named_children(module))):
        norms = _norms_after(child, _joined(fqn, name), is_list)
        if norms is not None:
            return norms or after
        # Most models bring norms of their own.
        if isinstance(child, _NORM) or "Norm" in type(child).__name__:
            after.append((_joined(fqn, name), child))
    return None


def refuse_nested(regions: Mapping[str, torch.nn.Module]) -> None:
    """Raises PlanError if a region is inside another: the measurement of the outer would include the inner region."""
    names = {module: name for name, module in regions.items()}
    for name, module in regions.items():
        nested = next((names[inner] for inner in modules_of(module) if inner is not module and inner in names), None)
        if nested is not None:
            raise PlanError(
                f"region {nested!r} is inside of region {name!r}, and regions are planned one by one: let regions= "
                "name one of them"
            )


def find_named(root: torch.nn.Module, names: Sequence[Names], option: str) -> list[torch.nn.Module]:
    """All modules that match one of `names`. Raises ModuleError for a name without a match, with near names."""
    found: dict[torch.nn.Module, None] = {}
    for name in names:
        matches = [module for fqn, module in named_modules(root) if _is_meant(name, fqn, module)]
        if not matches:
            raise ModuleError(_no_match(root, name, option))
        found.update(dict.fromkeys(matches))
    return list(found)


def choose_recipes(
    root: torch.nn.Module,
    regions: Mapping[str, torch.nn.Module],
    recipe: RecipeLike | Mapping[Names, RecipeLike] | None,
) -> tuple[dict[str, Recipe], dict[str, torch.nn.Module]]:
    """Recipes by region, and all regions. A name may match a module that was no region so far.

    Raises ConfigError for anything but recipes, ModuleError for a name without a match.
    """
    if recipe is None:
        return {}, dict(regions)
    if not isinstance(recipe, Mapping):
        if not regions:
            raise ModuleError(
                f"{type(root).__name__} has no repeated blocks to give recipe={recipe!r} to: name the modules that are "
                "to be regions, recipe={'encoder': 'recompute', ...}"
            )
        return dict.fromkeys(regions, as_recipe(recipe)), dict(regions)
    recipes: dict[str, Recipe] = {}
    all_regions = dict(regions)
    for pattern, like in recipe.items():
        if pattern == WHOLE:
            all_regions[WHOLE], recipes[WHOLE] = root, as_recipe(like)
            continue
        modules = find_named(root, (pattern,), "recipe")
        if root in modules:
            raise ModuleError(
                f"recipe={{{pattern!r}: ...}} means {type(root).__name__} itself: regions are modules inside the model"
            )
        blocks = {name: block for name, block in regions.items() if block in modules}
        matches = blocks or names_of(root, modules)
        all_regions.update(matches)
        recipes.update(dict.fromkeys(matches, as_recipe(like)))
    return recipes, all_regions


def find_planned(
    root: torch.nn.Module, regions: Mapping[str, torch.nn.Module], plan: Plan
) -> dict[str, torch.nn.Module]:
    """The regions of `root`, and the modules that `plan` makes regions. Raises ModuleError for a missing module."""
    modules: dict[str, torch.nn.Module] = {}
    for fqn, module in named_modules(root):
        modules.setdefault(clean_name(fqn), module)  # the wrapper, not the wrapped module, as with blocks
    if "" in plan.regions:
        raise ModuleError(
            f"the plan has a region '', which is {type(root).__name__} itself: regions are modules inside the model, "
            "and outside= covers the rest"
        )
    modules[WHOLE] = root
    for name in plan.regions:
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=5, cutoff=0.4) or [n for n in modules if n]
            raise ModuleError(
                f"the plan has a region {name!r} and {type(root).__name__} has no module of that name: the plan was "
                f"made for another model. Near names: {_some(near)}"
            )
    return dict(regions) | {name: modules[name] for name in plan.regions}


def _is_meant(name: Names, fqn: str, module: torch.nn.Module) -> bool:
    if not isinstance(name, str):
        return isinstance(module, name)
    return _is_match(name, clean_name(fqn)) or _is_match(name, fqn)


def _is_match(pattern: str, fqn: str) -> bool:
    """A pattern may leave out the front: "layers.*.mlp" also matches "model.layers.0.mlp".

    A star matches no dot: "layers.*" matches the blocks and nothing inside. Otherwise `include` would bring back
    modules that `exclude` names inside a block, as the innermost match.
    """
    patterns = pattern.split(".")
    parts = fqn.split(".")[-len(patterns) :]
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _no_match(root: torch.nn.Module, name: Names, option: str) -> str:
    if not isinstance(name, str):
        classes = sorted({type(module).__name__ for module in modules_of(root)})
        return f"{option}={name.__name__}: {type(root).__name__} has no module of this class. It has {_some(classes)}"
    parts = (clean_name(fqn).split(".") for fqn, _ in named_modules(root) if fqn)
    # With stars for numbers, as users write patterns.
    patterns = sorted({".".join("*" if part.isdigit() else part for part in name_parts) for name_parts in parts})
    near = difflib.get_close_matches(name, patterns, n=5, cutoff=0.4) or patterns
    return f"{option}={name!r} matches no module of {type(root).__name__}. Near names: {_some(near)}"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:8])) + (", ..." if len(listed) > 8 else "")


def names_of(root: torch.nn.Module, modules: list[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """`modules` of `root` by name, in order."""
    return {clean_name(fqn): module for fqn, module in named_modules(root) if module in modules}
