"""Axolotl: a plugin, with the settings of `ebbtide.offload` in a block of its YAML file:

plugins:
  - ebbtide.integrations.axolotl.EbbtidePlugin
ebbtide:
  budget: 40GiB
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ebbtide import compat
from ebbtide._config import with_settings
from ebbtide._utils.packages import extra
from ebbtide.integrations._conflicts import both_move, both_recompute, may_recompute
from ebbtide.integrations._results import Result
from ebbtide.integrations.transformers import OffloadCallback

with extra("axolotl"):
    from pydantic import BaseModel, ConfigDict, model_validator

    _BasePlugin = object if TYPE_CHECKING else import_module("axolotl.integrations.base").BasePlugin

__all__ = ["EbbtidePlugin"]


@with_settings
class _EbbtideSettings(BaseModel):
    """The block `ebbtide:`, keywords of `ebbtide.offload`; None leaves a setting to `offload`."""

    model_config = ConfigDict(extra="forbid")

    budget: int | float | str | None = None
    max_slowdown: float | None = None
    mode: str | None = None
    include: str | list[str] | None = None
    exclude: str | list[str] | None = None
    keep_last: int | None = None
    regions: str | list[str] | None = None
    recipe: str | dict[str, str] | None = None
    profile: str | None = None
    on_oom: str | None = None
    verify: int | None = None
    store: str | None = None
    window: int | str | None = None
    prefetch: int | str | None = None
    min_bytes: int | str | None = None
    host_limit: int | str | None = None


class _EbbtideArgs(BaseModel):
    """Keys that the plugin adds to Axolotl's config."""

    ebbtide: _EbbtideSettings | None = None

    @model_validator(mode="after")
    def _one_offloads(self) -> "_EbbtideArgs":
        mode: Any = getattr(self, "activation_offloading", None)
        checkpoints: Any = getattr(self, "gradient_checkpointing", None)
        if self.ebbtide is None:
            return self
        if mode or checkpoints in ("offload", "offload_disk"):  # older words for activation_offloading
            more = ". Without the block the plugin does what activation_offloading says"
            raise both_move(f"activation_offloading: {mode or checkpoints}", "the block ebbtide:", more)
        if checkpoints and may_recompute(self.ebbtide.model_dump()):
            raise both_recompute("gradient_checkpointing")
        return self


class EbbtidePlugin(_BasePlugin):
    """Offloads by the block `ebbtide:` or, without the block, by `activation_offloading:`.

    Without either, a planner moves what slows a step by at most 1 %. The metrics of `OffloadCallback`
    join the logs, for reporters too. `PluginManager.get_instance()` has the plugin.
    """

    def __init__(self) -> None:
        super().__init__()
        self._installed = compat.Installed([])
        self._callback: OffloadCallback | None = None

    @property
    def result(self) -> Result | None:
        """`OffloadCallback.result` of the training; None with `activation_offloading:`, which has no callback."""
        return None if self._callback is None else self._callback.result

    def get_input_args(self) -> str:
        return f"{__name__}.{_EbbtideArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Install ebbtide behind `activation_offloading:` before Axolotl reads the switch."""
        self._installed.remove()  # of a training that failed
        if cfg.activation_offloading:
            self._installed = compat.install("axolotl")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self._callback = None
        if cfg.activation_offloading:
            return
        settings: dict[str, Any] = dict(cfg.ebbtide or {})
        self._callback = OffloadCallback(**settings)
        trainer.add_callback(self._callback)

    def post_train(self, cfg: Any, model: Any) -> None:
        self._installed.remove()
