"""The norm behind the blocks is planned with them, wherever forward calls it; all steps equal the twin's."""

import dataclasses
import warnings

import pytest
import torch
from control.test_controller import ROWS, SETTINGS, WIDTH, Block, a_large_budget, batch, step
from support import assert_equal
from torch import nn

import ebbtide
from ebbtide import EbbtideWarning
from ebbtide._control.controller import Phase
from ebbtide._dry_run import measure
from ebbtide._planner.solve import Solver, smallest_budget
from ebbtide.types import Reason

NBYTES = ROWS * WIDTH * 4
LAYERS = ["layers.0", "layers.1", "layers.2"]
BUDGETS = [{}, {"budget": "64GiB"}]


class RmsNorm(nn.Module):
    """As models write their own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Calls(Block):
    """A block that calls what is outside of it."""

    def forward(self, x):
        return self.norm_behind[0](super().forward(x))


class Model(nn.Module):
    def __init__(self, order="behind", block=Block):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in LAYERS)
        self.norm = RmsNorm()
        self.head = nn.Linear(WIDTH, 8)
        self.order = order
        for layer in self.layers:
            layer.norm_behind = [self.norm]  # in a list it is none of the block's own modules

    def forward(self, x):
        if self.order == "before":
            x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
            if self.order == "between":
                x = self.norm(x)
        if self.order in ("behind", "twice"):
            x = self.norm(x)
        if self.order == "twice":
            x = self.norm(x.sin())
        return self.head(x).square().mean()


def make(*args):
    torch.manual_seed(0)
    return Model(*args)


def seen(model, k):
    """What a step makes; a norm that is never called has no gradient."""
    return [t for t in step(model, k) if t is not None]


def follow(model, twin, steps=8):
    handle = model.__dict__["_ebbtide_handle"]
    for k in range(steps):
        assert_equal(seen(model, k), seen(twin, k))
    return handle._control.phase


ORDERS = {
    "behind": [*LAYERS, "norm"],
    "before": ["norm", *LAYERS],
    "between": ["layers.0", "norm", "layers.1", "norm", "layers.2", "norm"],
    "twice": [*LAYERS, "norm", "norm"],
    "never": LAYERS,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("settings", BUDGETS)
def test_it_is_planned_where_forward_calls_it(order, settings):
    model = make(order)
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    assert follow(model, make(order)) is Phase.PLANNED
    assert [region.name for region in handle.profile.regions] == ORDERS[order]
    assert set(handle.plan.regions) == set(ORDERS[order])
    assert all(region.forward_s > 0 and region.backward_s > 0 for region in handle.profile.regions)
    assert sum(region.grad_bytes for region in handle.profile.regions) == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("settings", BUDGETS)
def test_one_that_blocks_call_is_planned_with_them(settings):
    model = make("never", Calls)
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    assert follow(model, make("never", Calls)) is Phase.PLANNED
    assert list(handle.plan.regions) == LAYERS


def test_measuring_lets_go_of_one_that_blocks_call():
    profile = measure(make("never", Calls), batch(0), **SETTINGS)
    assert [region.name for region in profile.regions] == LAYERS


def test_what_it_saves_is_its_own_and_no_more_behind_the_last_region():
    with_norm = measure(make(), batch(0), **SETTINGS)
    without = measure(make(), batch(0), regions=["layers.*"], **SETTINGS)
    norm = with_norm.regions[-1]
    # y for its square and for the product, rsqrt's result for its own backward, the product for that with the weight.
    assert [save.nbytes for save in norm.saves if save.nbytes >= NBYTES] == [NBYTES, NBYTES]
    assert [save.nbytes for save in norm.inputs] == [NBYTES]
    assert norm.again_s > 0
    assert len(with_norm.around.turns) < len(without.around.turns)
    assert with_norm.regions[:-1] != without.regions[:-1]  # times differ
    for mine, other in zip(with_norm.regions[:-1], without.regions, strict=True):
        assert [(s.index, s.nbytes) for s in mine.saves] == [(s.index, s.nbytes) for s in other.saves]


def tight(profile):
    """The plan that needs the least memory, where the peak is behind the last region and nothing may move."""
    turns = tuple(dataclasses.replace(turn, peak_bytes=2**30) for turn in profile.around.turns)
    around = dataclasses.replace(profile.around, turns=turns)
    known = dataclasses.replace(profile, around=around, base_bytes=0, base={}, host_limit_bytes=0)
    return Solver(known).solve(smallest_budget(known))


def test_a_plan_that_runs_it_again_equals_the_twin():
    model = make()
    planned = tight(measure(model, batch(0), **SETTINGS))
    assert str(planned.regions["norm"].recipe) == "recompute, inputs kept"
    handle = ebbtide.offload(model, plan=planned, **SETTINGS)
    for k in range(3):
        assert_equal(step(model, k), step(make(), k))
    assert handle.stats().recomputed.count > 0


def test_without_a_budget_nothing_of_it_leaves():
    """It is needed again at once."""
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    left = set()
    handle.subscribe(
        lambda event: left.add(event.site.split("#")[0]) if event.what is ebbtide.EventKind.RELEASED else None
    )
    follow(model, make())
    assert "norm" not in left


def test_it_is_no_region_of_recipes_or_of_what_is_kept_last():
    for settings in ({"recipe": "recompute"}, {"keep_last": 1}, {"mode": "all"}, {"regions": "layers.*"}):
        model = make()
        handle = ebbtide.offload(model, **SETTINGS, **settings)
        step(model, 0)
        assert list(handle.regions) == LAYERS
    assert handle.stats().kept.get(Reason.KEEP_LAST) is None


def test_a_profile_without_it_is_of_use_still(tmp_path):
    path = tmp_path / "profile.json"
    model = make()
    measure(model, batch(0), regions=["layers.*"], **SETTINGS).save(path)
    handle = ebbtide.offload(model, budget=a_large_budget(), profile=path, **SETTINGS)
    assert list(handle.plan.regions) == LAYERS
    assert follow(model, make()) is Phase.PLANNED


class Headed(Model):
    """Its head is compiled together with the norm."""

    def __init__(self):
        super().__init__()
        self.headed = torch.compile(lambda x: self.head(self.norm(x)).square().mean(), backend="eager")

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.headed(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", BUDGETS)
def test_one_in_a_graph_of_more_goes_unplanned(settings):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Headed()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EbbtideWarning)
        warnings.filterwarnings("ignore", message=".* moved nothing in its first planned forward")
        assert follow(model, make()) is Phase.PLANNED
    assert list(handle.plan.regions) == LAYERS
