"""What a planner is told of operators."""

from collections.abc import Mapping
from typing import Any

from ebbtide._plans import OP_CLASSES
from ebbtide._recompute.ops import ExpensiveOps
from ebbtide._recompute.provenance import Provenance


class AnyDear:
    """Dear is a call of any of the classes of operators that a planner may hold the outputs of."""

    def __init__(self) -> None:
        self._ops = ExpensiveOps(tuple(OP_CLASSES))

    def is_dear(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return self._ops.is_dear(op, args, kwargs, ())

    def lineage(self) -> Provenance:
        return Provenance()
