"""Random training programs with random recipes and plans, also nested: simulated, and compared with plain twins."""

import contextlib
import random
import warnings
from typing import Any

import torch
from cases import Explode
from recipe_cases import (
    EVERY,
    ROWS,
    WIDTH,
    Attention,
    AttentionWithDropout,
    AutocastInside,
    Averages,
    CastsOften,
    CatchesAll,
    CustomFunctions,
    Dropouts,
    GradientInside,
    InPlace,
    Mixed,
    RandomOperators,
    Simple,
    Views,
    every_second_random_op,
)
from support import Boom, HandleRig, bits
from torch import nn
from torch.nn import functional

from ebbtide import Plan, Recipe, RegionPlan, ReleasePoint
from ebbtide._devices.sim import SimDevice
from ebbtide._offload import OffloadHandle
from ebbtide._stores.host import HostStore

CPU = torch.device("cpu")
_BLOCKS = [
    Attention, AttentionWithDropout, AutocastInside, Averages, CastsOften, CatchesAll, CustomFunctions, Dropouts,
    GradientInside, InPlace, Mixed, RandomOperators, Views,
]  # fmt: skip
_RECIPES: list[Any] = [
    None, "keep", "offload", "recompute", "recompute", "selective", "selective", EVERY,
    Recipe("recompute", inputs="keep"),
    Recipe("selective", outputs="keep", ops=("matmul", "attention")),
    Recipe("selective", inputs="keep", outputs="keep", ops=EVERY.ops),
    Recipe("selective", ops=(every_second_random_op, "matmul")),
    Recipe("selective", ops=EVERY.ops, sites=(0, 2, 3, 5)),
]  # fmt: skip

_ALL = tuple(range(100))
# Replace selective recipes in every third program.
_LEAVING_OUT = [
    Recipe("selective", sites=_ALL, prune=_ALL),
    Recipe("selective", ops=("matmul", "attention"), sites=(0, 1, 2), prune=(0, 1), outputs="keep"),
    Recipe("selective", ops=EVERY.ops, sites=_ALL, prune=(1, 4, 5, 9)),
    Recipe("selective", ops=EVERY.ops, sites=(0, 3, 4, 7), prune=(0, 4), inputs="keep"),
]

_WINDOWS = [0, 0, 1, 200, 1000, 10**6]
_PREFETCH = [None, None, 1, 500, 3000, 10**6]


def random_plan(choose: random.Random, recipes: dict[str, Any]) -> Plan:
    """A plan of `recipes`, with random release points and random prefetch windows."""
    outside = choose.choice([None, "keep", "offload", Recipe("offload", sites=(0, 1, 4))])
    regions = {name: _random_region(choose, recipe) for name, recipe in recipes.items()}
    return Plan(regions, None if outside is None else _random_region(choose, outside))


def _random_region(choose: random.Random, recipe: Any) -> RegionPlan:
    indices = sorted(choose.sample(range(10), choose.choice([0, 1, 1, 2, 4])))
    points = tuple(ReleasePoint(index, choose.choice(_WINDOWS)) for index in indices)
    return RegionPlan(recipe, points, choose.choice(_PREFETCH))


class Around(Simple):
    """A block inside a block."""

    def __init__(self, inner: nn.Module, twice: bool) -> None:
        super().__init__()
        self.inner = inner
        self.times = 2 if twice else 1

    def forward(self, x):
        y = self.first(x).sin()
        for _ in range(self.times):
            y = self.inner(y)
        return self.second(functional.dropout(y, 0.1).tanh()) + x


class Tower(nn.Module):
    def __init__(self, blocks: list[nn.Module], order: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.order = order

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x)
            x = x.float() / (1.0 + x.detach().float().abs().mean())
        return x.square().mean()


class RecipeProgram:
    """Model, recipes and steps of one seed. `run(rig)` runs the program with recipes, `run(None)` without.

    Every second seed has plans with these recipes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._depths = [self._random.choice([0, 0, 1, 2]) for _ in range(self._random.randint(2, 3))]
        self._kinds = [self._random.choice(_BLOCKS) for _ in self._depths]
        self._twice = [self._random.random() < 0.3 for _ in self._depths]
        self._order = [*range(len(self._depths)), *([0] if self._random.random() < 0.3 else [])]
        self._recipes = [self._some_recipes() for _ in range(2)]
        self._steps = [self._random.choice(_STEPS) for _ in range(3)]
        self._is_autocast = self._random.random() < 0.3
        has_plans = seed % 2 == 1
        self._plans = [random_plan(self._random, recipes) if has_plans else None for recipes in self._recipes]

    def __str__(self) -> str:
        blocks = ", ".join(f"{kind.__name__} in {depth}" for kind, depth in zip(self._kinds, self._depths, strict=True))
        recipes = [{name: str(recipe) for name, recipe in each.items()} for each in self._recipes]
        recipes += [plan for plan in self._plans if plan is not None]
        return f"seed {self._seed}: [{blocks}], {recipes}, [{', '.join(step.__name__ for step in self._steps)}]"

    def _some_recipes(self) -> dict[str, Any]:
        names = [
            f"layers.{number}" + ".inner" * depth
            for number, deepest in enumerate(self._depths)
            for depth in range(deepest + 1)
        ]
        chosen = {name: self._random.choice(_RECIPES) for name in names}
        if self._seed % 3 == 0:
            others = random.Random(self._seed)
            chosen = {name: others.choice(_LEAVING_OUT) if "elective" in str(r) else r for name, r in chosen.items()}
        return {name: recipe for name, recipe in chosen.items() if recipe is not None}

    def _model(self) -> Tower:
        blocks = []
        for kind, depth, twice in zip(self._kinds, self._depths, self._twice, strict=True):
            block = kind()
            for _ in range(depth):
                block = Around(block, twice)
            blocks.append(block)
        return Tower(blocks, self._order)

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.randn(ROWS, WIDTH, generator=self._data) if x is None else x
        with torch.autocast("cpu", torch.bfloat16, enabled=self._is_autocast):
            return self.model(x)

    def run(self, rig: HandleRig | None) -> list[object]:
        torch.manual_seed(self._seed)
        self._data = torch.Generator().manual_seed(self._seed)
        self.model = self._model()
        handle = None if rig is None else rig.offload(self.model)
        results: list[object] = []
        for number, step in enumerate(self._steps):
            if handle is not None and number in (0, 2):
                self._decide(handle, number // 2)
            step(self, results)
            results += [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
            results += [buffer.clone() for buffer in self.model.buffers()]
            results.append(torch.get_rng_state())
            self.model.zero_grad()
        return results

    def _decide(self, handle: OffloadHandle, which: int) -> None:
        plan = self._plans[which]
        if plan is None:
            handle.set_recipe(self._recipes[which])
        else:
            handle.set_plan(plan)


def _plain(program, results):
    loss = program.forward()
    loss.backward()
    results.append(loss.detach())


def _accumulate(program, results):
    for _ in range(2):
        _plain(program, results)


def _retained(program, results):
    loss = program.forward()
    loss.backward(retain_graph=True)
    loss.backward()


def _first_in_first_out(program, results):
    losses = [program.forward() for _ in range(3)]
    while losses:
        losses.pop(0).backward()


def _last_in_first_out(program, results):
    losses = [program.forward() for _ in range(2)]
    while losses:
        losses.pop().backward()


def _dropped(program, results):
    program.forward()
    _plain(program, results)


def _partial(program, results):
    x = torch.randn(ROWS, WIDTH, generator=program._data, requires_grad=True)
    loss = program.forward(x)
    results += torch.autograd.grad(loss, list(program.model.layers[-1].parameters()), retain_graph=True)
    results += torch.autograd.grad(loss, [x])


def _evaluated(program, results):
    loss = program.forward()
    program.model.eval()
    with torch.no_grad() if GradientInside not in program._kinds else torch.enable_grad():
        results.append(program.forward().detach())
    loss.backward()
    program.model.train()


def _explodes_in_forward(program, results):
    hook = program.model.layers[-1].register_forward_hook(_raise)
    with contextlib.suppress(Boom):
        program.forward()
    hook.remove()


def _explodes_in_backward(program, results):
    hook = program.model.layers[-1].register_forward_pre_hook(lambda module, args: Explode.apply(*args))
    with contextlib.suppress(Boom):
        program.forward().backward()
    hook.remove()
    _plain(program, results)


def _raise(*_):
    raise Boom


_STEPS = [
    _plain, _plain, _accumulate, _retained, _first_in_first_out, _last_in_first_out, _dropped, _partial, _evaluated,
    _explodes_in_forward, _explodes_in_backward,
]  # fmt: skip


def explore_recipes(seed: int) -> str | None:
    """Run program `seed` on the simulator, and compare with the plain twin. Returns None, or the failure."""
    program = RecipeProgram(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a chosen model may keep everything
        plain = program.run(None)
        choose = random.Random(~seed)
        device = SimDevice(seed, choose.choice(["late", "early", "shuffled"]))
        rig = HandleRig(
            device,
            make_store=lambda own: HostStore(own, 2**24, smallest_slab_bytes=2**14),
            window=choose.choice([1, 200, 1000, 10**6]),
            prefetch=choose.choice([1, 500, 3000, 10**6]),
            min_bytes=choose.choice([1, 1, 1, 250]),
        )
        ours = program.run(rig)
    device.finish()
    if device.faults:
        return f"{program}: {device.faults[0]} ({len(device.faults)} faults)"
    if len(ours) != len(plain):
        return f"{program}: {len(ours)} results, {len(plain)} in the plain run"
    for at, (mine, twin) in enumerate(zip(ours, plain, strict=True)):
        if (mine is None) != (twin is None) or (mine is not None and bits(mine) != bits(twin)):
            return f"{program}: result {at} of {len(plain)} differs from the plain run"
    torch.ones((), requires_grad=True).exp().backward()  # torch owns the graph of a failed backward until the next
    rig.check_at_rest()
    return None
