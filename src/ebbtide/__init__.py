"""Moves the activations of PyTorch training out of device memory and back before backward needs them, bit for bit."""

import importlib
import typing

if typing.TYPE_CHECKING:
    from ebbtide._context import OffloadActivations, offload_activations
    from ebbtide._dry_run import measure, plan
    from ebbtide._engine.process import release_memory
    from ebbtide._engine.stats import Count, Stats
    from ebbtide._errors import (
        CaptureError,
        ConfigError,
        DeviceError,
        EbbtideError,
        EbbtideWarning,
        ForeignAttributeError,
        MissingPackageError,
        ModifiedError,
        ModuleError,
        PlanError,
        RecomputeError,
        StoreError,
        StoreFullError,
    )
    from ebbtide._events import Event, EventKind
    from ebbtide._offload import OffloadHandle, offload
    from ebbtide._plans import Plan, Prediction, Recipe, RegionPlan, ReleasePoint
    from ebbtide._profiling.profile import Profile

_HOMES: dict[str, tuple[str, ...]] = {
    "ebbtide._errors": (
        "CaptureError",
        "ConfigError",
        "DeviceError",
        "EbbtideError",
        "EbbtideWarning",
        "ForeignAttributeError",
        "MissingPackageError",
        "ModifiedError",
        "ModuleError",
        "PlanError",
        "RecomputeError",
        "StoreError",
        "StoreFullError",
    ),
    "ebbtide._events": ("Event", "EventKind"),
    "ebbtide._context": ("OffloadActivations", "offload_activations"),
    "ebbtide._dry_run": ("measure", "plan"),
    "ebbtide._engine.process": ("release_memory",),
    "ebbtide._engine.stats": ("Stats", "Count"),
    "ebbtide._offload": ("OffloadHandle", "offload"),
    "ebbtide._plans": ("Plan", "Prediction", "Recipe", "RegionPlan", "ReleasePoint"),
    "ebbtide._profiling.profile": ("Profile",),
}
"""Module of each public name: `import ebbtide` imports none, so that `ebbtide --help` and the planner need no torch."""

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CaptureError",
    "ConfigError",
    "Count",
    "DeviceError",
    "EbbtideError",
    "EbbtideWarning",
    "Event",
    "EventKind",
    "ForeignAttributeError",
    "MissingPackageError",
    "ModifiedError",
    "ModuleError",
    "OffloadActivations",
    "OffloadHandle",
    "Plan",
    "PlanError",
    "Prediction",
    "Profile",
    "Recipe",
    "RecomputeError",
    "RegionPlan",
    "ReleasePoint",
    "Stats",
    "StoreError",
    "StoreFullError",
    "measure",
    "offload",
    "offload_activations",
    "plan",
    "release_memory",
]


def __getattr__(name: str) -> typing.Any:
    """Import a public name, or one of the packages `ebbtide.compat` and `ebbtide.integrations`, at its first use."""
    if name in _MODULE_OF:
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value
    if name in ("compat", "integrations"):
        return importlib.import_module(f"ebbtide.{name}")
    raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
