"""Parameters of a region as operands of derivations."""

import operator
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import Parameter

from ebbtide._utils.torch_private import modules_of, parameters_of

_address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


class _Values(NamedTuple):
    """Addresses and versions of parameters, in equal order."""

    addresses: list[int]
    versions: list[int]


def _values_of(parameters: list[Parameter]) -> _Values:
    # map reads in C: twice for each region of a forward.
    return _Values(list(map(_address_of, parameters)), list(map(_version_of, parameters)))


class RegionParameters:
    """The parameters of a region, their values at the begin of a forward, and the norms that they belong to.

    A derivation may read a parameter in backward only if the parameter still has the value that the operator has read.
    Sharding frees weights after their module has run, or swaps them: no derivation in such a region.
    """

    def __init__(self, region: str, module: torch.nn.Module) -> None:
        self.region = region
        self._is_trusted = False
        self._known = [weakref.ref(p) for p in parameters_of(module)]
        self._norms = [
            weakref.ref(each) for each in modules_of(module) if isinstance(getattr(each, "eps", None), float)
        ]
        self._identities: list[int] = []  # at entry, as the values
        self._at_entry = _Values([], [])
        self._plain: list[int] | None = None  # addresses of parameters known as plain
        self._is_steady: bool | None = None

    def trust(self) -> None:
        """A plan from measured steps derives in the region: in the first forward too, or the forward would go over the
        budget. Otherwise the first forward has to show that parameters stay as they are."""
        self._is_trusted = True

    def enter(self) -> None:
        """The forward of the region begins."""
        parameters = self._parameters()
        self._identities, self._at_entry = list(map(id, parameters)), _values_of(parameters)
        if self._is_steady or (self._is_steady is None and self._is_trusted):
            self._is_steady = self._are_plain(self._at_entry)

    def leave(self) -> None:
        """The forward of the region has ended."""
        if self._is_steady is not False:
            values = _values_of(self._parameters())
            self._is_steady = self._at_entry == values and self._are_plain(values)

    @property
    def is_steady(self) -> bool:
        """Whether the parameters are plain tensors that no forward so far has changed or replaced."""
        return self._is_steady is True

    def may_read(self, parameter: Parameter) -> bool:
        """Whether `parameter` is the region's, and unchanged since the begin of the forward."""
        if id(parameter) not in self._identities:
            return False
        at = self._identities.index(id(parameter))
        addresses, versions = self._at_entry
        return (addresses[at], versions[at]) == (parameter.data_ptr(), parameter._version)

    def norm_of(self, weight: torch.Tensor | None) -> torch.nn.Module | None:
        """A norm with `weight`, or any norm without a weight; None if norms in question differ in their epsilon."""
        norms = [norm for ref in self._norms if (norm := ref()) is not None and _has_weight(norm, weight)]
        return norms[0] if len({norm.eps for norm in norms}) == 1 else None

    def _parameters(self) -> list[Parameter]:
        """Those still alive, without subclasses: these may have no address."""
        return [p for ref in self._known if (p := ref()) is not None and type(p) is Parameter]

    def _are_plain(self, values: _Values) -> bool:
        """Whether all parameters are plain; looked up again only after a change of addresses.

        A parameter that has died was replaced, by a shard as a rule. While the region runs, gathered weights stand in
        the place of the shards, and look plain.
        """
        if values.addresses != self._plain:
            known = [ref() for ref in self._known]
            self._plain = values.addresses if all(p is not None and _is_plain(p) for p in known) else None
        return self._plain is not None


def _has_weight(norm: torch.nn.Module, weight: torch.Tensor | None) -> bool:
    # Most norms have registered the weight, or None; `getattr` runs Python code of torch for each of them.
    registered = norm._parameters
    own: object = registered["weight"] if "weight" in registered else getattr(norm, "weight", None)
    if own is None or weight is None:
        return own is weight
    return isinstance(own, torch.Tensor) and own.data_ptr() == weight.data_ptr()  # saved tensors are aliases


def _is_plain(parameter: Parameter) -> bool:
    if type(parameter) is not Parameter or parameter.layout is not torch.strided or hasattr(parameter, "ds_id"):
        return False  # a shard of DTensor or ZeRO, or quantised
    return 0 < parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
