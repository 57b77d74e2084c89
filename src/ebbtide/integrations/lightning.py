"""Lightning's Trainer: a callback, for `lightning.pytorch` or, without the package, for `pytorch_lightning`."""

from typing import TYPE_CHECKING, Any

import torch

from ebbtide._errors import ModuleError
from ebbtide._utils.packages import extra, is_installed
from ebbtide._utils.torch_private import named_children
from ebbtide.integrations._conflicts import check_modules
from ebbtide.integrations._results import OffloadedTraining

with extra("lightning"):
    if TYPE_CHECKING or is_installed("lightning") or not is_installed("pytorch_lightning"):
        from lightning.pytorch import Callback, LightningModule, Trainer
    else:
        from pytorch_lightning import Callback, LightningModule, Trainer

__all__ = ["OffloadCallback"]


class _Called(torch.nn.Module):
    """A wrapper of a LightningModule without a strategy's wrapper.

    Lightning calls the wrapper, as inside of DDP; else Lightning would call `training_step` alone, past all hooks of
    the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class LightningOffloadCallback(OffloadedTraining, Callback):
    """`ebbtide.offload` from the beginning of a fit, after the strategy's set-up, to the end:

        trainer = Trainer(callbacks=[OffloadCallback(budget="40GiB")], ...)

    `Stats.metrics` are logged as by `self.log` of the LightningModule: totals of one batch, and states.

    Args:
        module: name of the submodule to offload, "student", which `training_step` calls as `self.student(x)`.
            Default: the LightningModule with all of its `training_step`.
        logs: whether to log the metrics.
        settings: of `ebbtide.offload`.

    Raises, at the beginning of a fit:
        ConfigError: blocks offload, or checkpoint beside a budget.
        ModuleError: the LightningModule has no submodule `module`.
    """

    def __init__(self, module: str = "", *, logs: bool = True, **settings: Any) -> None:
        super().__init__(settings)
        self._name = module
        self._logs = logs
        self._called: _Called | None = None
        self._forward: object = None  # set on the LightningModule itself, before Lightning sets its own

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove(trainer, pl_module)  # of a fit that raised without on_exception
        module = _submodule(pl_module, self._name)
        check_modules(module, self._settings, "OffloadCallback")
        self._begin(module)
        if not self._name and trainer.strategy.model is pl_module:
            trainer.strategy.model = self._called = _Called(pl_module)
            self._forward = vars(pl_module).get("forward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._logs:
            pl_module.log_dict(self._metrics.read(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove(trainer, pl_module)  # before the strategy's tear-down

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove(trainer, pl_module)  # of a fit without batches, which has no training

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove(trainer, pl_module)

    def _remove(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._called is not None and trainer.strategy.model is self._called:
            trainer.strategy.model = pl_module
            vars(pl_module).pop("forward", None)  # Lightning's own, set by its call
            if self._forward is not None:
                vars(pl_module)["forward"] = self._forward
        self._called = None
        self._end()


OffloadCallback = LightningOffloadCallback


def _submodule(pl_module: LightningModule, name: str) -> torch.nn.Module:
    try:
        return pl_module.get_submodule(name)
    except AttributeError as error:
        has = ", ".join(repr(child) for child, _ in named_children(pl_module))
        raise ModuleError(
            f"OffloadCallback(module={name!r}): {type(pl_module).__name__} has no submodule of this name. It has {has}"
        ) from error
