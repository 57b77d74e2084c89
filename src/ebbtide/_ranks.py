"""What all ranks of a job have to agree on goes through here."""

from typing import Any, TypeVar

import torch

from ebbtide.planner.ranks import Agree

Value = TypeVar("Value")


def agreement() -> Agree | None:
    """What gives the answers of all ranks for this rank's one; None where there is only one rank."""
    return None if _ranks() == 1 else gather


def gather(mine: Value) -> list[Value]:
    """What all ranks have, in order; every one of them has to call it."""
    if _ranks() == 1:
        return [mine]
    found: list[Any] = [None] * _ranks()
    torch.distributed.all_gather_object(found, mine)
    return found


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
