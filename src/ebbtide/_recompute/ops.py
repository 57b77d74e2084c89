"""Which operators are dear. Pure: looks at an operator, calls nothing."""

import fnmatch
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ebbtide._plans import OpChoice, Predicate, op_class_of

# Of "namespace::name". Names with "backward" never match.
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "attention": (
        "aten::_scaled_dot_product_*attention*",
        "aten::_flash_attention_forward*",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "higher_order::flex_attention*",
        "flash_attn*::*forward*",
        "flash_attn*::*fwd*",
        "xformers*::*attention*",
        "xformers*::*fwd*",
    ),
    "matmul": (
        "aten::mm",
        "aten::addmm",
        "aten::_addmm_activation",
        "aten::bmm",
        "aten::baddbmm",
        "aten::addbmm",
        "aten::linear",
        "aten::mkldnn_linear",
        "aten::_scaled_mm*",
        "aten::_int_mm",
        "aten::_weight_int*pack_mm*",
        "aten::_cslt_sparse_mm",
        "aten::_sparse_semi_structured_*mm",
        "mkldnn::_linear*",
    ),
    "convolution": (
        "aten::*convolution*",
        "aten::_conv_depthwise2d",
        "aten::conv_depthwise3d",
        "aten::_slow_conv2d_forward",
        "aten::slow_conv3d_forward",
        "aten::slow_conv_*",
        "mkldnn::_convolution*",
    ),
    "grouped_matmul": ("aten::_grouped_mm", "aten::_scaled_grouped_mm*"),
    "collective": (
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::broadcast",
        "_c10d_functional::reduce_scatter_tensor",
        "_dtensor::shard_dim_alltoall",
    ),
}

_HIDDEN_VIEWS = {
    "aten::_unsafe_view",  # the end of every product of more than two dimensions
    "aten::unsafe_chunk",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
}

_Condition = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Collection[str]], bool]


class OpKind(NamedTuple):
    """What holds for all calls of an operator, found out once: a forward makes some dozen calls per region.

    Attributes:
        conditions: on which a call is dear.
        is_always_dear: with any arguments, inside of any module.
        is_hidden_view: see `is_hidden_view`.
        speaks: see `speaks`.
    """

    conditions: tuple[_Condition, ...]
    is_always_dear: bool
    is_hidden_view: bool
    speaks: bool

    @property
    def may_be_dear(self) -> bool:
        """Such calls are numbered."""
        return bool(self.conditions)


class ExpensiveOps:
    """The operators that a selective recipe calls dear."""

    def __init__(self, choices: tuple[OpChoice, ...]) -> None:
        self._choices = choices
        self._kinds: dict[Any, OpKind] = {}
        self.modules = tuple({inside for _, inside in map(op_class_of, _strings(choices)) if inside is not None})
        """Patterns of the modules that some choices are limited to."""

    def is_dear(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], inside: Collection[str]) -> bool:
        """Whether this call is. `inside`: those of `modules` that the forward is inside of now."""
        kind = self.kind_of(op)
        return kind.is_always_dear or any(condition(op, args, kwargs, inside) for condition in kind.conditions)

    def kind_of(self, op: Any) -> OpKind:
        kind = self._kinds.get(op)
        if kind is None:
            conditions = () if _is_never_dear(op) else tuple(_conditions(op, self._choices))
            kind = self._kinds[op] = OpKind(conditions, _always in conditions, is_hidden_view(op), speaks(op))
        return kind


def is_collective(op: Any) -> bool:
    """Its result may not be read before somebody has waited for it."""
    return op_name(op).startswith("_c10d_functional::")


@functools.cache
def speaks(op: Any) -> bool:
    """With other ranks, or waits for them."""
    return op_name(op).startswith(("_c10d", "c10d", "_dtensor::", "fsdp::", "symm_mem::"))


def is_wait(op: Any) -> bool:
    return op_name(op) == "_c10d_functional::wait_tensor"


@functools.cache
def is_hidden_view(op: Any) -> bool:
    """It returns a view of its first argument and does not say so: changes are counted for each of them alone."""
    return op_name(op) in _HIDDEN_VIEWS


def op_name(op: Any) -> str:
    """ "aten::mm"; higher-order operators have the namespace higher_order."""
    schema = getattr(op, "_schema", None)
    return schema.name if schema is not None else f"higher_order::{getattr(op, '_name', op)}"


def classes_of(op: Any) -> list[str]:
    """The classes of OP_CLASSES that `op` belongs to."""
    name = op_name(op)
    if "backward" in name:
        return []
    return [
        word for word, patterns in _PATTERNS.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def _conditions(op: Any, choices: tuple[OpChoice, ...]) -> list[_Condition]:
    classes = classes_of(op)
    conditions: list[_Condition] = []
    for choice in choices:
        if not isinstance(choice, str):
            conditions.append(_asks(choice))
            continue
        word, inside = op_class_of(choice)
        if word in classes:
            conditions.append(_always if inside is None else _is_inside(inside))
    return conditions


def _always(*_: object) -> bool:
    return True


def _is_inside(module: str) -> _Condition:
    def condition(_op: Any, _args: tuple[Any, ...], _kwargs: Mapping[str, Any], inside: Collection[str]) -> bool:
        return module in inside

    return condition


def _asks(predicate: Predicate) -> _Condition:
    def condition(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], _inside: Collection[str]) -> bool:
        return bool(predicate(op, *args, **kwargs))

    return condition


def returns_no_new_memory(op: Any) -> bool:
    """It changes an argument or returns a view of one: a result handed out in its place would not."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return False
    return schema.is_mutable or any(r.alias_info is not None for r in schema.returns) or is_hidden_view(op)


def _is_never_dear(op: Any) -> bool:
    """Nor are casts: autocast remembers those of leaves, so a second run may have fewer of them, or more."""
    return returns_no_new_memory(op) or op_name(op) == "aten::_to_copy"


def _strings(choices: tuple[OpChoice, ...]) -> list[str]:
    return [choice for choice in choices if isinstance(choice, str)]
