"""Activations go out with the forward and are back before backward needs them, bit for bit."""

import importlib
import typing

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
from ebbtide._events import Event, What
from ebbtide.context import OffloadActivations, offload_activations
from ebbtide.engine.ledger import Stats, Tally
from ebbtide.engine.process import release_memory
from ebbtide.module import OffloadHandle, offload
from ebbtide.planner.profile import Profile
from ebbtide.plans import Plan, Prediction, Recipe, RegionPlan, ReleasePoint
from ebbtide.rehearsal import measure, plan

__all__ = [
    "CaptureError",
    "ConfigError",
    "DeviceError",
    "EbbtideError",
    "EbbtideWarning",
    "Event",
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
    "Tally",
    "What",
    "measure",
    "offload",
    "offload_activations",
    "plan",
    "release_memory",
]


def __getattr__(name: str) -> typing.Any:
    """What few use, and what is only imported by these: `ebbtide.compat`, `ebbtide.integrations`."""
    if name in ("compat", "integrations"):
        return importlib.import_module(f"ebbtide.{name}")
    raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
