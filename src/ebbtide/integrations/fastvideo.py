"""FastVideo's Trainer (fastvideo.train): a callback that the YAML of a run names."""

import importlib
import logging
from typing import Any

from ebbtide._utils.packages import extra
from ebbtide.integrations._figures import Figures, Result
from ebbtide.integrations.diffusers import OffloadedTransformers, offload_transformers

with extra("fastvideo"):
    Callback: Any = importlib.import_module("fastvideo.train.callbacks.callback").Callback

_log = logging.getLogger("fastvideo.ebbtide")  # FastVideo shows what is logged below its own name


class OffloadCallback(Callback):
    """`offload_transformers` from the beginning of a training to its end, on the transformers of all roles that train::

        callbacks:
          offload:
            _target_: ebbtide.integrations.fastvideo.OffloadCallback
            budget: 40GiB

    `Stats.metrics` of all transformers together go to the run's trackers: totals since the step before, states as they
    are.
    At the end of a training the report and the memory profile are logged.

    Args:
        settings: of `ebbtide.offload`.

    Raises at the beginning of a training what `offload_transformers` raises.
    """

    def __init__(self, **settings: Any) -> None:
        self.offloaded = OffloadedTransformers()
        """Of the training that runs, or has ended."""
        self.result: dict[str, Result] = {}
        """Plan, report and stats of the last training that has ended, by transformer."""
        self._settings = settings
        self._figures = Figures([])

    def on_train_start(self, method: Any, iteration: int = 0) -> None:
        self.offloaded.remove()  # of a training that failed
        self.offloaded = offload_transformers(method, **self._settings)
        self._figures = Figures(self.offloaded.handles.values())

    def on_training_step_end(self, method: Any, loss_dict: dict[str, Any], iteration: int = 0) -> None:
        method.tracker.log(self._figures.read(), iteration)

    def on_train_end(self, method: Any, iteration: int = 0) -> None:
        _log.info("%s\n%s", self.offloaded.report(), self.offloaded.memory_profile())
        self.result = {name: Result.of(handle) for name, handle in self.offloaded.handles.items()}
        self.offloaded.remove()
