"""Lightning's Trainer: a callback. For `pytorch_lightning` as for `lightning.pytorch`, whichever is there."""

from typing import TYPE_CHECKING, Any

import torch

import ebbtide
from ebbtide._errors import ModuleError
from ebbtide._utils.packages import extra, is_installed
from ebbtide._utils.torch_private import named_children
from ebbtide.integrations._alone import check_alone
from ebbtide.integrations._figures import Figures, Result

with extra("lightning"):
    if is_installed("lightning") or not is_installed("pytorch_lightning") or TYPE_CHECKING:
        from lightning.pytorch import Callback, LightningModule, Trainer
    else:
        from pytorch_lightning import Callback, LightningModule, Trainer


class _Called(torch.nn.Module):
    """Around a LightningModule that no strategy has wrapped: Lightning then calls it, as it does inside of DDP, instead
    of its `training_step` alone, which would be past all hooks of the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class OffloadCallback(Callback):
    """`ebbtide.offload` from the beginning of a fit, behind what the strategy sets up, to its end::

        trainer = Trainer(callbacks=[OffloadCallback(budget="40GiB")], ...)

    `Stats.metrics` are logged, as `self.log` of the LightningModule does: totals of one batch, states as they are.

    Args:
        module: the name of the submodule to offload, "student"; it is called in `training_step`, as `self.student(x)`.
            Default: the LightningModule, all that its `training_step` does.
        logs: whether to log the figures.
        settings: of `ebbtide.offload`.

    Raises, at the beginning of a fit, ConfigError if something else moves or runs again the same, and ModuleError for
    a name that is none.
    """

    def __init__(self, module: str = "", *, logs: bool = True, **settings: Any) -> None:
        self.handle: ebbtide.OffloadHandle | None = None
        """While a fit runs."""
        self._name = module
        self._logs = logs
        self._settings = settings
        self._figures = Figures([])
        self._result: Result | None = None
        self._called: _Called | None = None
        self._forward: object = None  # of the LightningModule itself, if it is not its class's

    @property
    def result(self) -> Result | None:
        """Plan, report and stats of the fit that runs, as of now, or of the last one; None before the first."""
        return self._result if self.handle is None else Result.of(self.handle)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove(trainer, pl_module)  # of a fit that ended without a word
        module = _submodule(pl_module, self._name)
        check_alone(module, self._settings, "OffloadCallback")
        self.handle = ebbtide.offload(module, **self._settings)
        self._figures = Figures([self.handle])
        if not self._name and trainer.strategy.model is pl_module:
            trainer.strategy.model = self._called = _Called(pl_module)
            self._forward = vars(pl_module).get("forward")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._logs:
            pl_module.log_dict(self._figures.read(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove(trainer, pl_module)  # before the strategy takes down what it has set up

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove(trainer, pl_module)  # of one without a single batch, which does not begin to train

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove(trainer, pl_module)

    def _remove(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._called is not None and trainer.strategy.model is self._called:
            trainer.strategy.model = pl_module
            vars(pl_module).pop("forward", None)  # Lightning puts its own there when it calls
            if self._forward is not None:
                vars(pl_module)["forward"] = self._forward
        self._called = None
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self._figures = Figures([])
            handle.remove()  # before the result: of a device that has failed, nothing can be read
            self._result = Result.of(handle)


def _submodule(pl_module: LightningModule, name: str) -> torch.nn.Module:
    try:
        return pl_module.get_submodule(name)
    except AttributeError as error:
        has = ", ".join(repr(child) for child, _ in named_children(pl_module))
        raise ModuleError(
            f"OffloadCallback(module={name!r}): {type(pl_module).__name__} has no submodule of this name. It has {has}"
        ) from error
