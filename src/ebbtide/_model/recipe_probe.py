"""Measures what recipes cost the host, with a small module that runs by each recipe, before planning.

In training a region finds the caches of its core full of other regions' data. The probe therefore reads some megabytes
between two regions, in forward and in backward, and subtracts the time of reading.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, cast

import numpy
import torch

from ebbtide._config import OffloadConfig
from ebbtide._engine.context import HookContext, Limits
from ebbtide._engine.engine import Engine
from ebbtide._engine.engines import Engines
from ebbtide._model.attach import Attachment
from ebbtide._plans import Plan, Recipe, RegionPlan
from ebbtide._profiling.launch_overhead import RecipeCosts
from ebbtide._types import RecomputeRecorder, StepRecorder
from ebbtide._utils.sizes import MIB

_REGIONS, _WIDTH = 4, 32
_PRODUCTS, _OPERATORS = 2, 14  # of a region's forward
_ROUNDS = 5  # the median counts
_CACHE_BYTES = 8 * MIB  # more than a core has to itself

_KEEP = Recipe("keep")
_MOVE = Recipe("offload")
_RECOMPUTE = Recipe("recompute", inputs="keep")
_INSPECT = Recipe("selective", inputs="keep", outputs="keep", ops=("matmul",), sites=())
_SAVE = Recipe("selective", inputs="keep", outputs="keep", ops=("matmul",))


def probe_recipes(engines: Engines, serves: Callable[[torch.device], bool], engine: Engine) -> RecipeCosts:
    """Costs of recipes on the device of `engine`, in seconds of this host.

    Runs some hundred small kernels, and waits for none.
    """
    device = engine.device.torch_device
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        model = _Model(device)
        config = OffloadConfig(min_bytes=1, verify=0)
        attachment = Attachment(model, config, engines, HookContext(Limits(0, 2**20, 1), serves))
        attachment.install()
        try:
            moved, kept, recomputed, inspected, saved = (
                _run(attachment, model, recipe) for recipe in (_MOVE, _KEEP, _RECOMPUTE, _INSPECT, _SAVE)
            )
        finally:
            attachment.remove()
    parcels = attachment.context.recorder.stats.parcels.count / _ROUNDS
    return RecipeCosts(
        save_s=max(0.0, recomputed.own_s - kept.own_s) / _Region.saves,
        inspect_op_s=max(0.0, inspected.own_s - recomputed.own_s) / _OPERATORS,
        save_output_s=max(0.0, saved.own_s - inspected.own_s) / _PRODUCTS,
        move_s=max(0.0, moved.step_s - kept.step_s) * _REGIONS / (2 * max(1.0, parcels)),
    )


class _Region(torch.nn.Module):
    """Two matrix products, each with six small operators behind."""

    saves = 16

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # Without random numbers: a probe must not advance the user's generators.
        self.weight = torch.nn.Parameter(torch.full((_WIDTH, _WIDTH), 1 / _WIDTH, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_PRODUCTS):
            x = x.mm(self.weight)
            for _ in range(6):
                x = x.sin()
        return x


class _Model(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Region(device) for _ in range(_REGIONS))
        self.x = torch.full((_WIDTH, _WIDTH), 0.5, device=device)
        self.caches = _Caches()

    def forward(self) -> torch.Tensor:
        x = self.x
        for layer in self.layers:
            x = _emptied(layer(_emptied(x, self.caches)), self.caches)
        return x.sum()


class _Caches:
    """Empties the caches of the core that runs the caller. `seconds`: spent so far."""

    def __init__(self) -> None:
        self._other = numpy.zeros(_CACHE_BYTES, dtype=numpy.uint8)
        self.seconds = 0.0

    def empty(self) -> None:
        began_s = time.perf_counter()
        self._other += 1
        self.seconds += time.perf_counter() - began_s


class _Empty(torch.autograd.Function):
    """The identity, with empty caches behind in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, caches: _Caches) -> torch.Tensor:
        ctx.caches = caches
        caches.empty()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.caches.empty()
        return grads[0], None


def _emptied(x: torch.Tensor, caches: _Caches) -> torch.Tensor:
    return cast(torch.Tensor, _Empty.apply(x, caches))


class _Clock(StepRecorder):
    """Seconds of one forward inside of the regions, without preparing for recomputation."""

    sees_saved_tensors = False

    def __init__(self) -> None:
        self.own_s = 0.0
        self._entered_s, self._ran_s = 0.0, 0.0

    def entered(self, region: str) -> None:  # noqa: ARG002 (protocol)
        self._ran_s = 0.0
        self._entered_s = time.perf_counter()

    def left(self, region: str) -> None:  # noqa: ARG002
        self.own_s += self._ran_s or time.perf_counter() - self._entered_s

    def forward_ended(self) -> None:
        pass

    def saved(self, region: str, index: int, t: torch.Tensor) -> None:
        pass

    def read(self, region: str) -> None:
        pass

    @contextlib.contextmanager
    def running(self, region: str) -> Generator[None, None, None]:  # noqa: ARG002
        began_s = time.perf_counter()
        yield
        self._ran_s = time.perf_counter() - began_s

    def recomputing(self, region: str) -> contextlib.AbstractContextManager[RecomputeRecorder | None]:  # noqa: ARG002
        return contextlib.nullcontext()


class _Seconds(NamedTuple):
    """Of one region: of the own code in forward, and of forward and backward."""

    own_s: float
    step_s: float


def _run(attachment: Attachment, model: _Model, recipe: Recipe) -> _Seconds:
    keep = RegionPlan(_KEEP)
    attachment.apply_plan(Plan(dict.fromkeys(attachment.blocks, RegionPlan(recipe)), outside=keep))
    own: list[float] = []
    steps: list[float] = []
    for _ in range(_ROUNDS):
        clock, model.caches.seconds = _Clock(), 0.0
        attachment.plan_step = lambda _tokens, _verifies, clock=clock: (clock, False)
        began_s = time.perf_counter()
        model().backward()
        steps.append(time.perf_counter() - began_s - model.caches.seconds)
        own.append(clock.own_s)
    return _Seconds(statistics.median(own) / _REGIONS, statistics.median(steps) / _REGIONS)
