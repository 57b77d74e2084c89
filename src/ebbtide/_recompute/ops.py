"""Properties of operators: expensive, random, a view, a collective, a wait. Only modes call operators below."""

import fnmatch
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ebbtide._errors import CaptureError
from ebbtide._plans import OpChoice, op_class_of
from ebbtide._utils.torch_private import OperatorMode

# Patterns of "namespace::name". Names with "backward" never match.
_PATTERNS = {
    "attention": (
        "aten::_scaled_dot_product_*attention* aten::_flash_attention_forward* aten::_efficient_attention_forward "
        "aten::_cudnn_attention_forward higher_order::flex_attention* flash_attn*::*forward* flash_attn*::*fwd* "
        "xformers*::*attention* xformers*::*fwd*"
    ),
    "matmul": (
        "aten::mm aten::addmm aten::_addmm_activation aten::bmm aten::baddbmm aten::addbmm aten::linear "
        "aten::mkldnn_linear aten::_scaled_mm* aten::_int_mm aten::_weight_int*pack_mm* aten::_cslt_sparse_mm "
        "aten::_sparse_semi_structured_*mm mkldnn::_linear*"
    ),
    "convolution": (
        "aten::*convolution* aten::_conv_depthwise2d aten::conv_depthwise3d aten::_slow_conv2d_forward "
        "aten::slow_conv3d_forward aten::slow_conv_* mkldnn::_convolution*"
    ),
    "grouped_matmul": "aten::_grouped_mm aten::_scaled_grouped_mm*",
    "collective": (
        "_c10d_functional::all_gather_into_tensor _c10d_functional::all_reduce _c10d_functional::all_to_all_single "
        "_c10d_functional::broadcast _c10d_functional::reduce_scatter_tensor _dtensor::shard_dim_alltoall"
    ),
}

# The operators return views that the schema does not declare.
_HIDDEN_VIEWS = {
    "aten::_unsafe_view",  # the end of every matrix product of more than two dimensions
    "aten::unsafe_chunk",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
}


MASK = "boolean mask"
"""A `host_wait`; autograd's node of the operator waits as well."""

_READS_DEVICE = {"aten::equal", "aten::_linalg_check_errors"}  # beside the operators with tags of torch


class OpKind(NamedTuple):
    """Properties shared by all calls of an operator, cached: a forward makes dozens of calls per region.

    Attributes:
        conditions: any of the conditions makes a call expensive: a predicate, a pattern of modules around the call, or
            None for any call.
        is_always_expensive: expensive with any arguments, inside any module.
    """

    conditions: tuple[OpChoice | None, ...]
    is_always_expensive: bool
    is_hidden_view: bool
    communicates: bool


class ExpensiveOps:
    """The operators that a selective recipe treats as expensive.

    Args:
        choices: op classes of a recipe ("matmul", "matmul@self_attn") and predicates `f(op, *args, **kwargs) -> bool`.

    Attributes:
        modules: patterns of the modules that some choices are limited to.
    """

    def __init__(self, choices: tuple[OpChoice, ...]) -> None:
        self._choices = choices
        self._kinds: dict[Any, OpKind] = {}
        named = (op_class_of(choice) for choice in choices if isinstance(choice, str))
        self.modules = tuple({inside for _, inside in named if inside is not None})

    def is_expensive(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], inside: Collection[str] = ()
    ) -> bool:
        """Whether the call is expensive. `inside`: members of `modules` around the current place of the forward."""
        kind = self.kind_of(op)
        return kind.is_always_expensive or any(
            each in inside if isinstance(each, str) else each is not None and each(op, *args, **kwargs)
            for each in kind.conditions
        )

    def kind_of(self, op: Any) -> OpKind:
        kind = self._kinds.get(op)
        if kind is None:
            conditions = () if _is_never_expensive(op) else tuple(self._conditions(op))
            is_always = any(each is None for each in conditions)
            kind = self._kinds[op] = OpKind(conditions, is_always, is_hidden_view(op), communicates(op))
        return kind

    def _conditions(self, op: Any) -> Iterator[OpChoice | None]:
        classes = classes_of(op)
        for choice in self._choices:
            if isinstance(choice, str):
                word, inside = op_class_of(choice)
                if word in classes:
                    yield inside
            else:
                yield choice


def is_collective(op: Any) -> bool:
    """Whether the result of `op` may be read only after a wait."""
    return op_name(op).startswith("_c10d_functional::")


@functools.cache
def communicates(op: Any) -> bool:
    """Whether `op` exchanges data with other ranks, or waits for an exchange."""
    return op_name(op).startswith(("_c10d", "c10d", "_dtensor::", "fsdp::", "symm_mem::"))


@functools.cache
def is_hidden_view(op: Any) -> bool:
    """Whether `op` returns an undeclared view of the first argument, with a version counter apart from the base's."""
    return op_name(op) in _HIDDEN_VIEWS


def op_name(op: Any) -> str:
    """ "aten::mm"; higher-order operators get the namespace higher_order."""
    schema = getattr(op, "_schema", None)
    return schema.name if schema is not None else f"higher_order::{getattr(op, '_name', op)}"


def classes_of(op: Any) -> list[str]:
    """Members of OP_CLASSES that contain `op`."""
    name = op_name(op)
    if "backward" in name:
        return []
    return [word for word, patterns in _PATTERNS.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns.split())]


def returns_no_new_memory(op: Any) -> bool:
    """Whether `op` changes an argument or returns a view: a saved result cannot replace such a call."""
    schema = getattr(op, "_schema", None)
    return schema is not None and (schema.is_mutable or is_view(op))


@functools.cache
def is_view(op: Any) -> bool:
    """Whether `op` returns an alias of an argument, declared or hidden."""
    schema = getattr(op, "_schema", None)
    return is_hidden_view(op) or (schema is not None and any(r.alias_info is not None for r in schema.returns))


def host_wait(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str) -> str:
    """Why the host waits for a device of `device_type` in the call: ".item()", "nonzero", `MASK`, ...; "" if not."""
    name = op_name(op)
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return _wait_of_indices(device_type, *args)
    if name == "aten::lift_fresh":  # the end of torch.tensor(data), whose copy no mode sees
        return _wait_of_copy(torch.device("cpu"), args[0].device, device_type)
    if name == "aten::_to_copy":
        is_queued, target = kwargs.get("non_blocking", False), kwargs.get("device") or args[0].device
        return "" if is_queued else _wait_of_copy(args[0].device, target, device_type)
    if name == "aten::copy_":
        is_queued = any(args[2:]) and (args[0].device.type != "cpu" or args[0].is_pinned())
        return "" if is_queued else _wait_of_copy(args[1].device, args[0].device, device_type)
    if not _reads_device(op) or kwargs.get("output_size") is not None:  # repeat_interleave with a known size
        return ""
    devices = {t.device.type for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
    short = name.removeprefix("aten::").strip("_2")
    return "" if device_type not in devices else {"local_scalar_dense": ".item()"}.get(short, short)


@functools.cache
def _reads_device(op: Any) -> bool:
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return op_name(op) in _READS_DEVICE or not tags.isdisjoint(getattr(op, "tags", ()))


def _wait_of_indices(
    device_type: str, t: torch.Tensor, indices: Sequence[torch.Tensor | None],
    values: torch.Tensor | None = None, accumulates: bool = False, *_: object,
) -> str:  # fmt: skip
    if t.device.type != device_type:
        return ""
    given = [index for index in indices if index is not None]
    masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
    if any(mask.device == t.device for mask in masks):
        is_fill = values is not None and values.numel() == 1 and values.device.type == "cpu" and len(given) == 1
        return "" if is_fill and not accumulates else MASK  # t[mask] = 0 selects nothing
    # A mask on the host is read there, and its copy is queued; numbers and their positions are copied by the kernel.
    copied = [values, *(index for index in given if not masks)]
    return "copy from the host" if any(each is not None and each.device != t.device for each in copied) else ""


def _wait_of_copy(source: torch.device, target: torch.device, device_type: str) -> str:
    if source.type == target.type or {source.type, target.type} != {"cpu", device_type}:
        return ""
    return "copy to the host" if target.type == "cpu" else "copy from the host"


def rng_device(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device whose generator the call may advance; None for a call without random numbers."""
    if not _may_use_rng(op):
        return None
    schema = op._schema
    # A dispatch mode does not receive arguments equal to their defaults.
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    if values.get("dropout_p") == 0.0:
        return None  # attention without dropout
    tensors = (value.device for value in values.values() if isinstance(value, torch.Tensor))
    return next(tensors, torch.device(values.get("device") or "cpu"))


@functools.cache
def _may_use_rng(op: Any) -> bool:
    has_schema = getattr(op, "_schema", None) is not None
    return has_schema and (_is_tagged_random(op) or not op_name(op).startswith("aten::"))  # only aten sets the tag


def _is_tagged_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


class RefuseRngMode(OperatorMode):
    """Around a region's forward during a graph capture, when no generator state can be restored.

    Raises CaptureError at a call that uses random numbers of a device.
    """

    def __init__(self, region: str) -> None:
        super().__init__()
        self._region = region

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = rng_device(op, args, kwargs) if _is_tagged_random(op) else None
        if device is not None and device.type != "cpu":
            raise CaptureError(
                f"{self._region} uses random numbers ({op}) during a graph capture, and recomputation could not repeat "
                "the numbers: give the region the recipe 'keep' or 'offload', or switch dropout off"
            )
        return self.run_op(op, args, kwargs)


def _is_never_expensive(op: Any) -> bool:
    # Autocast caches casts of leaves: a recomputation may run fewer casts than the forward, or more.
    return returns_no_new_memory(op) or op_name(op) == "aten::_to_copy"
