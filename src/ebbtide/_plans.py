"""Plans as plain data: a recipe for every region, and the points at which copies leave and may come back."""

import dataclasses
import functools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from ebbtide._errors import ConfigError, PlanError
from ebbtide._utils.serialize import read_file, write_file
from ebbtide._utils.sizes import format_bytes
from ebbtide._utils.text import as_range, consecutive, plain_table, shortened

FORMAT = 2

Action = Literal["keep", "offload", "recompute", "selective"]
Place = Literal["keep", "offload"]

Predicate: TypeAlias = Callable[..., bool]
"""`predicate(op, *args, **kwargs)`: whether the output of this call of an operator is expensive."""

OpChoice: TypeAlias = str | Predicate

OP_CLASSES: Mapping[str, str] = {
    "attention": "fused attention: flash, efficient, cudnn, flex, and the flash_attn and xformers packages",
    "matmul": "matrix products: mm, addmm, bmm, baddbmm, scaled and integer ones",
    "convolution": "convolutions, transposed ones included",
    "grouped_matmul": "grouped matrix products of mixtures of experts",
    "collective": "functional collectives: gathers, reductions, all-to-all",
}
"""Classes of operators that a selective recipe may name, each with a description."""


@dataclass(frozen=True)
class Recipe:
    """How a region treats its activations.

    Example: `Recipe("selective", ops="attention")` recomputes a region from its inputs, but saves the outputs of
    attention.

    Attributes:
        action: "keep" leaves saved tensors on the device. "offload" moves saved tensors to the store. "recompute"
            saves only the inputs of the region and runs its forward once more in backward. "selective" recomputes too,
            but saves the outputs of expensive operators and runs only the rest.
        inputs: for recompute and selective: whether tensors passed to the region move or stay on the device.
        outputs: for selective: whether the outputs of expensive operators move or stay on the device.
        ops: for selective: the expensive operators. A class of OP_CLASSES ("matmul"), a class inside some modules of
            the region ("matmul@self_attn", with a name or pattern as in `include`), or a function
            `predicate(op, *args, **kwargs) -> bool`. Casts never count as expensive, nor do operators that change an
            argument or return a view of an argument.
        sites: for offload: indices of the region's saved tensors that move; None: all. For selective: indices of the
            expensive calls whose outputs are saved; None: all.
        derive: for keep and offload: indices of the region's saved tensors to drop where the operator that made them
            can compute them again from other saved tensors: activation functions, products, norms, casts, matrix
            products. Backward computes each of them when it is read. None or True: all.
        prune: for selective: members of `sites` whose outputs are replaced by the saved tensors computed from them.
            Example: attention's rotated q and k are saved, and the projections before the rotation are not.
            Recomputation skips the operators in between where possible.
        activation_memory_budget: for a compiled region, except "selective": torch's setting of this name, in force
            while the region is compiled for the recipe. 1 saves what makes backward fastest, 0 the inputs alone, and
            values in between that share of the difference; the compiled backward computes the rest again. The saved
            tensors are kept or moved, as `action` says. None: the region as the user compiled it.

    Raises:
        ConfigError: an unknown word, or a setting that the action does not have.
    """

    action: Action = "offload"
    inputs: Place = "offload"
    outputs: Place = "offload"
    ops: tuple[OpChoice, ...] = ("attention", "matmul")
    sites: tuple[int, ...] | None = None
    prune: tuple[int, ...] = ()
    derive: tuple[int, ...] | None = ()
    activation_memory_budget: float | None = None

    def __post_init__(self) -> None:
        for option, kind in (("action", Action), ("inputs", Place), ("outputs", Place)):
            words = get_args(kind)
            if getattr(self, option) not in words:
                raise ConfigError(f"{option}={getattr(self, option)!r}: write one of {_words(words)}")
        ops: Any = self.ops
        object.__setattr__(self, "ops", (ops,) if isinstance(ops, str) or callable(ops) else _listed("ops", ops))
        for choice in self.ops:
            _check_op_choice(choice)
        if not self.ops:
            raise ConfigError("ops=() makes a selective recipe save nothing: write Recipe('recompute')")
        for option in {"selective": (), "recompute": ("outputs", "ops")}.get(self.action, ("inputs", "outputs", "ops")):
            if getattr(self, option) != getattr(Recipe, option):
                found = f"{option}={getattr(self, option)!r}"
                raise ConfigError(f"{found} means nothing to the recipe {self.action!r}: omit it")
        derive: Any = self.derive
        chosen = {True: None, False: ()}[derive] if isinstance(derive, bool) else derive
        object.__setattr__(self, "derive", None if chosen is None else _indices("derive", chosen))
        if self.derives and self.recomputes:
            raise ConfigError(
                f"derive={self.derive!r} means nothing to the recipe {self.action!r}, which recomputes: omit it"
            )
        if self.sites is not None:
            if self.action not in ("offload", "selective"):
                raise ConfigError(f"sites= belongs to an 'offload' or 'selective' recipe: {self.action!r} has none")
            object.__setattr__(self, "sites", _indices("sites", self.sites))
        object.__setattr__(self, "prune", _listed("prune", self.prune))
        if self.prune and (self.action != "selective" or not set(self.prune) <= set(self.sites or ())):
            raise ConfigError(
                f"prune={self.prune!r} with action={self.action!r} and sites={self.sites!r}: expected some of the "
                "sites of a 'selective' recipe"
            )
        self._check_activation_memory_budget()

    def _check_activation_memory_budget(self) -> None:
        share: Any = self.activation_memory_budget
        if share is None:
            return
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"activation_memory_budget={share!r}: expected a number from 0 to 1, or None")
        if self.action == "selective":
            raise ConfigError(
                f"activation_memory_budget={share!r} means nothing to the recipe 'selective', whose ops= say what the "
                "compiled graph saves: omit one of them"
            )
        object.__setattr__(self, "activation_memory_budget", float(share))

    @property
    def beyond(self) -> tuple[int, ...]:
        """Deprecated name of `prune`."""
        warnings.warn(_BEYOND, FutureWarning, stacklevel=2)
        return self.prune

    @property
    def recomputes(self) -> bool:
        """Whether backward runs the region's forward once more."""
        return self.action in ("recompute", "selective")

    @property
    def derives(self) -> bool:
        """Whether some saved tensors may be dropped, and computed from others."""
        return self.derive != ()

    @property
    def keeps_all(self) -> bool:
        """Whether all tensors saved by the region, as the user wrote it, stay on the device."""
        return self.action == "keep" and not self.derives and self.activation_memory_budget is None

    @property
    def names_any(self) -> bool:
        """Whether the recipe recomputes, here or in the compiled graph, or names saved tensors that move or are
        derived."""
        is_partitioned = self.activation_memory_budget is not None
        return self.recomputes or self.derives or is_partitioned or self.sites is not None

    @functools.cached_property
    def moved_sites(self) -> frozenset[int] | None:
        """`sites` as a set."""
        return None if self.sites is None else frozenset(self.sites)

    @functools.cached_property
    def derived_sites(self) -> frozenset[int] | None:
        """`derive` as a set."""
        return None if self.derive is None else frozenset(self.derive)

    def __str__(self) -> str:
        if self.action == "recompute":
            return f"recompute{_at(self)}, inputs {_past(self.inputs)}"
        if self.action == "selective":
            ops = ", ".join(op if isinstance(op, str) else getattr(op, "__name__", "a predicate") for op in self.ops)
            return f"selective ({ops}) {_past(self.outputs)}, inputs {_past(self.inputs)}"
        return f"{self.action}{_at(self)}{', derive' if self.derives else ''}"


_BEYOND = "Recipe's `beyond` is deprecated and will be removed in the next release: write `prune`"


def _accept_beyond(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_with_beyond(self: Recipe, *args: Any, beyond: Any = None, **kwargs: Any) -> None:
        if beyond is not None:
            warnings.warn(_BEYOND, FutureWarning, stacklevel=2)
            if "prune" in kwargs:
                raise ConfigError(
                    f"beyond={beyond!r} and prune={kwargs['prune']!r} are one setting: write prune= alone"
                )
            kwargs["prune"] = beyond
        init(self, *args, **kwargs)

    return init_with_beyond


Recipe.__init__ = _accept_beyond(Recipe.__init__)


class ReleasePoint(NamedTuple):
    """A place in forward: from the region's saved tensor `tensor_index` on, at most `window_bytes` wait to leave.

    At that place compute waits until the excess has landed in the store. Place 0 of a region is its entry,
    where parcels of all devices leave.
    """

    tensor_index: int
    window_bytes: int


@dataclass(frozen=True)
class Cost:
    """Expected cost of a recipe for one pass through a region. Bytes, seconds.

    Attributes:
        kept_bytes: on the device until the region's backward, including parcels that are needed before they have left.
        moved_bytes: out to the store, and back.
        recompute_s: time of the recomputation.
    """

    kept_bytes: int
    moved_bytes: int
    recompute_s: float


@dataclass(frozen=True)
class RegionPlan:
    """The part of a plan for one region.

    Attributes:
        recipe: how the region treats its activations. A word stands for `Recipe(word)`.
        release: places in the region's forward where parcels have to leave, in order. Before the first place the
            window of the region before holds, and the last window holds until the next region in forward.
        prefetch_bytes: most bytes brought back early while the region's backward runs; None: the default of the
            entry point.
        reason: explanation by the planner.
        cost: expectation of the planner; None for a plan written by hand.

    Raises:
        ConfigError: a value of the wrong kind.
    """

    recipe: Recipe
    release: tuple[ReleasePoint, ...] = ()
    prefetch_bytes: int | None = None
    reason: str = ""
    cost: Cost | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", as_recipe(self.recipe))
        object.__setattr__(self, "release", _as_points(self.release))
        if self.prefetch_bytes is not None and (not _is_count(self.prefetch_bytes) or self.prefetch_bytes == 0):
            raise ConfigError(f"prefetch_bytes={self.prefetch_bytes!r}: expected more than zero bytes, or None")


@dataclass(frozen=True)
class Prediction:
    """Expected figures of one step under a plan. Seconds of forward and backward, bytes.

    Attributes:
        step_s: forward and backward together.
        stall_forward_s, stall_backward_s: part of `step_s` in which compute waits for copies.
        peak_bytes: most device memory allocated at once, memory from before the step included.
        moved_bytes: out to the store, and back.
        host_bytes: most in the store at once.
        host_wait_s: part of `step_s` in which compute waits for the host to launch kernels.

    `str()` gives the first line of a plan, without the budget.
    """

    step_s: float
    stall_forward_s: float
    stall_backward_s: float
    peak_bytes: int
    moved_bytes: int
    host_bytes: int
    host_wait_s: float = 0.0

    def __str__(self) -> str:
        stalls = f"{_ms(self.stall_forward_s)} forward and {_ms(self.stall_backward_s)} backward"
        if self.host_wait_s >= 5e-5:  # less prints as 0.0 ms
            stalls += f", {_ms(self.host_wait_s)} for the host"
        return (
            f"step {_ms(self.step_s)}, waiting {stalls}; "
            f"peak {format_bytes(self.peak_bytes)}, {format_bytes(self.moved_bytes)} out and back, "
            f"{format_bytes(self.host_bytes)} on the host"
        )


@dataclass(frozen=True)
class Plan:
    """A recipe for every region, with release and fetch points. `str()` gives a table for a page of 100 columns.

    Attributes:
        regions: by name. Without `outside`, the default of the entry point holds for regions without an entry.
        outside: the recipe for tensors saved outside of all regions, "keep" or "offload"; `include` and `exclude` of
            the entry point take precedence. None: the default of the entry point.
        budget_bytes: limit of the peak that the plan was made for; None without a budget.
        predicted: expectation of the planner; None for a plan written by hand.
        budget: the budget as written by the user, of which `budget_bytes` may be only a part; "" without a budget.
        status: why no plan exists yet ("no plan yet: measuring step 2 of 3"), while the recipes of the first steps
            hold; "" for a plan. Files do not hold a status.

    Raises:
        ConfigError: a value of the wrong kind, or a recipe for `outside` that recomputes.
    """

    regions: Mapping[str, RegionPlan]
    outside: RegionPlan | None = None
    budget_bytes: int | None = None
    predicted: Prediction | None = None
    budget: str = ""
    status: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.regions, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"regions={self.regions!r}: expected {{name: RegionPlan(Recipe('offload')), ...}}")
        object.__setattr__(self, "regions", dict(self.regions))
        for name, region in self.regions.items():
            if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"regions={{{name!r}: ...}}: expected the name of a module, such as 'layers.0'")
            _check_region(f"regions[{name!r}]", region)
        if self.outside is not None:
            _check_region("outside", self.outside)
        if self.outside is not None and self.outside.recipe.recomputes:
            raise ConfigError(
                f"outside={self.outside.recipe}: tensors outside of all regions cannot be recomputed: write "
                "Recipe('keep') or Recipe('offload')"
            )

    @property
    def keeps_all(self) -> bool:
        """Whether all saved tensors stay on the device."""
        outside = self.outside
        return outside is not None and all(r.recipe.keeps_all for r in (*self.regions.values(), outside))

    def recipe_of(self, region: str | None) -> Recipe | None:
        """The recipe of the region of this name, if the plan has one."""
        found = None if region is None else self.regions.get(region)
        return None if found is None else found.recipe

    def __str__(self) -> str:
        return "\n".join([*_wrapped(headline(self), ""), *_table(self)])

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, for `Plan.load`.

        Raises:
            PlanError: a recipe chooses operators by a function, which a file cannot hold.
        """
        self.check_fits_a_file()
        write_file(dataclasses.replace(self, status=""), path, FORMAT)

    def check_fits_a_file(self) -> None:
        """Raise PlanError if a recipe chooses operators by a function."""
        for name, region in self.regions.items():
            if not all(isinstance(op, str) for op in region.recipe.ops):
                raise PlanError(
                    f"{name}: the recipe chooses operators by a Python function, which cannot be saved: write classes "
                    f"of operators ({_words(tuple(OP_CLASSES))}) or sites= instead"
                )

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a file that `save` wrote.

        Raises:
            PlanError: the file cannot be read, or is not a plan.
        """
        hint = "it is a profile: give it to offload(model, profile=...) or `ebbtide plan`"
        plan = read_file(Plan, path, "plan", range(1, FORMAT + 1), {"link": hint})
        if plan is None:
            raise PlanError(f"{path} was written by another version of ebbtide: make the plan again")
        return plan


RecipeLike: TypeAlias = Recipe | str


def as_recipe(value: Any) -> Recipe:
    """A recipe as it is, or the recipe of an action's name. Raises ConfigError."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str):
        return Recipe(value)  # pyright: ignore[reportArgumentType]
    raise ConfigError(f"{value!r} is not a recipe: write one of {_words(get_args(Action))}, or ebbtide.Recipe(...)")


def op_class_of(choice: str) -> tuple[str, str | None]:
    """ "matmul@self_attn" -> ("matmul", "self_attn"), "matmul" -> ("matmul", None)."""
    name, _, inside = choice.partition("@")
    return name, inside or None


def _as_points(release: Any) -> tuple[ReleasePoint, ...]:
    if not isinstance(release, tuple | list) or not all(map(_is_point, cast("list[Any]", release))):
        raise ConfigError(
            f"release={release!r}: expected ((index of a saved tensor, bytes), ...), whole numbers from 0 on"
        )
    points = tuple(ReleasePoint(*point) for point in cast("list[Any]", release))
    indices = [point.tensor_index for point in points]
    if indices != sorted(set(indices)):
        raise ConfigError(f"release={release!r}: expected at most one point per saved tensor, in ascending order")
    return points


def _is_point(value: Any) -> bool:
    return isinstance(value, tuple | list) and list(map(_is_count, cast("list[Any]", value))) == [True, True]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_region(option: str, found: object) -> None:
    if not isinstance(found, RegionPlan):
        raise ConfigError(f"{option}={found!r}: expected a RegionPlan, such as RegionPlan(Recipe('offload'))")


def _check_op_choice(choice: object) -> None:
    if isinstance(choice, str):
        name, _ = op_class_of(choice)
        if name not in OP_CLASSES or choice.endswith("@"):
            raise ConfigError(
                f"ops: {choice!r} is not a class of operators: write one of {_words(tuple(OP_CLASSES))}, "
                "'matmul@self_attn' for operators inside some modules, or a function "
                "predicate(op, *args, **kwargs) -> bool"
            )
    elif not callable(choice):
        raise ConfigError(f"ops: {choice!r} is neither a class of operators nor a predicate")


def _listed(option: str, found: Any) -> tuple[Any, ...]:
    if isinstance(found, list | tuple | set | frozenset | range):
        return tuple(cast("list[Any]", found))
    raise ConfigError(f"{option}={found!r}: expected a list or a tuple")


def _indices(option: str, found: Any) -> tuple[int, ...]:
    listed = _listed(option, found)
    if not all(map(_is_count, listed)):
        raise ConfigError(f"{option}={found!r}: expected the indices of saved tensors in the region, such as (0, 3)")
    return listed


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(map(repr, words))


def _past(place: Place) -> str:
    return "kept" if place == "keep" else "offloaded"


# -- text ------------------------------------------------------------------------------------------------------------

_FIGURE = re.compile(r"[0-9][0-9.]* \w+")
_COLUMNS = ("regions", "recipe", "kept", "moved", "recompute")
_WIDTH = 100
_LEAST_NAME = 24  # characters of a name that are shown, however wide the other columns are


_Line: TypeAlias = "tuple[str, RegionPlan]"
"""A region: name and plan."""


def headline(plan: Plan) -> str:
    """Budget and prediction, or why there is no plan yet."""
    budget = plan.budget or ("" if plan.budget_bytes is None else format_bytes(plan.budget_bytes))
    if plan.status:
        return f"{plan.status} (budget {budget})" if budget else plan.status
    within = f" within {budget}" if budget else ""
    if plan.predicted is None:
        return f"plan{within}, {len(plan.regions)} regions"
    return f"plan{within}: {plan.predicted}"


def short_recipe(recipe: Recipe) -> str:
    """The action, and how many tensors or outputs are chosen."""
    action = f"{recipe.action}{_at(recipe)}"
    if recipe.sites is None:
        return str(recipe) if recipe.derives else action
    count = len(recipe.sites)
    what = "output" if recipe.action == "selective" else "tensor"
    more = ", derive" if recipe.derives else ""
    return f"{action}, {count} {what}{'' if count == 1 else 's'}{more}"


def _at(recipe: Recipe) -> str:
    """The activation memory budget: " at 0.2"."""
    return "" if recipe.activation_memory_budget is None else f" at {recipe.activation_memory_budget:g}"


def places(recipe: Recipe) -> str:
    """What a recipe that recomputes does with outputs and inputs; "" for other recipes."""
    if not recipe.recomputes:
        return ""
    pruned = f", {len(recipe.prune)} pruned" if recipe.prune else ""
    if recipe.action == "selective" and set(recipe.ops) == set(OP_CLASSES):
        # A planner names every class and chooses by sites: a list of all classes would say nothing.
        return f"outputs {_past(recipe.outputs)}{pruned}, inputs {_past(recipe.inputs)}"
    return f"{str(recipe).removeprefix(f'recompute{_at(recipe)}, ')}{pruned}"


def _table(plan: Plan) -> Iterator[str]:
    """A line for each run of regions with names that count up and equal recipes, with sums of their costs; below the
    line, indented, the reason, with the figures of the first region."""
    lines: list[_Line] = [*plan.regions.items(), *([] if plan.outside is None else [("outside", plan.outside)])]
    runs = list(consecutive(lines, _are_alike))
    rows = [_COLUMNS, *map(_row, runs)]
    room = _WIDTH - sum(2 + max(map(len, column)) for column in list(zip(*rows, strict=True))[1:])
    short_rows = [(shortened(name, max(_LEAST_NAME, room)), *cells) for name, *cells in rows]
    titles, *texts = plain_table(short_rows, right=(2, 3, 4)).split("\n")
    yield titles
    for text, run in zip(texts, runs, strict=True):
        yield text
        yield from _notes(run)


def _notes(run: Sequence[_Line]) -> Iterator[str]:
    recipe, reason = run[0][1].recipe, run[0][1].reason
    if reason and len(run) > 1:  # its figures are of one region
        are_equal = len({(region.reason, region.cost) for _, region in run}) == 1
        reason = f"{'each' if are_equal else 'first'}: {reason}"
    yield from _wrapped("; ".join(filter(None, (places(recipe), reason))), "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most 100 columns. A number and its unit stay together."""
    joined = _FIGURE.sub(lambda figure: figure[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    lines = textwrap.wrap(joined, _WIDTH, initial_indent=indent, subsequent_indent=indent or "  ")
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _are_alike(one: _Line, other: _Line) -> bool:
    (_, first), (_, second) = one, other
    return first.recipe == second.recipe and _FIGURE.sub("", first.reason) == _FIGURE.sub("", second.reason)


def _row(lines: Sequence[_Line]) -> Sequence[str]:
    name, recipe = as_range(lines[0][0], lines[-1][0]), short_recipe(lines[0][1].recipe)
    costs = [region.cost for _, region in lines if region.cost is not None]
    if not costs:
        return name, recipe, "", "", ""
    return (
        name,
        recipe,
        format_bytes(sum(cost.kept_bytes for cost in costs)),
        format_bytes(sum(cost.moved_bytes for cost in costs)),
        _ms(sum(cost.recompute_s for cost in costs)),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
