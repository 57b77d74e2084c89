"""Settings of `ebbtide.offload` as a command line gives them."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class OffloadArguments:
    """Settings of `ebbtide.offload` for HfArgumentParser, each behind "offload_"; what is not given is left to it."""

    offload_budget: str | None = field(
        default=None, metadata={"help": "The peak of device memory to stay under: '40GiB', or a share such as 0.8."}
    )
    offload_mode: str | None = field(default=None, metadata={"help": "'auto', 'all' or 'off'."})
    offload_recipe: str | None = field(
        default=None, metadata={"help": "'keep', 'offload', 'recompute' or 'selective', for all blocks."}
    )
    offload_profile: str | None = field(default=None, metadata={"help": "The path of a profile's file."})
    offload_store: str | None = field(default=None, metadata={"help": "'host', 'disk', 'disk:/folder' or 'mock'."})
    offload_host_limit: str | None = field(default=None, metadata={"help": "Most host memory to take: '64GiB'."})

    def settings(self) -> dict[str, Any]:
        """Keywords of `ebbtide.offload`. Raises nothing: what is wrong with them is said there."""
        names = [each.name for each in fields(OffloadArguments)]  # of a subclass the others are its own
        values = {name.removeprefix("offload_"): getattr(self, name) for name in names}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if "budget" in given:
            given["budget"] = _share_or_text(given["budget"])
        return given


def _share_or_text(budget: str) -> float | str:
    """A parser knows text only, and a share is a number; one that is larger is bytes."""
    try:
        share = float(budget)
    except ValueError:
        return budget
    return share if share <= 1 else budget
