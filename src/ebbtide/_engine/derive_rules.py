"""What autograd's nodes say about the tensors that they have made: an expression for each class of nodes."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from ebbtide._engine.derive import Expression
from ebbtide._engine.parcel import Kept, keep
from ebbtide._utils.torch_private import output_of, saved_by

_aten: Any = torch.ops.aten
Op: TypeAlias = Callable[..., torch.Tensor]

_USUAL = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3)  # epsilons of norms: defaults of torch, transformers and diffusers
_MOST_OPERATORS = 16  # of an expression: bounds the time of a look
_RAW = "_raw_saved_"

Signature: TypeAlias = tuple[Any, ...]
"""Of an expression: the rules of its nodes in order, None for known operands, and the epsilon for a LayerNorm. Equal
signatures compute alike."""

Key: TypeAlias = tuple[int, int]
"""A tensor as the output of a node: the node's sequence number, and the number of the output."""

IsOperand: TypeAlias = Callable[[Any, Callable[[Any], torch.Tensor]], bool]
"""Whether a packed tensor may be an operand, given its unpack hook."""


class Deriver:
    """Finds expressions for the outputs of nodes.

    Args:
        is_operand: decides about tensors that hooks have packed.
        region: name for operands that no hook has packed.
        known: returns a tensor that the region has saved so far, packed, or an expression; None for any other.
        first: sequence number of the region's first node: a region derives from what it saves itself.
    """

    def __init__(self, is_operand: IsOperand, region: str, known: Callable[[Key], Any], first: int) -> None:
        self._is_operand = is_operand
        self._region = region
        self._known = known
        self._first = first
        self._found: dict[Key, Any] = {}
        self._signature: list[Any] = []
        self.epsilon = 0.0

    def derive(self, node: Any, epsilon: float) -> Expression | None:
        """An expression for the first output of `node`; None for unknown operators or operands.

        `epsilon`: of LayerNorms, whose nodes do not tell.
        """
        self.epsilon = epsilon
        self._found = {}
        self._signature = []
        return self._expression_of(node, 0)

    @property
    def signature(self) -> Signature:
        """Of the expression found last."""
        return tuple(self._signature)

    def _expression_of(self, node: Any, number: int) -> Expression | None:
        rule = _RULES.get(type(node).__name__)
        if rule is None or node._sequence_nr() < self._first or len(self._signature) == _MOST_OPERATORS:
            return None
        self._signature.append(self.epsilon if rule is _layer_norm else rule)
        return rule(self, node, number)

    def _result_of(self, node: Any, number: int) -> Any:
        """Output `number` of `node`, packed, or an expression; None if neither is known."""
        name = type(node).__name__
        key = _leaf_key(node.variable) if name == "AccumulateGrad" else (node._sequence_nr(), number)
        known = self._known(key)
        if known is not None:
            self._signature.append(None)
            return known
        if name == "AccumulateGrad":
            # The input of a region is a leaf only where the region is recomputed.
            return keep(node.variable, self._region) if isinstance(node.variable, torch.nn.Parameter) else None
        if key not in self._found:
            saved = None if number else _SAVED_RESULTS.get(name)
            self._found[key] = self._expression_of(node, number) if saved is None else self.saved(node, saved)
        elif type(self._found[key]) is Expression:
            self._found[key].is_shared = True
        return self._found[key]

    def saved(self, node: Any, attribute: str) -> Any:
        """A tensor saved by `node`, packed; None for no tensor and for a tensor packed by others."""
        packed, unpack = saved_by(node, attribute)
        if unpack is None:
            return None if packed is None else keep(packed, self._region)
        return packed if self._is_operand(packed, unpack) else None

    def before(self, node: Any, edge: int) -> Any:
        """The operand that came along an edge of `node`, packed or an expression; None if unknown."""
        behind, number = node.next_functions[edge]
        return None if behind is None else self._result_of(behind, number)

    def operand(self, node: Any, attribute: str, edge: int) -> Any:
        """An operand that `node` has saved, or else as known by the edge."""
        saved = self.saved(node, attribute)
        return self.before(node, edge) if saved is None else saved


def key_of(node: Any, number: int) -> Key:
    """The key of output `number` of `node`. Nodes of leaves have no numbers of their own."""
    return _leaf_key(node.variable) if type(node).__name__ == "AccumulateGrad" else (node._sequence_nr(), number)


def _leaf_key(t: torch.Tensor) -> Key:
    return -1, id(t)


class KnownOperands:
    """Saved tensors of a region, for derivations of others. Keeps no memory alive: unused branches die in forward.

    Attributes:
        used: numbers of the saved tensors that derivations have asked for.
    """

    def __init__(self) -> None:
        self._packed: dict[Key, tuple[int, Callable[[], Any]]] = {}
        self._casts: dict[Key, tuple[Key, torch.dtype]] = {}  # by the source: the result, and the type of the source
        self.used: set[int] = set()

    def clear(self) -> None:
        """Begin with another region."""
        if self._packed:
            self._packed.clear()
            self._casts.clear()
        self.used = set()

    def add(self, t: torch.Tensor, packed: Any, index: int) -> None:
        """Note saved tensor number `index`, packed."""
        if t._version:
            return
        node = t.grad_fn
        key = _leaf_key(t) if node is None else (node._sequence_nr(), t.output_nr)
        self._packed[key] = index, _weakly(packed)
        source = None if node is None else _source_of_cast(node)
        if source is not None:
            self._casts[source[0]] = key, source[1]

    def __call__(self, key: Key) -> Any:
        """The tensor that was noted under `key`, packed, or an expression; None if unknown or gone."""
        found = self._get(key)
        if found is not None or key not in self._casts:
            return found
        cast, dtype = self._casts[key]
        result = self._get(cast)
        if result is None:
            return None
        return Expression(_aten._to_copy.default, (result,), {"dtype": dtype})

    def _get(self, key: Key) -> Any:
        known = self._packed.get(key)
        if known is None:
            return None
        self.used.add(known[0])
        return known[1]()


def _weakly(packed: Any) -> Callable[[], Any]:
    if not isinstance(packed, tuple):
        return weakref.ref(packed)
    alias, version, region = cast(Kept, packed)
    reference = weakref.ref(alias)

    def kept() -> Kept | None:
        alias = reference()
        return None if alias is None else (alias, version, region)

    return kept


def _source_of_cast(node: Any) -> tuple[Key, torch.dtype] | None:
    """The tensor that `node` has cast to a wider type: casting back restores every bit."""
    if type(node).__name__ != "ToCopyBackward0" or node.next_functions[0][0] is None:
        return None
    source, number = node.next_functions[0]
    own, result = output_of(source, number), output_of(node)
    is_exact = own.device == result.device and (own.dtype, result.dtype) in _WIDENINGS
    return (key_of(source, number), own.dtype) if is_exact else None


_WIDENINGS = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}


def epsilons_for(signature: Signature, known: Sequence[float]) -> Sequence[float]:
    """Epsilons to try for an expression, the likeliest first: those `known` in the model, then the usual ones. None
    without a LayerNorm."""
    return tuple(dict.fromkeys((*known, *_USUAL))) if _has_layer_norm(signature) else ()


def _has_layer_norm(signature: Signature) -> bool:
    return any(type(each) is float for each in signature)


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
    if one is None or other is None:
        return None
    return Expression(_aten._grouped_mm.default, (one, other, deriver.saved(node, "_raw_saved_offs")))


def _convolution(deriver: Deriver, node: Any, _: int) -> Expression | None:
    own, weight = deriver.operand(node, "_raw_saved_input", 0), deriver.operand(node, "_raw_saved_weight", 1)
    if own is None or weight is None:
        return None
    names = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    settings = {name: getattr(node, f"_saved_{name}") for name in names}
    # The bias is not saved. Without an edge it is absent, or frozen: the comparison tells.
    return Expression(_aten.convolution.default, (own, weight, deriver.before(node, 2)), settings)


def _layer_norm(deriver: Deriver, node: Any, _: int) -> Expression | None:
    own = deriver.saved(node, "_raw_saved_input")
    if own is None:
        return None
    operands = own, deriver.saved(node, "_raw_saved_weight"), deriver.saved(node, "_raw_saved_bias")
    settings = {"shape": node._saved_normalized_shape, "epsilon": deriver.epsilon}
    return Expression(_layer_normed, operands, settings)


def _layer_normed(
    t: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, shape: Sequence[int], epsilon: float
) -> torch.Tensor:
    return _aten.native_layer_norm.default(t, shape, weight, bias, epsilon)[0]


def _group_norm(deriver: Deriver, node: Any, _: int) -> Expression | None:
    own = deriver.saved(node, "_raw_saved_input")
    if own is None:
        return None
    settings = {name: getattr(node, f"_saved_{name}") for name in ("N", "C", "HxW", "group", "eps")}
    # The bias as of a convolution.
    operands = own, deriver.saved(node, "_raw_saved_weight"), deriver.before(node, 2)
    return Expression(_group_normed, operands, settings)


def _group_normed(
    t: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, **settings: Any
) -> torch.Tensor:
    return _aten.native_group_norm.default(t, weight, bias, **settings)[0]


def _dropout(deriver: Deriver, node: Any, _: int) -> Expression | None:
    own, mask, kept = deriver.before(node, 0), deriver.saved(node, "_raw_saved_result1"), 1.0 - node._saved_p
    if own is None or mask is None or kept <= 0.0:
        return None
    return Expression(_aten.native_dropout_backward.default, (own, mask), {"scale": 1.0 / kept})


def _index(deriver: Deriver, node: Any, _: int) -> Expression | None:
    saved = node._raw_saved_indices
    own = deriver.before(node, 0)
    if own is None or len(saved) != 1 or saved[0].data is None or saved[0].unpack_hook is not None:
        return None
    return Expression(_aten.index.Tensor, (own,), {"indices": [saved[0].data]})


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
    "ConstantPadNdBackward0": _of_before(_aten.constant_pad_nd.default, lambda node, _: {"pad": node._saved_pad}),
    "CosBackward0": _of_saved(_aten.cos.default),
    "DivBackward0": _of_both(_aten.div.Tensor, "self", "other"),
    "EluBackward0": _of_saved(_aten.elu.default, "alpha", "scale", "input_scale"),
    "GeluBackward0": _of_saved(_aten.gelu.default, "approximate"),
    "GluBackward0": _of_saved(_glu, "dim"),
    "HardswishBackward0": _of_saved(_aten.hardswish.default),
    "IndexBackward0": _index,
    "LeakyReluBackward0": _of_saved(_aten.leaky_relu.default, "negative_slope"),
    "MishBackward0": _of_saved(_aten.mish.default),
    "MulBackward0": _of_both(_aten.mul.Tensor, "self", "other"),
    "NativeDropoutBackward0": _dropout,
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
            "start": node._saved_start,
            "end": node._saved_end,
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
