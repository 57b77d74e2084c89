"""Settings of `ebbtide.offload` as a command line gives them."""

from dataclasses import dataclass, field, fields
from typing import Any

from ebbtide._plans import Plan
from ebbtide._settings import LEAST_BYTES


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
    offload_plan: str | None = field(default=None, metadata={"help": "The path of a plan's file, instead of a recipe."})
    offload_include: list[str] | None = field(
        default=None,
        metadata={"nargs": "+", "help": "Names or patterns of modules: only what is saved inside travels."},
    )
    offload_exclude: list[str] | None = field(
        default=None, metadata={"nargs": "+", "help": "Names or patterns of modules: what is saved inside stays."}
    )
    offload_keep_last: int | None = field(
        default=None, metadata={"type": int, "help": "What the last so many blocks save stays."}
    )
    offload_regions: list[str] | None = field(
        default=None, metadata={"nargs": "+", "help": "Names or patterns of the modules that are planned one by one."}
    )
    offload_profile: str | None = field(default=None, metadata={"help": "The path of a profile's file."})
    offload_on_oom: str | None = field(
        default=None, metadata={"help": "'raise', or 'replan' for less than the budget when memory runs out."}
    )
    offload_verify: int | None = field(
        default=None,
        metadata={"type": int, "help": "Compare recomputation with forward in every so many-th forward; 0: never."},
    )
    offload_store: str | None = field(default=None, metadata={"help": "'host', 'disk', 'disk:/folder' or 'mock'."})
    offload_window: str | None = field(
        default=None, metadata={"help": "Most bytes on their way out before compute waits: '512MiB'."}
    )
    offload_prefetch: str | None = field(
        default=None, metadata={"help": "Most bytes brought back before backward asks for them: '512MiB'."}
    )
    offload_min_bytes: str | None = field(
        default=None, metadata={"help": "Saves of smaller storages stay where they are: '1MiB'."}
    )
    offload_host_limit: str | None = field(default=None, metadata={"help": "Most host memory to take: '64GiB'."})

    def settings(self) -> dict[str, Any]:
        """Keywords of `ebbtide.offload`. Raises PlanError for a plan's file that is none: what else is wrong with them
        is said there."""
        names = [each.name for each in fields(OffloadArguments)]  # of a subclass the others are its own
        values = {name.removeprefix("offload_"): getattr(self, name) for name in names}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if "budget" in given:
            given["budget"] = _share_or_text(given["budget"])
        if "plan" in given:
            given["plan"] = Plan.load(given["plan"])
        return given


def _share_or_text(budget: str) -> float | str:
    """The budget of a command line: a number is a share, or bytes if large enough. `offload` refuses other numbers."""
    try:
        number = float(budget)
    except ValueError:
        return budget
    return number if number < LEAST_BYTES else budget
