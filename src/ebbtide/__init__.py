"""Moves the activations of PyTorch training out of device memory and back before backward needs them, bit for bit.

No public name is imported before its first use, so that `ebbtide --help` and the planner run without torch.
"""

import importlib
import importlib.metadata
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
    from ebbtide._max_batch import max_batch
    from ebbtide._offload import OffloadHandle, offload
    from ebbtide._planner.batch_sizes import BatchRow, BatchSizes
    from ebbtide._plans import Plan, Prediction, Recipe, RegionPlan, ReleasePoint
    from ebbtide._profiling.profile import Profile

_MODULES = {
    "ebbtide._context": ("OffloadActivations", "offload_activations"),
    "ebbtide._dry_run": ("measure", "plan"),
    "ebbtide._engine.process": ("release_memory",),
    "ebbtide._engine.stats": ("Count", "Stats"),
    "ebbtide._events": ("Event", "EventKind"),
    "ebbtide._max_batch": ("max_batch",),
    "ebbtide._offload": ("OffloadHandle", "offload"),
    "ebbtide._planner.batch_sizes": ("BatchRow", "BatchSizes"),
    "ebbtide._plans": ("Plan", "Prediction", "Recipe", "RegionPlan", "ReleasePoint"),
    "ebbtide._profiling.profile": ("Profile",),
}
"""Public names by module; all errors are in `ebbtide._errors`."""

__all__ = [
    "BatchRow",
    "BatchSizes",
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
    "max_batch",
    "measure",
    "offload",
    "offload_activations",
    "plan",
    "release_memory",
]


def __getattr__(name: str) -> object:
    if name in ("compat", "integrations", "pipeline", "types"):
        return importlib.import_module(f"ebbtide.{name}")
    if name == "__version__":
        return importlib.metadata.version("ebbtide")
    if name not in __all__:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "ebbtide._errors")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return __all__
