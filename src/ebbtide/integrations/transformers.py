"""transformers' Trainer and subclasses, as of TRL: a callback, a mixin, and arguments for a parser."""

import sys
from collections.abc import Mapping
from typing import Any, cast

from ebbtide._errors import ConfigError
from ebbtide._utils.packages import extra
from ebbtide.integrations._arguments import OffloadArguments
from ebbtide.integrations._conflicts import both_move, check_compiled, check_deepspeed, check_modules, may_recompute
from ebbtide.integrations._results import OffloadedTraining

with extra("transformers"):
    from accelerate.state import AcceleratorState, is_initialized
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

__all__ = ["ActivationOffloadingMixin", "OffloadArguments", "OffloadCallback"]

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # as of transformers 5.2x, and earlier


class OffloadCallback(OffloadedTraining, TrainerCallback):
    """`ebbtide.offload` from the beginning of a training to the end:

        trainer = Trainer(model, args, callbacks=[OffloadCallback(budget="40GiB")], ...)

    `Stats.metrics` join the logs, for `state.log_history` and all reporters (W&B, TensorBoard): totals since the last
    log, and states. For the reporters the callback takes the first place among the Trainer's callbacks.

    Args:
        takes_over: instead of raising, switch off `activation_checkpointing_kwargs={"offload": True}` and, with a
            budget, the checkpointing of the model (TRL's trainers checkpoint by default).
        settings: of `ebbtide.offload`.

    Raises, at the beginning of a training:
        ConfigError: the Trainer offloads too, or checkpoints beside a budget, or accelerate compiles a copy of the
            model (regional compilation), or a wrapper around (`torch_compile=True` beside DDP).

    Traps: a training that raises leaves the handle on the model. The next training with the callback removes the
    handle, or `callback.handle.remove()` does.
    """

    def __init__(self, *, takes_over: bool = False, **settings: Any) -> None:
        super().__init__(settings)
        self._takes_over = takes_over

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **event: Any
    ) -> None:
        self._end()  # of a training that failed
        self._check_conflicts(args, event["model"])
        self._begin(event["model"])
        _come_first(self)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._end()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and self.handle is not None:
            metrics = self._metrics.read()
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def _check_conflicts(self, args: TrainingArguments, model: Any) -> None:
        if getattr(args, "activation_offloading", False):
            raise both_move("activation_offloading=", "OffloadCallback")
        check_deepspeed(getattr(args, "deepspeed_plugin", None), "OffloadCallback")
        check_compiled(
            AcceleratorState() if is_initialized() else None,  # a launcher can compile without the arguments
            model,
            self._settings,
            "accelerate compiles a copy of the model that OffloadCallback is given (regional compilation), or a "
            "wrapper around, and nothing in there moves: leave torch_compile=True and accelerate's dynamo backend "
            "out, and compile the blocks before the Trainer is made, such as for block in model.model.layers: "
            "block.compile()",
        )
        checkpoints = any(getattr(args, name, False) for name in _CHECKPOINTING)
        kwargs = _checkpointing_kwargs(args)
        if may_recompute(self._settings):
            if checkpoints and not self._takes_over:
                raise ConfigError(
                    "a budget decides what is recomputed, and checkpointing does too: write "
                    f"gradient_checkpointing=False in {type(args).__name__} (TRL's trainers checkpoint by default) and "
                    "no activation_checkpointing=True, or takes_over=True in OffloadCallback, which switches it off"
                )
            if self._takes_over:
                _without_checkpointing(model)
        elif checkpoints and kwargs.get("offload"):
            if not self._takes_over:
                theirs = "activation_checkpointing_kwargs={'offload': True}"
                raise both_move(theirs, "OffloadCallback", ", or write takes_over=True here")
            _without_offload(model, kwargs)
        check_modules(model, self._settings, "OffloadCallback")  # switched on without the arguments


def _come_first(callback: OffloadCallback) -> None:
    """Move `callback` before the reporters, which log only what earlier callbacks have added.

    No argument of an event leads to the list of callbacks, but the event's caller has the list.
    """
    frame = sys._getframe(1)
    while frame is not None:
        handler: Any = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)  # later callbacks keep their places in the present event
            return
        frame = frame.f_back


def _checkpointing_kwargs(args: TrainingArguments) -> dict[str, Any]:
    for name in _CHECKPOINTING:
        kwargs: Any = getattr(args, f"{name}_kwargs", None)
        if isinstance(kwargs, Mapping):
            return dict(cast("Mapping[str, Any]", kwargs))
    return {}


def _without_checkpointing(model: Any) -> None:
    """Switch off checkpointing by arguments or by hand. torch's `checkpoint_wrapper` has no switch."""
    names = [f"{name}_disable" for name in _CHECKPOINTING]
    switch = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if switch is not None:
        switch()


def _without_offload(model: Any, kwargs: dict[str, Any]) -> None:
    """Checkpoint as the arguments say, without the offload of inputs."""
    rest = {key: value for key, value in kwargs.items() if key not in ("offload", "every_n_layers")}
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=rest or None, every_n_layers=kwargs.get("every_n_layers", 1)
    )


class ActivationOffloadingMixin:
    """For subclasses of Trainer: `class MyTrainer(ActivationOffloadingMixin, Trainer)`.

    Args:
        offload: keywords of `OffloadCallback`, or `OffloadArguments`. None: nothing is offloaded.
    """

    def __init__(self, *args: Any, offload: Mapping[str, Any] | OffloadArguments | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offload_callback: OffloadCallback | None = None
        if offload is not None:
            settings = offload.settings() if isinstance(offload, OffloadArguments) else offload
            self.offload_callback = OffloadCallback(**settings)
            trainer: Any = self
            trainer.add_callback(self.offload_callback)
