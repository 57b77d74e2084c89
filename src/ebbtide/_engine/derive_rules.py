"""What autograd's nodes say about the tensors that they have made: an expression for each class of nodes.

A rule exists only where the node, its edges and the module that owns the weight tell every argument of the operator. No
rule for padding (the node does not tell the value), dropout (whether it is in training) and indexing (the indices).
"""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from ebbtide._engine.derive import Expression
from ebbtide._engine.derive_parameters import RegionParameters
from ebbtide._engine.parcel import Kept, keep
from ebbtide._utils.torch_private import output_of, saved_by

_aten: Any = torch.ops.aten
Op: TypeAlias = Callable[..., torch.Tensor]

_MOST_OPERATORS = 16  # of an expression: bounds the time of a look
_RAW = "_raw_saved_"
_LEAF = "AccumulateGrad"

Signature: TypeAlias = tuple[Any, ...]
"""Of an expression: the rules of its nodes in order, and None for known operands."""

IsOperand: TypeAlias = Callable[[Any, Callable[[Any], torch.Tensor]], bool]
"""Whether a packed tensor may be an operand, given its unpack hook."""


class Deriver:
    """Finds expressions for the outputs of nodes.

    Attributes:
        has_norm: the expression found last has an epsilon that a module tells. A function may be called with another.

    Args:
        is_operand: decides about tensors that hooks have packed.
        known: returns what was saved in the region of an output of a node, packed, or an expression; None: nothing.
        first: sequence number of the region's first node: a region derives from what it saves itself.
        parameters: of the region.
    """

    def __init__(self, is_operand: IsOperand, known: "KnownOperands", first: int, parameters: RegionParameters) -> None:
        self._is_operand = is_operand
        self._known = known
        self._first = first
        self._parameters = parameters
        self._found: dict[tuple[Any, int], Any] = {}  # by node and number of the output
        self._signature: list[Any] = []
        self.has_norm = False

    def derive(self, node: Any) -> Expression | None:
        """An expression for the first output of `node`; None for unknown operators or operands."""
        self._found = {}
        self._signature = []
        self.has_norm = False
        return self._expression_of(node, 0) if self._parameters.is_steady else None

    @property
    def signature(self) -> Signature:
        """Of the expression found last."""
        return tuple(self._signature)

    def comparison(self, index: int, dtype: torch.dtype) -> Hashable:
        """Equal for tensors of which one comparison with the derived tensor serves all: saved tensor number `index` of
        equal regions, by the expression found last."""
        return self._parameters.region if self.has_norm else "", index, dtype, self.signature

    def _expression_of(self, node: Any, number: int) -> Expression | None:
        rule = _RULES.get(type(node).__name__)
        if rule is None or node._sequence_nr() < self._first or len(self._signature) == _MOST_OPERATORS:
            return None
        self._signature.append(rule)
        try:
            return rule(self, node, number)
        except AttributeError:
            # A release of torch whose node tells less loses the rule, and no training. The tests of rules notice.
            return None

    def _result_of(self, node: Any, number: int) -> Any:
        """Output `number` of `node`, packed, or an expression; None if neither is known."""
        known = self._known.result(node, number)
        if known is not None:
            self._signature.append(None)
            return known
        name = type(node).__name__
        if name == _LEAF:
            # The input of a region is a leaf only where the region is recomputed.
            leaf = node.variable
            is_known = isinstance(leaf, torch.nn.Parameter) and self._parameters.may_read(leaf)
            return keep(leaf, self._parameters.region) if is_known else None
        key = node, number
        if key not in self._found:
            saved = None if number else _SAVED_RESULTS.get(name)
            self._found[key] = self._expression_of(node, number) if saved is None else self.saved(node, saved)
        elif type(self._found[key]) is Expression:
            self._found[key].is_shared = True
        return self._found[key]

    def saved(self, node: Any, attribute: str) -> Any:
        """A tensor saved by `node`, packed; None for no tensor and for a tensor packed by others."""
        packed, unpack = saved_by(node, attribute)
        return packed if unpack is not None and self._is_operand(packed, unpack) else None

    def before(self, node: Any, edge: int) -> Any:
        """The operand that came along an edge of `node`, packed or an expression; None if unknown or constant."""
        behind, number = node.next_functions[edge]
        return None if behind is None else self._result_of(behind, number)

    def operand(self, node: Any, attribute: str, edge: int) -> Any:
        """An operand that `node` has saved, or else as known by the edge."""
        saved = self.saved(node, attribute)
        return self.before(node, edge) if saved is None else saved

    def norm_of(self, weight: Any) -> Any:
        """The module of a norm, by the packed weight; None if unknown."""
        self.has_norm = True
        return self._parameters.norm_of(cast("Kept", weight)[0] if isinstance(weight, tuple) else weight)


def has_tensor(node: Any, attribute: str) -> bool:
    """Whether `node` has saved a tensor under the name, whoever packed the tensor."""
    return saved_by(node, attribute)[0] is not None


class KnownOperands:
    """Saved tensors of a region, for derivations of others. Keeps no memory alive: unused branches die in forward.

    Nodes carry a reference to what was saved of them: sequence numbers are of a thread.

    Attributes:
        used: numbers of the saved tensors that derivations have asked for.
    """

    def __init__(self) -> None:
        self._leaves: dict[int, tuple[int, Callable[[], Any]]] = {}
        self._mark = object()  # of the present call of a region
        self.used: set[int] = set()

    def clear(self) -> None:
        """Begin with another region."""
        self._leaves.clear()
        self._mark = object()
        self.used = set()

    def add(self, t: torch.Tensor, packed: Any, index: int) -> None:
        """Note saved tensor number `index`, packed."""
        if t._version:
            return
        node, known = t.grad_fn, (index, _weakly(packed))
        if node is None:
            self._leaves[id(t)] = known
            return
        self._marks(node)[t.output_nr] = known
        source = _source_of_cast(node)
        if source is not None:
            self._marks(source[0])[_CAST, source[1]] = (*known, source[2])

    def result(self, node: Any, number: int) -> Any:
        """Output `number` of `node` as noted, packed, or an expression; None if unknown or gone."""
        if type(node).__name__ == _LEAF:
            return self._get(self._leaves.get(id(node.variable)))
        mark, marks = node.metadata.get(_KEY, _UNMARKED)
        if mark is not self._mark:
            return None
        found = self._get(marks.get(number))
        if found is not None or (_CAST, number) not in marks:
            return found
        index, reference, dtype = marks[_CAST, number]
        result = self._get((index, reference))
        return None if result is None else Expression(_aten._to_copy.default, (result,), {"dtype": dtype})

    def _marks(self, node: Any) -> dict[Any, Any]:
        """Of the present call."""
        metadata: dict[str, Any] = node.metadata
        mark, marks = cast("tuple[object, dict[Any, Any]]", metadata.get(_KEY, _UNMARKED))
        if mark is not self._mark:
            marks = {}
            metadata[_KEY] = self._mark, marks
        return marks

    def _get(self, known: tuple[int, Callable[[], Any]] | None) -> Any:
        packed = None if known is None else known[1]()
        if known is None or packed is None:
            return None
        self.used.add(known[0])
        return packed


_KEY = "ebbtide"  # of a node's metadata
_UNMARKED: tuple[object, dict[Any, Any]] = None, {}
_CAST = "cast"  # a wider copy of an output: the output's number, and the type to cast back to


def _weakly(packed: Any) -> Callable[[], Any]:
    if not isinstance(packed, tuple):
        return weakref.ref(packed)
    alias, version, region = cast(Kept, packed)
    reference = weakref.ref(alias)

    def kept() -> Kept | None:
        alias = reference()
        return None if alias is None else (alias, version, region)

    return kept


def _source_of_cast(node: Any) -> tuple[Any, int, torch.dtype] | None:
    """The node, number and type of the tensor that `node` has cast to a wider type: casting back restores every bit."""
    if type(node).__name__ != "ToCopyBackward0" or node.next_functions[0][0] is None:
        return None
    source, number = node.next_functions[0]
    if type(source).__name__ == _LEAF:
        return None
    own, result = output_of(source, number), output_of(node)
    is_exact = own.device == result.device and (own.dtype, result.dtype) in _WIDENINGS
    return (source, number, own.dtype) if is_exact else None


_WIDENINGS = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


# -- rules -------------------------------------------------------------------------------------------------------------

_Rule: TypeAlias = Callable[[Deriver, Any, int], "Expression | None"]
_Settings: TypeAlias = Callable[[Any, int], dict[str, Any]]
"""Settings of an operator, from the node and the number of the output."""


def _of_saved(op: Op, *names: str) -> _Rule:
    """An operator on `self`, which the node has saved, with settings of these names."""
    settings = [(name, f"_saved_{name}") for name in names]

    def rule(deriver: Deriver, node: Any, _: int) -> Expression | None:
        own = deriver.saved(node, "_raw_saved_self")
        if own is None:
            return None
        return Expression(op, (own,), {name: getattr(node, attribute) for name, attribute in settings})

    return rule


def _of_both(op: Op, one: str, other: str) -> _Rule:
    """An operator on two operands of these names, saved or known by their edges."""
    one, other = _RAW + one, _RAW + other

    def rule(deriver: Deriver, node: Any, _: int) -> Expression | None:
        first = deriver.operand(node, one, 0)
        second = None if first is None else deriver.operand(node, other, 1)
        return None if second is None else Expression(op, (first, second))

    return rule


def _of_sum(op: Op) -> _Rule:
    def rule(deriver: Deriver, node: Any, _: int) -> Expression | None:
        first = deriver.before(node, 0)
        second = None if first is None else deriver.before(node, 1)
        return None if second is None else Expression(op, (first, second), {"alpha": node._saved_alpha})

    return rule


def _of_before(op: Op, settings: _Settings = lambda _node, _number: {}) -> _Rule:
    """An operator on the operand of the only edge."""

    def rule(deriver: Deriver, node: Any, number: int) -> Expression | None:
        own = deriver.before(node, 0)
        return None if own is None else Expression(op, (own,), settings(node, number))

    return rule


def _dim(wrapped: int) -> int:
    """A dimension as saved by a node: negative numbers come as unsigned."""
    return wrapped - 2**64 if wrapped >= 2**63 else wrapped


def _shape(node: Any, number: int) -> dict[str, Any]:
    return {"shape": output_of(node, number).shape}


def _cast(deriver: Deriver, node: Any, _: int) -> Expression | None:
    own, output = deriver.before(node, 0), output_of(node)
    if own is None or output_of(*node.next_functions[0]).device != output.device:
        return None
    return Expression(_aten._to_copy.default, (own,), {"dtype": output.dtype})


def _cat(deriver: Deriver, node: Any, _: int) -> Expression | None:
    operands = [deriver.before(node, edge) for edge in range(len(node.next_functions))]
    if any(each is None for each in operands):
        return None
    return Expression(_concatenated, operands, {"dim": _dim(node._saved_dim)})


def _concatenated(*parts: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat(parts, dim)


def _addmm(deriver: Deriver, node: Any, _: int) -> Expression | None:
    bias, one = deriver.before(node, 0), deriver.operand(node, "_raw_saved_mat1", 1)
    other = None if bias is None or one is None else deriver.operand(node, "_raw_saved_mat2", 2)
    if other is None:
        return None
    settings = {"beta": node._saved_beta, "alpha": node._saved_alpha}
    return Expression(_aten.addmm.default, (bias, one, other), settings)


def _grouped_mm(deriver: Deriver, node: Any, _: int) -> Expression | None:
    one, other = deriver.operand(node, "_raw_saved_self", 0), deriver.operand(node, "_raw_saved_mat2", 1)
    ends = deriver.saved(node, "_raw_saved_offs")
    if one is None or other is None or (ends is None and has_tensor(node, "_raw_saved_offs")):
        return None
    return Expression(_aten._grouped_mm.default, (one, other, ends))


def _convolution(deriver: Deriver, node: Any, _: int) -> Expression | None:
    own, weight = deriver.operand(node, "_raw_saved_input", 0), deriver.operand(node, "_raw_saved_weight", 1)
    bias = deriver.before(node, 2)
    # No tensor: a frozen bias has sizes and no edge.
    if own is None or weight is None or (bias is None and tuple(node._saved_bias_sym_sizes_opt or (0,)) != (0,)):
        return None
    names = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    settings = {name: getattr(node, f"_saved_{name}") for name in names}
    return Expression(_aten.convolution.default, (own, weight, bias), settings)


def _layer_norm(deriver: Deriver, node: Any, _: int) -> Expression | None:
    names = "input", "weight", "bias"
    own, weight, bias = operands = [deriver.saved(node, _RAW + name) for name in names]
    if own is None or any(o is None and has_tensor(node, _RAW + n) for n, o in zip(names, operands, strict=True)):
        return None
    norm = deriver.norm_of(weight)  # the node does not tell the epsilon
    if norm is None:
        return None
    settings = {"shape": node._saved_normalized_shape, "epsilon": norm.eps}
    return Expression(_layer_normed, (own, weight, bias), settings)


def _layer_normed(
    t: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, shape: Sequence[int], epsilon: float
) -> torch.Tensor:
    return _aten.native_layer_norm.default(t, shape, weight, bias, epsilon)[0]


def _group_norm(deriver: Deriver, node: Any, _: int) -> Expression | None:
    own, weight, bias = (
        deriver.saved(node, "_raw_saved_input"), deriver.saved(node, "_raw_saved_weight"), deriver.before(node, 2)
    )  # fmt: skip
    norm = None if own is None or weight is None or bias is None else deriver.norm_of(weight)
    if norm is None:  # a frozen bias leaves no trace, and from torch 2.15 on nodes do not tell the epsilon
        return None
    settings = {name: getattr(node, f"_saved_{name}") for name in ("N", "C", "HxW", "group")}
    return Expression(_group_normed, (own, weight, bias), {**settings, "eps": norm.eps})


def _group_normed(t: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **settings: Any) -> torch.Tensor:
    return _aten.native_group_norm.default(t, weight, bias, **settings)[0]


def _split(t: torch.Tensor, size: Any, dim: int, number: int) -> torch.Tensor:
    return torch.split(t, size, dim)[number]


def _unbound(t: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    return torch.unbind(t, dim)[number]


def _glu(t: torch.Tensor, dim: int) -> torch.Tensor:
    return _aten.glu.default(t, _dim(dim))


def _contiguous(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format)


_SAVED_RESULTS: Mapping[str, str] = {
    **{
        f"{name}Backward0": "_raw_saved_result"
        for name in ("Exp", "LogSoftmax", "Relu", "Rsqrt", "SafeSoftmax", "Sigmoid", "Softmax", "Sqrt", "Tanh")
    },
    **{
        f"ScaledDotProduct{name}Backward0": "_raw_saved_output"
        for name in ("CudnnAttention", "EfficientAttention", "FlashAttention", "FlashAttentionForCpu")
    },
}
"""Nodes that save the first output: the class, and the attribute with the output."""

_RULES: Mapping[str, _Rule] = {
    # one kernel that reads and writes memory
    "AbsBackward0": _of_saved(_aten.abs.default),
    "AddBackward0": _of_sum(_aten.add.Tensor),
    "CatBackward0": _cat,
    "ClampBackward1": _of_saved(_aten.clamp.default, "min", "max"),
    "CloneBackward0": _of_before(_contiguous),
    "CosBackward0": _of_saved(_aten.cos.default),
    "DivBackward0": _of_both(_aten.div.Tensor, "self", "other"),
    "EluBackward0": _of_saved(_aten.elu.default, "alpha", "scale", "input_scale"),
    "GeluBackward0": _of_saved(_aten.gelu.default, "approximate"),
    "GluBackward0": _of_saved(_glu, "dim"),
    "HardswishBackward0": _of_saved(_aten.hardswish.default),
    "LeakyReluBackward0": _of_saved(_aten.leaky_relu.default, "negative_slope"),
    "MishBackward0": _of_saved(_aten.mish.default),
    "MulBackward0": _of_both(_aten.mul.Tensor, "self", "other"),
    "NativeGroupNormBackward0": _group_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "NegBackward0": _of_before(_aten.neg.default),
    "PowBackward0": _of_saved(_aten.pow.Tensor_Scalar, "exponent"),
    "SiluBackward0": _of_saved(_aten.silu.default),
    "SinBackward0": _of_saved(_aten.sin.default),
    "SoftplusBackward0": _of_saved(_aten.softplus.default, "beta", "threshold"),
    "SubBackward0": _of_sum(_aten.sub.Tensor),
    "ToCopyBackward0": _cast,
    "UpsampleNearest2DBackward0": _of_before(
        _aten.upsample_nearest2d.default,
        lambda node, _: {
            "output_size": node._saved_output_size,
            "scales_h": node._saved_scales_h,
            "scales_w": node._saved_scales_w,
        },
    ),
    # products of matrices
    "AddmmBackward0": _addmm,
    "BmmBackward0": _of_both(_aten.bmm.default, "self", "mat2"),
    "ConvolutionBackward0": _convolution,
    "GroupedMmBackward0": _grouped_mm,
    "MmBackward0": _of_both(_aten.mm.default, "self", "mat2"),
    # views
    "ExpandBackward0": _of_before(torch.Tensor.expand, lambda node, number: {"size": output_of(node, number).shape}),
    "PermuteBackward0": _of_before(torch.permute, lambda node, _: {"dims": [*map(_dim, node._saved_dims)]}),
    "ReshapeAliasBackward0": _of_before(torch.reshape, _shape),
    "SelectBackward0": _of_before(
        torch.select, lambda node, _: {"dim": _dim(node._saved_dim), "index": _dim(node._saved_index)}
    ),
    "SliceBackward0": _of_before(
        _aten.slice.Tensor,
        lambda node, _: {
            "dim": _dim(node._saved_dim),
            "start": _dim(node._saved_start),
            "end": _dim(node._saved_end),
            "step": node._saved_step,
        },
    ),
    "SplitBackward0": _of_before(
        _split, lambda node, number: {"size": node._saved_split_size, "dim": _dim(node._saved_dim), "number": number}
    ),
    "SplitWithSizesBackward0": _of_before(
        _split, lambda node, number: {"size": node._saved_split_sizes, "dim": _dim(node._saved_dim), "number": number}
    ),
    "SqueezeBackward1": _of_before(torch.reshape, _shape),
    "TBackward0": _of_before(_aten.t.default),
    "TransposeBackward0": _of_before(
        torch.transpose, lambda node, _: {"dim0": _dim(node._saved_dim0), "dim1": _dim(node._saved_dim1)}
    ),
    "UnbindBackward0": _of_before(_unbound, lambda node, number: {"dim": _dim(node._saved_dim), "number": number}),
    "UnsafeViewBackward0": _of_before(torch.reshape, _shape),
    "UnsqueezeBackward0": _of_before(torch.reshape, _shape),
    "ViewBackward0": _of_before(torch.reshape, _shape),
}
