"""Settings of `ebbtide.offload` as a command line gives them."""

from dataclasses import dataclass, field, fields
from typing import Any

from ebbtide._config import SETTINGS, parse_budget
from ebbtide._plans import Plan


def _argument(name: str, **options: Any) -> dict[str, Any]:
    """Options of a parser, with the help of the setting `name`; in argparse "%" is a placeholder."""
    return {"help": str(SETTINGS[name]).replace("%", "%%"), **options}


@dataclass
class OffloadArguments:
    """Settings of `ebbtide.offload` for HfArgumentParser, each behind "offload_"; None: left to `offload`."""

    offload_budget: str | None = field(default=None, metadata=_argument("budget"))
    offload_max_slowdown: float | None = field(default=None, metadata=_argument("max_slowdown", type=float))
    offload_mode: str | None = field(default=None, metadata=_argument("mode"))
    offload_recipe: str | None = field(default=None, metadata=_argument("recipe"))
    offload_plan: str | None = field(default=None, metadata=_argument("plan"))
    offload_include: list[str] | None = field(default=None, metadata=_argument("include", nargs="+"))
    offload_exclude: list[str] | None = field(default=None, metadata=_argument("exclude", nargs="+"))
    offload_keep_last: int | None = field(default=None, metadata=_argument("keep_last", type=int))
    offload_regions: list[str] | None = field(default=None, metadata=_argument("regions", nargs="+"))
    offload_profile: str | None = field(default=None, metadata=_argument("profile"))
    offload_on_oom: str | None = field(default=None, metadata=_argument("on_oom"))
    offload_verify: int | None = field(default=None, metadata=_argument("verify", type=int))
    offload_store: str | None = field(default=None, metadata=_argument("store"))
    offload_window: str | None = field(default=None, metadata=_argument("window"))
    offload_prefetch: str | None = field(default=None, metadata=_argument("prefetch"))
    offload_min_bytes: str | None = field(default=None, metadata=_argument("min_bytes"))
    offload_host_limit: str | None = field(default=None, metadata=_argument("host_limit"))

    def settings(self) -> dict[str, Any]:
        """Keywords of `ebbtide.offload`, which checks their values.

        Raises:
            PlanError: the file at `offload_plan` is not a plan file.
        """
        names = [each.name for each in fields(OffloadArguments)]  # a subclass has fields of its own
        values = {name.removeprefix("offload_"): getattr(self, name) for name in names}
        settings: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if "budget" in settings:
            settings["budget"] = parse_budget(settings["budget"])
        if "plan" in settings:
            settings["plan"] = Plan.load(settings["plan"])
        return settings
