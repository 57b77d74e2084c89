"""The norm after the blocks is planned with the blocks, wherever forward calls the norm; steps equal the twin's."""

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
from ebbtide._planner.solve import Solver
from ebbtide._types import Reason

NBYTES = ROWS * WIDTH * 4
LAYERS = ["layers.0", "layers.1", "layers.2"]
BUDGETS = [{}, {"budget": "64GiB"}]


class RmsNorm(nn.Module):
    """A norm in the manner of transformers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Calls(Block):
    """A block that calls a module outside of the block."""

    def forward(self, x):
        return self.norm_outside[0](super().forward(x))


class Model(nn.Module):
    def __init__(self, order="behind", block=Block):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in LAYERS)
        self.norm = RmsNorm()
        self.head = nn.Linear(WIDTH, 8)
        self.order = order
        for layer in self.layers:
            layer.norm_outside = [self.norm]  # in a list: no child of the block

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
    """Results of a step; a norm that is never called has no gradient."""
    return [t for t in step(model, k) if t is not None]


def follow(model, twin, steps=8):
    handle = model.__dict__["_ebbtide_handle"]
    for k in range(steps):
        assert_equal(seen(model, k), seen(twin, k))
    return handle._planning.controller.phase


ORDERS = {
    "behind": [*LAYERS, "norm"],
    "before": ["norm", *LAYERS],
    "between": ["layers.0", "norm", "layers.1", "norm", "layers.2", "norm"],
    "twice": [*LAYERS, "norm", "norm"],
    "never": LAYERS,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("settings", BUDGETS)
def test_the_norm_is_planned_where_forward_calls_it(order, settings):
    model = make(order)
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    assert follow(model, make(order)) is Phase.PLANNED
    assert [region.name for region in handle.profile.regions] == ORDERS[order]
    assert set(handle.plan.regions) == set(ORDERS[order])
    assert all(region.forward_s > 0 and region.backward_s > 0 for region in handle.profile.regions)
    assert sum(region.grad_bytes for region in handle.profile.regions) == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("settings", BUDGETS)
def test_a_norm_that_blocks_call_is_planned_with_the_blocks(settings):
    model = make("never", Calls)
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    assert follow(model, make("never", Calls)) is Phase.PLANNED
    assert list(handle.plan.regions) == LAYERS


def test_measuring_drops_a_norm_that_blocks_call():
    profile = measure(make("never", Calls), batch(0), **SETTINGS)
    assert [region.name for region in profile.regions] == LAYERS


def test_tensors_saved_by_the_norm_belong_to_the_norm():
    with_norm = measure(make(), batch(0), **SETTINGS)
    without = measure(make(), batch(0), regions=["layers.*"], **SETTINGS)
    norm = with_norm.regions[-1]
    # y for the square and for the product, the result of rsqrt, and the product for the product with the weight.
    assert [save.nbytes for save in norm.saved_tensors if save.nbytes >= NBYTES] == [NBYTES, NBYTES]
    assert [save.nbytes for save in norm.inputs] == [NBYTES]
    assert norm.recompute_s > 0
    assert len(with_norm.outside.post_region_points) < len(without.outside.post_region_points)
    assert with_norm.regions[:-1] != without.regions[:-1]  # times differ
    for mine, other in zip(with_norm.regions[:-1], without.regions, strict=True):
        assert [(s.index, s.nbytes) for s in mine.saved_tensors] == [(s.index, s.nbytes) for s in other.saved_tensors]


def tight(profile):
    """The plan with the least memory, where the peak is after the last region and nothing may move."""
    turns = tuple(dataclasses.replace(turn, peak_bytes=2**30) for turn in profile.outside.post_region_points)
    around = dataclasses.replace(profile.outside, post_region_points=turns)
    known = dataclasses.replace(profile, outside=around, base_bytes=0, base={}, host_limit_bytes=0)
    return Solver(known).solve(Solver(known).smallest_budget())


def test_a_plan_that_recomputes_the_norm_equals_the_twin():
    model = make()
    planned = tight(measure(model, batch(0), **SETTINGS))
    assert str(planned.regions["norm"].recipe) == "recompute, inputs kept"
    handle = ebbtide.offload(model, plan=planned, **SETTINGS)
    for k in range(3):
        assert_equal(step(model, k), step(make(), k))
    assert handle.stats().recomputed.count > 0


def test_without_a_budget_the_norm_moves_nothing():
    """Backward needs the tensors at once."""
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    left = set()
    handle.subscribe(
        lambda event: left.add(event.site.split("#")[0]) if event.kind is ebbtide.EventKind.RELEASED else None
    )
    follow(model, make())
    assert "norm" not in left


def test_the_norm_is_no_region_of_recipes_or_of_keep_last():
    for settings in ({"recipe": "recompute"}, {"keep_last": 1}, {"mode": "all"}, {"regions": "layers.*"}):
        model = make()
        handle = ebbtide.offload(model, **SETTINGS, **settings)
        step(model, 0)
        assert list(handle.regions) == LAYERS
    assert handle.stats().kept.get(Reason.KEEP_LAST) is None


def test_a_profile_without_the_norm_is_still_of_use(tmp_path):
    path = tmp_path / "profile.json"
    model = make()
    measure(model, batch(0), regions=["layers.*"], **SETTINGS).save(path)
    handle = ebbtide.offload(model, budget=a_large_budget(), profile=path, **SETTINGS)
    assert list(handle.plan.regions) == LAYERS
    assert follow(model, make()) is Phase.PLANNED


class Headed(Model):
    """The head is compiled together with the norm."""

    def __init__(self):
        super().__init__()
        self.headed = torch.compile(lambda x: self.head(self.norm(x)).square().mean(), backend="eager")

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.headed(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", BUDGETS)
def test_a_norm_inside_a_larger_graph_goes_unplanned(settings):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Headed()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EbbtideWarning)
        warnings.filterwarnings("ignore", message=".* moved nothing in its first planned forward")
        assert follow(model, make()) is Phase.PLANNED
    assert list(handle.plan.regions) == LAYERS
