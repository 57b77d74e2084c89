"""Measures what recipes cost the host, with a small module that runs by each recipe, before planning."""

import contextlib
import time
from collections.abc import Callable, Generator

import torch

from ebbtide._config import OffloadConfig
from ebbtide._engine.context import HookContext, Limits
from ebbtide._engine.engine import Engine
from ebbtide._engine.engines import Engines
from ebbtide._model.attach import Attachment
from ebbtide._plans import Plan, Recipe, RegionPlan
from ebbtide._profiling.launch_overhead import RecipeCosts
from ebbtide._types import RecomputeRecorder, StepRecorder

_REGIONS, _WIDTH = 4, 32
_PRODUCTS, _OPERATORS = 2, 14  # of a region's forward
_ROUNDS = 4  # the fastest counts, but for the first: caches are empty, and regions do not derive yet

_KEEP = Recipe("keep")
_MOVE = Recipe("offload")
_HOOK = Recipe("offload", sites=(999,))  # none of them
_DERIVE = Recipe("keep", derive=None)
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
            moved, kept, hooked, derived, recomputed, inspected, saved = (
                _run(attachment, recipe) for recipe in (_MOVE, _KEEP, _HOOK, _DERIVE, _RECOMPUTE, _INSPECT, _SAVE)
            )
        finally:
            attachment.remove()
    stats = attachment.context.recorder.stats
    parcels, derivations = stats.parcels.count / _ROUNDS, stats.derived.count / (_ROUNDS - 1)
    return RecipeCosts(
        prepare_s=recomputed.prepared_s,
        save_s=max(0.0, recomputed.forward_s - recomputed.prepared_s - kept.forward_s) / _Region.saves,
        inspect_op_s=max(0.0, inspected.forward_s - recomputed.forward_s) / _OPERATORS,
        save_output_s=max(0.0, saved.forward_s - inspected.forward_s) / _PRODUCTS,
        move_s=max(0.0, moved.step_s - hooked.step_s) * _REGIONS / (2 * max(1.0, parcels)),
        derive_s=max(0.0, derived.step_s - hooked.step_s) * _REGIONS / (2 * max(1.0, derivations)),
        op_s=kept.forward_s / _OPERATORS,
        hook_s=max(0.0, hooked.step_s - kept.step_s) / (2 * _Region.saves),
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
        self.scale = torch.nn.Parameter(torch.ones((), device=device))

    def forward(self) -> torch.Tensor:
        x = self.x * self.scale  # saved: in a watched step, no region rests before a first saved tensor
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class _Clock(StepRecorder):
    """Seconds of forward, and of preparing for recomputation, of one step."""

    sees_saved_tensors = False

    def __init__(self) -> None:
        self.forward_s = self.prepared_s = 0.0
        self._entered_s = self._own_s = 0.0

    def entered(self, region: str) -> None:  # noqa: ARG002 (protocol)
        self._own_s = 0.0
        self._entered_s = time.perf_counter()

    def left(self, region: str) -> None:  # noqa: ARG002
        seconds = time.perf_counter() - self._entered_s
        self.forward_s += seconds
        self.prepared_s += seconds - self._own_s if self._own_s > 0.0 else 0.0

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
        self._own_s = time.perf_counter() - began_s

    def recomputing(self, region: str) -> contextlib.AbstractContextManager[RecomputeRecorder | None]:  # noqa: ARG002
        return contextlib.nullcontext()


class _Seconds:
    """The fastest seconds of one region: of its forward, of preparing, of forward and backward."""

    def __init__(self) -> None:
        self.forward_s = self.prepared_s = self.step_s = float("inf")


def _run(attachment: Attachment, recipe: Recipe) -> _Seconds:
    keep = RegionPlan(_KEEP)
    attachment.apply_plan(Plan(dict.fromkeys(attachment.blocks, RegionPlan(recipe)), outside=keep))
    least = _Seconds()
    for number in range(_ROUNDS):
        clock = _Clock()
        attachment.plan_step = lambda _tokens, _verifies, clock=clock: (clock, False)
        began_s = time.perf_counter()
        attachment.module().backward()
        if number == 0:
            continue
        least.step_s = min(least.step_s, (time.perf_counter() - began_s) / _REGIONS)
        least.forward_s = min(least.forward_s, clock.forward_s / _REGIONS)
        least.prepared_s = min(least.prepared_s, clock.prepared_s / _REGIONS)
    return least
