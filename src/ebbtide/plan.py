"""What is to be done with each region: plain data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from ebbtide._errors import ConfigError

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

    Raises:
        ConfigError: a word that means nothing, or a setting that the action does not have.
    """

    action: Action = "offload"
    inputs: Place = "offload"
    outputs: Place = "offload"
    ops: tuple[OpChoice, ...] = ("attention", "matmul")
    sites: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_word("action", self.action, get_args(Action))
        _check_word("inputs", self.inputs, get_args(Place))
        _check_word("outputs", self.outputs, get_args(Place))
        object.__setattr__(self, "ops", _as_tuple(self.ops))
        for choice in self.ops:
            _check_op_choice(choice)
        if not self.ops:
            raise ConfigError("ops=() makes a selective recipe hold nothing: write Recipe('recompute')")
        if self.sites is not None:
            self._check_sites()

    @property
    def runs_again(self) -> bool:
        """Whether the region's forward runs again in backward."""
        return self.action in ("recompute", "selective")

    def __str__(self) -> str:
        if self.action == "recompute":
            return f"recompute, inputs {_past(self.inputs)}"
        if self.action == "selective":
            ops = ", ".join(op if isinstance(op, str) else getattr(op, "__name__", "a predicate") for op in self.ops)
            return f"selective ({ops}) {_past(self.outputs)}, inputs {_past(self.inputs)}"
        return self.action

    def _check_sites(self) -> None:
        assert self.sites is not None
        if self.action not in ("offload", "selective"):
            raise ConfigError(f"sites= chooses what an 'offload' or 'selective' recipe takes; {self.action!r} has none")
        sites = tuple(self.sites)
        if any(isinstance(site, bool) or not isinstance(site, int) or site < 0 for site in sites):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"sites={self.sites!r}: expected the indices of saves in the region, such as (0, 3)")
        object.__setattr__(self, "sites", sites)


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
    return cast("tuple[OpChoice, ...]", (ops,) if isinstance(ops, str) or callable(ops) else tuple(ops))


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(map(repr, words))


def _past(place: Place) -> str:
    return "kept" if place == "keep" else "offloaded"
