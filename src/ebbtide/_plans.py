"""What is to be done with each region: plain data."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from ebbtide._errors import ConfigError, PlanError
from ebbtide._utils.serialize import check_fields, reading
from ebbtide._utils.sizes import format_bytes
from ebbtide._utils.text import as_range, counts_up, plain_table

FORMAT = 1
"""Of a plan in a file."""

Action = Literal["keep", "offload", "recompute", "selective"]
Place = Literal["keep", "offload"]

Predicate: TypeAlias = Callable[..., bool]
"""`predicate(op, *args, **kwargs)`: whether the output of this call of an operator is dear."""

OpChoice: TypeAlias = str | Predicate

OP_CLASSES: Mapping[str, str] = {
    "attention": "fused attention: flash, efficient, cudnn, flex, and the flash_attn and xformers packages",
    "matmul": "matrix products: mm, addmm, bmm, baddbmm, scaled and integer ones",
    "convolution": "convolutions, transposed ones included",
    "grouped_matmul": "grouped matrix products of mixtures of experts",
    "collective": "functional collectives: gathers, reductions, all-to-all",
}
"""The classes of operators that a selective recipe may name, and what they stand for."""

_SHOWN_S = 5e-5  # less is 0.0 ms


@dataclass(frozen=True)
class Recipe:
    """What is done with the activations of a region.

    Attributes:
        action: "keep" leaves what is saved on the device. "offload" moves it. "recompute" keeps the region's inputs
            only and runs its forward again in backward. "selective" does that too, but holds the outputs of dear
            operators and runs only the rest again.
        inputs: for recompute and selective: whether tensors passed to the region are moved or stay on the device.
        outputs: for selective: the same for the outputs of dear operators.
        ops: for selective: which operators are dear. A class of OP_CLASSES ("matmul"), a class inside some of the
            region's modules ("matmul@self_attn", with a name or pattern as in `include`), or a function
            `predicate(op, *args, **kwargs) -> bool`. Casts are never dear, nor are operators that change an argument
            or return a view of one.
        sites: for offload: the indices of the saves in the region that travel, the others stay; None: all that may.
            For selective: the same of the dear outputs, the others are computed again.
        beyond: for selective: those of `sites` of which not the outputs are held, but the saves that these lead to:
            attention's q and k where it saves them, and not where they were projected. What lies between is not run
            again, where that can be.

    Raises:
        ConfigError: a word that means nothing, or a setting that the action does not have.
    """

    action: Action = "offload"
    inputs: Place = "offload"
    outputs: Place = "offload"
    ops: tuple[OpChoice, ...] = ("attention", "matmul")
    sites: tuple[int, ...] | None = None
    beyond: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_word("action", self.action, get_args(Action))
        _check_word("inputs", self.inputs, get_args(Place))
        _check_word("outputs", self.outputs, get_args(Place))
        object.__setattr__(self, "ops", _as_tuple(self.ops))
        for choice in self.ops:
            _check_op_choice(choice)
        if not self.ops:
            raise ConfigError("ops=() makes a selective recipe hold nothing: write Recipe('recompute')")
        self._check_action_has_all()
        if self.sites is not None:
            self._check_sites()
        object.__setattr__(self, "beyond", _listed("beyond", self.beyond))
        if self.beyond and (self.action != "selective" or not set(self.beyond) <= set(self.sites or ())):
            raise ConfigError(
                f"beyond={self.beyond!r} with action={self.action!r} and sites={self.sites!r}: expected some of the "
                "sites of a 'selective' recipe"
            )

    @property
    def recomputes(self) -> bool:
        """Whether the region's forward runs again in backward."""
        return self.action in ("recompute", "selective")

    def __str__(self) -> str:
        if self.action == "recompute":
            return f"recompute, inputs {_past(self.inputs)}"
        if self.action == "selective":
            ops = ", ".join(op if isinstance(op, str) else getattr(op, "__name__", "a predicate") for op in self.ops)
            return f"selective ({ops}) {_past(self.outputs)}, inputs {_past(self.inputs)}"
        return self.action

    def _check_action_has_all(self) -> None:
        """Settings that the action does not have would be ignored."""
        has = {"inputs": self.recomputes, "outputs": self.action == "selective", "ops": self.action == "selective"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not has.get(field.name, True) and value != field.default:
                raise ConfigError(f"{field.name}={value!r} means nothing to the recipe {self.action!r}: leave it out")

    def _check_sites(self) -> None:
        assert self.sites is not None
        if self.action not in ("offload", "selective"):
            raise ConfigError(f"sites= chooses what an 'offload' or 'selective' recipe takes; {self.action!r} has none")
        sites = _listed("sites", self.sites)
        if any(isinstance(site, bool) or not isinstance(site, int) or site < 0 for site in sites):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"sites={self.sites!r}: expected the indices of saves in the region, such as (0, 3)")
        object.__setattr__(self, "sites", sites)


class ReleasePoint(NamedTuple):
    """A place in forward: from a region's save with this index on, so many bytes may wait on their way out.

    What is more has to leave there: compute waits for it.
    """

    save: int
    window_bytes: int


@dataclass(frozen=True)
class Cost:
    """What a recipe is expected to mean for one pass through a region. Bytes, seconds.

    Attributes:
        kept_bytes: stay on the device until its backward, also what the recipe sends and backward needs before it
            could leave.
        moved_bytes: go out, and come back.
        again_s: what its second run takes.
    """

    kept_bytes: int
    moved_bytes: int
    again_s: float


@dataclass(frozen=True)
class RegionPlan:
    """What a plan says about one region.

    Attributes:
        recipe: what is done with its activations.
        release: places in its forward where what is on its way out has to leave, in order. Before the first, what held
            before the region holds on; what the last one says holds behind the region too, up to the next in forward.
        prefetch_bytes: most bytes brought back before backward asks for them while it is here; None: as the door says.
        reason: why the planner chose it.
        cost: what the planner expects of it; None for a plan written by hand.
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
    """What a plan is expected to do in one step. Seconds of forward and backward, bytes.

    Attributes:
        step_s: forward and backward together.
        bound_s: no plan that fits is faster than this, as far as a relaxation of the problem can tell.
        stall_forward_s, stall_backward_s: of `step_s`, what compute waits for the lanes.
        peak_bytes: most device memory allocated at once, with all that was allocated before the step.
        moved_bytes: what goes out, and comes back.
        host_bytes: most that waits in the store at once.
        host_wait_s: of `step_s`, what compute waits for the host that queues it.

    `str()` gives the first line of a plan, without the budget.
    """

    step_s: float
    bound_s: float
    stall_forward_s: float
    stall_backward_s: float
    peak_bytes: int
    moved_bytes: int
    host_bytes: int
    host_wait_s: float = 0.0

    def __str__(self) -> str:
        stalls = f"{_ms(self.stall_forward_s)} forward and {_ms(self.stall_backward_s)} backward"
        if self.host_wait_s >= _SHOWN_S:
            stalls += f", {_ms(self.host_wait_s)} for the host"
        return (
            f"step {_ms(self.step_s)} (none is faster than {_ms(self.bound_s)}), waiting {stalls}; "
            f"peak {format_bytes(self.peak_bytes)}, {format_bytes(self.moved_bytes)} out and back, "
            f"{format_bytes(self.host_bytes)} on the host"
        )


@dataclass(frozen=True)
class Plan:
    """A recipe for every region, and when what travels has to leave and may come back. Plain data.

    Attributes:
        regions: by name. Without `outside`, one that is not named is treated as the door's other settings say.
        outside: what is done with saves outside of all regions that are named here, by "keep" or "offload", but for
            what the door's include and exclude name. None: as the door says.
        budget_bytes: the peak it was made to stay under; None without one.
        predicted: what the planner expects of it; None for a plan written by hand.
        budget: the budget as its user wrote it, of which `budget_bytes` may be a part only; "" if nobody wrote one.
        status: why there is no plan, of recipes that hold until then ("no plan yet: measuring step 2 of 3"); "" for a
            plan. Files do not hold it.
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
                f"outside={self.outside.recipe}: what is outside of all regions cannot run again: write Recipe('keep') "
                "or Recipe('offload')"
            )

    @property
    def keeps_all(self) -> bool:
        """Whether all saved tensors stay on the device."""
        recipes = [region.recipe for region in (*self.regions.values(), self.outside) if region is not None]
        return self.outside is not None and all(recipe.action == "keep" for recipe in recipes)

    def recipe_of(self, region: str | None) -> Recipe | None:
        """The recipe of the region of this name, if the plan has one."""
        found = None if region is None else self.regions.get(region)
        return None if found is None else found.recipe

    def __str__(self) -> str:
        return "\n".join([_headline(self), plain_table([_COLUMNS, *_rows(self)], right=(2, 3, 4, 5, 6))])

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for `Plan.load`.

        Raises:
            PlanError: a recipe chooses operators by a function, which a file cannot hold.
        """
        for name, region in self.regions.items():
            if not all(isinstance(op, str) for op in region.recipe.ops):
                raise PlanError(
                    f"{name}: the recipe chooses operators by a Python function, which cannot be saved: write classes "
                    f"of operators ({_words(tuple(OP_CLASSES))}) or sites= instead"
                )
        data = dataclasses.asdict(dataclasses.replace(self, status=""))
        Path(path).write_text(json.dumps({"format": FORMAT, **data}, indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read what `save` wrote. Raises PlanError for anything else, and where there is nothing to read."""
        with reading(path, "plan"):
            data = json.loads(Path(path).read_text())
            if "around" in data:
                raise PlanError("it is a profile: give it to offload(model, profile=...) or `ebbtide plan`")
            if data.pop("format") == FORMAT:
                plan = _plan_from(data)
                check_fields(plan)
                return plan
        raise PlanError(f"{path} was written by another version of ebbtide: make the plan again")


RecipeLike: TypeAlias = Recipe | str


def as_recipe(given: Any) -> Recipe:
    """A recipe, or the one an action's name stands for. Raises ConfigError."""
    if isinstance(given, Recipe):
        return given
    if isinstance(given, str):
        return Recipe(given)  # pyright: ignore[reportArgumentType]
    raise ConfigError(f"{given!r} is no recipe: write one of {_words(get_args(Action))}, or ebbtide.Recipe(...)")


def op_class_of(choice: str) -> tuple[str, str | None]:
    """ "matmul@self_attn" -> ("matmul", "self_attn"); without an @ the second is None."""
    name, _, inside = choice.partition("@")
    return name, inside or None


def _as_points(release: Any) -> tuple[ReleasePoint, ...]:
    if not isinstance(release, tuple | list) or not all(map(_is_point, cast("list[Any]", release))):
        raise ConfigError(f"release={release!r}: expected ((index of a save, bytes), ...), whole numbers from 0 on")
    points = tuple(ReleasePoint(*point) for point in cast("list[Any]", release))
    saves = [point.save for point in points]
    if saves != sorted(set(saves)):
        raise ConfigError(f"release={release!r}: expected one point at most for each save, in the order of saves")
    return points


def _is_point(value: Any) -> bool:
    return isinstance(value, tuple | list) and list(map(_is_count, cast("list[Any]", value))) == [True, True]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_region(option: str, found: object) -> None:
    if not isinstance(found, RegionPlan):
        raise ConfigError(f"{option}={found!r}: expected a RegionPlan, such as RegionPlan(Recipe('offload'))")


def _check_word(option: str, found: object, words: tuple[str, ...]) -> None:
    if found not in words:
        raise ConfigError(f"{option}={found!r}: write one of {_words(words)}")


def _check_op_choice(choice: object) -> None:
    if isinstance(choice, str):
        name, _ = op_class_of(choice)
        if name not in OP_CLASSES or choice.endswith("@"):
            raise ConfigError(
                f"ops: {choice!r} is no class of operators: write one of {_words(tuple(OP_CLASSES))}, "
                "'matmul@self_attn' for those inside some modules, or a function predicate(op, *args, **kwargs) -> bool"
            )
    elif not callable(choice):
        raise ConfigError(f"ops: {choice!r} is neither a class of operators nor a predicate")


def _as_tuple(ops: Any) -> tuple[OpChoice, ...]:
    return cast("tuple[OpChoice, ...]", (ops,) if isinstance(ops, str) or callable(ops) else _listed("ops", ops))


def _listed(option: str, found: Any) -> tuple[Any, ...]:
    if isinstance(found, list | tuple | set | frozenset | range):
        return tuple(cast("list[Any]", found))
    raise ConfigError(f"{option}={found!r}: expected a list or a tuple")


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(map(repr, words))


def _past(place: Place) -> str:
    return "kept" if place == "keep" else "offloaded"


# -- files -----------------------------------------------------------------------------------------------------------


def _plan_from(data: dict[str, Any]) -> Plan:
    regions = {str(name): _region_from(region) for name, region in data.pop("regions").items()}
    outside, predicted = data.pop("outside"), data.pop("predicted")
    return Plan(
        regions=regions,
        outside=None if outside is None else _region_from(outside),
        predicted=None if predicted is None else Prediction(**predicted),
        **data,
    )


def _region_from(data: dict[str, Any]) -> RegionPlan:
    recipe, cost = data.pop("recipe"), data.pop("cost")
    sites = recipe.pop("sites")
    return RegionPlan(
        recipe=Recipe(sites=None if sites is None else tuple(sites), **recipe),
        cost=None if cost is None else Cost(**cost),
        **data,
    )


# -- text ------------------------------------------------------------------------------------------------------------

_FIGURE = re.compile(r"[0-9][0-9.]* \w+")
_COLUMNS = ("regions", "recipe", "kept", "moved", "run again", "may wait", "fetched ahead", "why")


class _Listed(NamedTuple):
    """A region with the window that holds there, whether it changes there or not."""

    name: str
    plan: RegionPlan
    window_bytes: int | None


def _headline(plan: Plan) -> str:
    given = plan.budget or ("" if plan.budget_bytes is None else format_bytes(plan.budget_bytes))
    if plan.status:
        return f"{plan.status} (budget {given})" if given else plan.status
    budget = f" within {given}" if given else ""
    if plan.predicted is None:
        return f"plan{budget}, {len(plan.regions)} regions"
    return f"plan{budget}: {plan.predicted}"


def _rows(plan: Plan) -> Iterator[Sequence[str]]:
    window_bytes: int | None = None
    run: list[_Listed] = []
    for name, region in plan.regions.items():
        window_bytes = region.release[-1].window_bytes if region.release else window_bytes
        listed = _Listed(name, region, window_bytes)
        if run and not _is_alike(run[-1], listed):
            yield _row(run)
            run = []
        run.append(listed)
    if run:
        yield _row(run)
    if plan.outside is not None:
        window_bytes = plan.outside.release[-1].window_bytes if plan.outside.release else window_bytes
        yield _row([_Listed("outside of all", plan.outside, window_bytes)])


def _is_alike(before: _Listed, listed: _Listed) -> bool:
    """Whether one line says both: their names count up, and they have one recipe for reasons that differ in figures."""
    reasons = [_FIGURE.sub("", region.plan.reason) for region in (before, listed)]
    is_one_recipe = before.plan.recipe == listed.plan.recipe
    return is_one_recipe and reasons[0] == reasons[1] and counts_up(before.name, listed.name)


def _row(run: Sequence[_Listed]) -> Sequence[str]:
    """One line for regions that follow each other."""
    costs = [listed.plan.cost for listed in run if listed.plan.cost is not None]
    return (
        as_range(run[0].name, run[-1].name),
        _recipe_text(run[0].plan.recipe),
        _span([format_bytes(cost.kept_bytes) for cost in costs]),
        _span([format_bytes(cost.moved_bytes) for cost in costs]),
        _span([_ms(cost.again_s) for cost in costs]),
        _span(["" if listed.window_bytes is None else format_bytes(listed.window_bytes) for listed in run]),
        _span([format_bytes(listed.plan.prefetch_bytes or 0) for listed in run if listed.plan.prefetch_bytes]),
        run[0].plan.reason,
    )


def _recipe_text(recipe: Recipe) -> str:
    """Without the classes of operators if all are named, as a planner does, which goes by sites."""
    if recipe.action == "selective" and set(recipe.ops) == set(OP_CLASSES):
        text = f"selective, outputs {_past(recipe.outputs)}, inputs {_past(recipe.inputs)}"
    else:
        text = str(recipe)
    text = text if recipe.sites is None else f"{text}, sites {','.join(map(str, recipe.sites))}"
    return f"{text}, beyond {','.join(map(str, recipe.beyond))}" if recipe.beyond else text


def _span(texts: Sequence[str]) -> str:
    """From the first to the last."""
    if not texts:
        return ""
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} .. {texts[-1]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
