"""transformers' Trainer and its subclasses, those of TRL too: a callback, a mixin, and arguments for a parser."""

import sys
from collections.abc import Mapping
from typing import Any, cast

import ebbtide
from ebbtide._errors import ConfigError
from ebbtide._utils.packages import extra
from ebbtide.integrations._alone import check_alone, check_compiled, check_deepspeed
from ebbtide.integrations._arguments import OffloadArguments
from ebbtide.integrations._figures import Figures, Result

with extra("transformers"):
    from accelerate.state import AcceleratorState, is_initialized
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

__all__ = ["ActivationOffloadingMixin", "OffloadArguments", "OffloadCallback"]

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # as of transformers 5.2x, and before


class OffloadCallback(TrainerCallback):
    """`ebbtide.offload` from the beginning of a training to its end::

        trainer = Trainer(model, args, callbacks=[OffloadCallback(budget="40GiB")], ...)

    `Stats.metrics` join the logs, for `state.log_history` and all reporters (W&B, TensorBoard): totals since the log
    before, states as they are. The callback takes the first place among the Trainer's for that.

    Args:
        takes_over: switch off what `activation_checkpointing_kwargs={"offload": True}` moves and, with a budget, the
            checkpointing of the model (TRL's trainers checkpoint by default), instead of an error.
        settings: of `ebbtide.offload`.

    Raises ConfigError at the beginning of a training in which something else moves the same, or accelerate compiles
    the model (`torch_compile=True`). A training that raises does not end: the next one with this callback takes the
    handle off, or `callback.handle.remove()` does.
    """

    def __init__(self, *, takes_over: bool = False, **settings: Any) -> None:
        self.handle: ebbtide.OffloadHandle | None = None
        """While a training runs."""
        self._takes_over = takes_over
        self._settings = settings
        self._figures = Figures([])
        self._result: Result | None = None

    @property
    def result(self) -> Result | None:
        """Plan, report and stats of the training that runs, as of now, or of the last one; None before the first."""
        return self._result if self.handle is None else Result.of(self.handle)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._remove()  # of a training that failed
        self._check_alone(args, given["model"])
        self.handle = ebbtide.offload(given["model"], **self._settings)
        self._figures = Figures([self.handle])
        _come_first(self)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._remove()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None:
            figures = self.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def figures(self) -> dict[str, float]:
        """Since they were asked for last; none outside of a training."""
        return {} if self.handle is None else self._figures.read()

    def _remove(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self._figures = Figures([])
            handle.remove()  # before the result: of a device that has failed, nothing can be read
            self._result = Result.of(handle)

    def _check_alone(self, args: TrainingArguments, model: Any) -> None:
        if getattr(args, "activation_offloading", False):
            raise ConfigError("activation_offloading= and OffloadCallback move the same: leave one of them out")
        check_deepspeed(getattr(args, "deepspeed_plugin", None), "OffloadCallback")
        check_compiled(
            AcceleratorState() if is_initialized() else None,  # a launcher can switch it on, without the arguments
            model,
            self._settings,
            "accelerate compiles around the model that OffloadCallback is given, or a copy of it, and nothing in there "
            "moves, not with regional compilation either: leave torch_compile=True and accelerate's dynamo backend "
            "out, and compile the blocks before the Trainer is made, such as for block in model.model.layers: "
            "block.compile()",
        )
        checkpoints = any(getattr(args, name, False) for name in _CHECKPOINTING)
        kwargs = _checkpointing_kwargs(args)
        if self._settings.get("budget") is not None:
            if checkpoints and not self._takes_over:
                raise ConfigError(
                    "a budget decides what runs again, and checkpointing does too: write gradient_checkpointing=False "
                    f"in {type(args).__name__} (TRL's trainers checkpoint by default) and no "
                    "activation_checkpointing=True, or takes_over=True in OffloadCallback, which switches it off"
                )
            if self._takes_over:
                _without_checkpointing(model)
        elif checkpoints and kwargs.get("offload"):
            if not self._takes_over:
                raise ConfigError(
                    "activation_checkpointing_kwargs={'offload': True} and OffloadCallback move the same: leave one of "
                    "them out, or write takes_over=True here"
                )
            _without_offload(model, kwargs)
        check_alone(model, self._settings, "OffloadCallback")  # what was switched on beside the arguments


def _come_first(callback: OffloadCallback) -> None:
    """Reporters stand before the callbacks of the user, and see in the logs what callbacks before them have added. No
    argument of an event leads to the list of callbacks, but its caller has one."""
    frame = sys._getframe(1)
    while frame is not None:
        handler: Any = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)  # those behind keep their places in the event that is under way
            return
        frame = frame.f_back


def _checkpointing_kwargs(args: TrainingArguments) -> dict[str, Any]:
    for name in _CHECKPOINTING:
        kwargs: Any = getattr(args, f"{name}_kwargs", None)
        if isinstance(kwargs, Mapping):
            return dict(cast("Mapping[str, Any]", kwargs))
    return {}


def _without_checkpointing(model: Any) -> None:
    """Switch checkpointing off, by arguments or by hand alike. torch's `checkpoint_wrapper` cannot be switched off."""
    names = [f"{name}_disable" for name in _CHECKPOINTING]
    switch = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if switch is not None:
        switch()


def _without_offload(model: Any, kwargs: dict[str, Any]) -> None:
    """Checkpointing as it was asked for, but for where it keeps what it saves."""
    rest = {key: value for key, value in kwargs.items() if key not in ("offload", "every_n_layers")}
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=rest or None, every_n_layers=kwargs.get("every_n_layers", 1)
    )


class ActivationOffloadingMixin:
    """For subclasses of Trainer: `class MyTrainer(ActivationOffloadingMixin, Trainer)`.

    Args:
        offload: keywords of `OffloadCallback`, or `OffloadArguments`; without it, nothing is offloaded.
    """

    def __init__(self, *args: Any, offload: Mapping[str, Any] | OffloadArguments | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offload_callback: OffloadCallback | None = None
        if offload is not None:
            settings = offload.settings() if isinstance(offload, OffloadArguments) else offload
            self.offload_callback = OffloadCallback(**settings)
            trainer: Any = self
            trainer.add_callback(self.offload_callback)
