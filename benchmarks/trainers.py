"""Measurements with the packages of trainers: bars T1 to T3."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import sft, wan


@dataclass(frozen=True)
class Trainer:
    """A trainer to measure.

    Attributes:
        packages: required packages.
        measure: function of the device and a number of steps that returns the result.
        tiny: like `measure`, with sizes for a trial without an accelerator.
    """

    packages: tuple[str, ...]
    measure: Callable[[torch.device, int], dict[str, object]]
    tiny: Callable[[torch.device, int], dict[str, object]]

    @property
    def is_available(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in self.packages)


TRAINERS = {
    "T1": Trainer(
        ("trl", "datasets"),
        functools.partial(sft.measure_full, sft.QWEN),
        functools.partial(sft.measure_full, sft.TINY),
    ),
    "T2": Trainer(
        ("trl", "datasets", "peft"),
        functools.partial(sft.measure_adapter, sft.QWEN),
        functools.partial(sft.measure_adapter, sft.TINY, store="mock", min_bytes=1),
    ),
    "T3": Trainer(
        ("diffusers",),
        functools.partial(wan.measure_wan, wan.WAN_1B),
        functools.partial(wan.measure_wan, wan.TINY, store="mock", min_bytes=1),
    ),
}
