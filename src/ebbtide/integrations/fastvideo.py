"""FastVideo's Trainer (fastvideo.train): a callback that the YAML of a run names."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ebbtide._utils.packages import extra
from ebbtide.integrations._results import Metrics, Result
from ebbtide.integrations.diffusers import OffloadedTransformers, offload_transformers

with extra("fastvideo"):
    _Callback = object if TYPE_CHECKING else import_module("fastvideo.train.callbacks.callback").Callback

__all__ = ["OffloadCallback"]

_log = logging.getLogger("fastvideo.ebbtide")  # FastVideo shows the logs below its own name


class FastVideoOffloadCallback(_Callback):
    """`offload_transformers` from the beginning of a training to its end, on the transformers of all roles that train:

        callbacks:
          offload:
            _target_: ebbtide.integrations.fastvideo.OffloadCallback
            budget: 40GiB

    `Stats.metrics` of all transformers together go to the run's trackers: totals since the step before, and states.
    At the end of a training the report and the memory profile are logged.

    Args:
        settings: of `ebbtide.offload`.

    Raises:
        EbbtideError: at the beginning of a training, as `offload_transformers` raises.
    """

    def __init__(self, **settings: Any) -> None:
        self.offloaded: OffloadedTransformers = OffloadedTransformers()
        """Of the present or the last training."""
        self.result: dict[str, Result] = {}
        """Plan, report and stats of the last finished training, by transformer."""
        self._settings = settings
        self._metrics = Metrics([])

    def on_train_start(self, method: Any, iteration: int = 0) -> None:
        self.offloaded.remove()  # of a training that failed
        self.offloaded = offload_transformers(method, **self._settings)
        self._metrics = Metrics(self.offloaded.handles.values())

    def on_training_step_end(self, method: Any, loss_dict: dict[str, Any], iteration: int = 0) -> None:
        method.tracker.log(self._metrics.read(), iteration)

    def on_train_end(self, method: Any, iteration: int = 0) -> None:
        _log.info("%s\n%s", self.offloaded.report(), self.offloaded.memory_profile())
        self.result = {name: Result.of(handle) for name, handle in self.offloaded.handles.items()}
        self.offloaded.remove()


OffloadCallback = FastVideoOffloadCallback
