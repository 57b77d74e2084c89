"""Axolotl: a plugin, with the settings of `ebbtide.offload` in a block of its YAML file::

plugins:
  - ebbtide.integrations.axolotl.EbbtidePlugin
ebbtide:
  budget: 40GiB
"""

from importlib import import_module
from typing import Any

from ebbtide import compat
from ebbtide._errors import ConfigError
from ebbtide._utils.packages import extra
from ebbtide.integrations._figures import Result
from ebbtide.integrations.transformers import OffloadCallback

with extra("axolotl"):
    from pydantic import BaseModel, ConfigDict, model_validator

    _BasePlugin: Any = import_module("axolotl.integrations.base").BasePlugin

_CHECKPOINTS_THAT_OFFLOAD = ("offload", "offload_disk")  # older words for activation_offloading


class EbbtideSettings(BaseModel):
    """The block `ebbtide:`, keywords of `ebbtide.offload`; what is not given is left to it."""

    model_config = ConfigDict(extra="forbid")

    budget: int | float | str | None = None
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


class EbbtideArgs(BaseModel):
    """What the plugin adds to Axolotl's config."""

    ebbtide: EbbtideSettings | None = None

    @model_validator(mode="after")
    def _one_offloads(self) -> "EbbtideArgs":
        mode: Any = getattr(self, "activation_offloading", None)
        checkpoints: Any = getattr(self, "gradient_checkpointing", None)
        if self.ebbtide is None:
            return self
        if mode or checkpoints in _CHECKPOINTS_THAT_OFFLOAD:
            raise ConfigError(
                f"activation_offloading: {mode or checkpoints} and the block ebbtide: move the same: leave one of them "
                "out. Without the block the plugin does what activation_offloading says"
            )
        if checkpoints and self.ebbtide.budget is not None:
            raise ConfigError(
                "a budget decides what runs again, and gradient_checkpointing does too: leave one of them out"
            )
        return self


class EbbtidePlugin(_BasePlugin):
    """Offloads as the block `ebbtide:` says, or where there is none as `activation_offloading:` does; with neither,
    what the link carries without slowing the step.

    The figures of `OffloadCallback` join the logs, for reporters too. `PluginManager.get_instance()` has the plugin.
    """

    def __init__(self) -> None:
        super().__init__()
        self._installed = compat.Installed([])
        self._callback: OffloadCallback | None = None

    @property
    def result(self) -> Result | None:
        """`OffloadCallback.result` of the training; None with `activation_offloading:`, whose trainer has a context."""
        return None if self._callback is None else self._callback.result

    def get_input_args(self) -> str:
        """Where the config keys are."""
        return f"{__name__}.{EbbtideArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Axolotl's own switch is about to be asked for."""
        self._installed.remove()  # of a training that failed
        if cfg.activation_offloading:
            self._installed = compat.install("axolotl")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Offload from the beginning of its training to the end."""
        self._callback = None
        if cfg.activation_offloading:
            return
        settings: dict[str, Any] = dict(cfg.ebbtide or {})
        self._callback = OffloadCallback(**settings)
        trainer.add_callback(self._callback)

    def post_train(self, cfg: Any, model: Any) -> None:
        """Put Axolotl's own back."""
        self._installed.remove()
