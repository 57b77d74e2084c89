"""Planning on an example batch: the plan is that of a training, and the model is left as it was, bit for bit."""

import collections
import dataclasses
import random

import numpy
import psutil
import pytest
import torch
from control.test_controller import ROWS, SETTINGS, WIDTH, Block, Stack, batch, follow, make, step
from support import assert_equal
from torch import nn

import ebbtide
from ebbtide import ConfigError, ModuleError, PlanError
from ebbtide._devices.cpu import CpuDevice
from ebbtide._dry_run import measure, plan
from ebbtide._planner.solve import smallest_budget

GIB = 2**30


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


@pytest.fixture(scope="module")
def profile():
    return measure(make(), batch(0), **SETTINGS)


class Noisy(nn.Module):
    """Batch statistics, dropout, draws of every generator, a buffer that is made anew and one that may be missing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)) for _ in range(2))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("none", None)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.last = x.detach().mean(0)
        return x * random.random() * numpy.random.rand()


def state_of(model):
    """All that must not change, by identity and by bytes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    grads = {name: p.grad for name, p in model.named_parameters()}
    draws = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m._compiled_call_impl, m.training, sorted(m.__dict__))
        for m in model.modules()
    ]
    copies = [None if t is None else t.detach().clone() for t in (*tensors.values(), *grads.values())]
    return {**tensors, **{f"{name}.grad": grad for name, grad in grads.items()}}, copies, draws, hooks


def assert_unchanged(model, before):
    tensors, copies, draws, hooks = before
    now, now_copies, now_draws, now_hooks = state_of(model)
    assert {name: id(t) for name, t in now.items()} == {name: id(t) for name, t in tensors.items()}
    pairs = zip(copies, now_copies, strict=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
    assert torch.equal(draws[0], now_draws[0])
    assert draws[1] == now_draws[1]
    assert all(numpy.array_equal(a, b) for a, b in zip(draws[2], now_draws[2], strict=True))
    assert hooks == now_hooks


def with_gradients(model):
    model(batch(1)).sum().backward()
    return model


@pytest.mark.parametrize("budget", [None, "1TiB"])
@pytest.mark.parametrize("prepare", [lambda model: model, with_gradients], ids=["fresh", "gradients"])
def test_the_model_is_left_as_it_was(budget, prepare):
    model = prepare(Noisy())
    model.layers[1][2].eval()
    given = batch(0)
    given.grad = torch.ones_like(given)
    before, grad = state_of(model), given.grad
    plan(model, given, budget=budget, **SETTINGS)
    assert_unchanged(model, before)
    assert given.grad is grad
    assert torch.equal(grad, torch.ones_like(grad))


class Stop(BaseException):
    pass


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_after_an_exception_it_is_as_it_was_too(failing):
    model = with_gradients(Noisy())
    steps = iter(range(9))

    def loss(output):
        if next(steps) == failing:
            raise Stop
        return output.sum()

    before = state_of(model)
    with pytest.raises(Stop):
        plan(model, batch(0), budget="1TiB", loss=loss, **SETTINGS)
    assert_unchanged(model, before)
    ebbtide.offload(model, **SETTINGS).remove()


def light(profile):
    """Nothing was there before the step."""
    return dataclasses.replace(profile, base_bytes=0, base={})


@pytest.mark.parametrize("is_tight", [False, True])
def test_training_goes_by_the_plan_and_equals_the_twin(profile, is_tight):
    model, twin = make(), make()
    known = light(profile) if is_tight else None
    budget = smallest_budget(known) if is_tight else 2**50
    planned = plan(model, batch(0), budget=str(budget), profile=known, **SETTINGS)
    assert planned.budget_bytes == budget
    assert list(planned.regions) == ["layers.0", "layers.1", "layers.2"]
    assert is_tight == any(region.recipe.action != "keep" for region in planned.regions.values())
    handle = ebbtide.offload(model, plan=planned, **SETTINGS)
    for k in range(3):
        assert_equal(step(model, k), step(twin, k))
    assert handle.profile is None  # nobody watches
    assert (handle.stats().recomputed.count + handle.stats().out.count > 0) == is_tight


def test_a_profile_says_what_that_of_a_training_does(profile):
    model = make()
    handle = ebbtide.offload(model, budget=psutil.virtual_memory().total, **SETTINGS)
    follow(model, 5)
    for mine, others in zip(profile.regions, handle.profile.regions, strict=True):
        assert [(s.index, s.nbytes) for s in mine.saves] == [(s.index, s.nbytes) for s in others.saves]
        assert [(d.index, d.nbytes, d.op) for d in mine.dear] == [(d.index, d.nbytes, d.op) for d in others.dear]
    assert profile.made_for == handle.profile.made_for
    assert profile.tokens == handle.profile.tokens == ROWS * WIDTH
    assert profile.device_bytes == psutil.virtual_memory().total
    assert profile.has_second_runs


def test_the_host_is_let_ahead_before_times_are_taken(monkeypatch):
    """Where the timed step's first region and its backward begin, and in the detailed one before each second run; never
    for long."""
    held = []
    monkeypatch.setattr(CpuDevice, "hold", lambda self, stream, seconds: held.append(seconds))
    regions = len(measure(make(), batch(0), **SETTINGS).regions)
    assert len(held) == 2 + regions
    assert len(set(held[2:])) == 1
    assert all(0 < seconds <= 0.1 for seconds in held)


def test_reserved_bytes_are_part_of_the_peak(profile):
    keeps = plan(make(), batch(0), budget=2**50, profile=profile)
    reserves = plan(make(), batch(0), budget=2**50, profile=profile, reserve="3GiB")
    assert reserves.predicted.peak_bytes == keeps.predicted.peak_bytes + 3 * GIB
    assert measure(make(), batch(0), reserve="1TiB", **SETTINGS).base["reserved"] == 2**40


def test_with_a_profile_nothing_is_run(profile):
    model = make()
    model.register_forward_pre_hook(lambda *_: pytest.fail("it was called"))
    half = plan(model, batch(0, ROWS // 2), budget="1TiB", profile=profile)
    whole = plan(model, batch(0), budget="1TiB", profile=profile)
    assert half.predicted.step_s == pytest.approx(whole.predicted.step_s / 2)
    with pytest.raises(PlanError, match="the profile is of model"):
        plan(make(4), batch(0), budget="1TiB", profile=profile)


def test_a_profile_that_knows_no_second_runs_serves_no_budget(profile):
    kept = dataclasses.replace(profile, regions=tuple(dataclasses.replace(r, again_s=0.0) for r in profile.regions))
    with pytest.raises(PlanError, match="measured without a budget"):
        plan(make(), batch(0), budget="1TiB", profile=kept)
    assert plan(make(), batch(0), profile=kept).budget_bytes is None


def test_a_share_is_of_the_devices_memory(profile):
    of_a_small_one = dataclasses.replace(profile, device_bytes=2**40)
    assert plan(make(), batch(0), budget=0.5, profile=of_a_small_one).budget_bytes == 2**39
    unknown = dataclasses.replace(profile, device_bytes=None)
    assert plan(make(), batch(0), budget=0.5, profile=unknown).budget_bytes == psutil.virtual_memory().total // 2


def test_a_host_limit_is_planned_for(profile):
    slow = dataclasses.replace(
        light(profile), regions=tuple(dataclasses.replace(r, forward_s=9.0) for r in profile.regions)
    )
    assert plan(make(), batch(0), profile=slow).predicted.moved_bytes > 10
    assert plan(make(), batch(0), profile=slow, host_limit=10).predicted.moved_bytes <= 10


def test_a_budget_that_nothing_fits_says_what_would():
    with pytest.raises(PlanError, match="budget="):
        plan(make(), batch(0), budget="1MiB", **SETTINGS)


# -- batches and losses ------------------------------------------------------------------------------------------------


class Returns(Stack):
    """Gives what `make_output` makes of its last value."""

    def __init__(self, make_output):
        super().__init__(2)
        self.make_output = make_output

    def forward(self, x, *, scale=None):
        for layer in self.layers:
            x = layer(x)
        return self.make_output(x if scale is None else x * scale)


Named = collections.namedtuple("Named", ["logits", "cache"])


@dataclasses.dataclass
class Data:
    logits: torch.Tensor
    names: list


class HasLoss:
    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize(
    "make_output",
    [
        lambda x: x.sum(),
        lambda x: x,
        lambda x: {"loss": x.mean(), "logits": x},
        lambda x: {"loss": x},
        lambda x: HasLoss(x.mean()),
        lambda x: {"logits": [x, (x.sum(), None)], "ids": torch.ones(2, dtype=torch.long)},
        lambda x: Named(x.half(), "cache"),
        lambda x: Data(x, ["a"]),
    ],
    ids=["number", "tensor", "mapping", "losses", "attribute", "nested", "named", "dataclass"],
)
def test_outputs_have_a_loss(make_output):
    assert len(plan(Returns(make_output), batch(0), **SETTINGS).regions) == 2


def test_a_loss_is_made_of_the_output():
    seen = []
    model = Returns(lambda x: (x, "text"))
    plan(model, batch(0), loss=lambda output: seen.append(output[1]) or output[0].square().mean(), **SETTINGS)
    assert seen == ["text"] * 3


@pytest.mark.parametrize(
    "given",
    [
        batch(0),
        [batch(0)],
        (batch(0),),
        {"x": batch(0)},
        collections.UserDict(x=batch(0), scale=torch.ones(1)),
        {"x": batch(0).detach(), "scale": None},
    ],
    ids=["tensor", "list", "tuple", "mapping", "user dict", "no gradient"],
)
def test_batches(given):
    assert len(plan(Returns(torch.sum), given, **SETTINGS).regions) == 2


def test_under_no_grad_and_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        profile = measure(make(), batch(0), **SETTINGS)
    assert {save.nbytes for region in profile.regions for save in region.saves} >= {ROWS * WIDTH * 4 * 2}


# -- what cannot be ----------------------------------------------------------------------------------------------------


def frozen():
    return make().requires_grad_(False)


def trained_in_backward():
    model = make()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    return model


@pytest.mark.parametrize(
    ("model", "given", "settings", "error", "said"),
    [
        (lambda: make().eval(), batch(0), {}, ModuleError, "call train"),
        (frozen, batch(0), {}, ModuleError, "no parameter that requires a gradient"),
        (trained_in_backward, batch(0), {}, ModuleError, "would train it"),
        (make, None, {}, ConfigError, "example_batch is of type NoneType"),
        (make, {"x": 3}, {}, ConfigError, "no tensor in it"),
        (make, batch(0) * 2, {}, ConfigError, "detach"),
        (make, batch(0), {"loss": lambda output: 3}, ConfigError, "loss= gives a int"),
        (make, batch(0), {"loss": lambda output: torch.ones(2)}, ConfigError, r"loss= gives a tensor of shape \(2,\)"),
        (make, batch(0), {"loss": lambda output: torch.ones(1)}, ConfigError, "does not depend on any parameter"),
        (lambda: Returns(lambda x: "text"), batch(0), {}, ConfigError, "returns a str, in which no loss is found"),
        (make, batch(0), {"reserve": "much"}, ConfigError, "reserve='much' is not a size"),
        (make, batch(0), {"budget": 1.5}, ConfigError, "between 0 and 1"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 2)), batch(0), {}, PlanError, "regions="),
    ],
)
def test_what_cannot_be_planned_is_said(model, given, settings, error, said):
    built = model()
    before = state_of(built)
    with pytest.raises(error, match=said):
        plan(built, given, **{**SETTINGS, **settings})
    assert_unchanged(built, before)


def test_a_model_that_has_a_handle():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    with pytest.raises(ModuleError, match="already applied"):
        measure(model, batch(0), **SETTINGS)
    assert model.__dict__["_ebbtide_handle"] is handle


def test_a_batch_that_comes_by_no_region():
    model = make()
    model.unused = nn.Linear(8, 8)
    before = state_of(model)
    with pytest.raises(PlanError, match=r"by none of the 1 regions \(unused\)"):
        measure(model, batch(0), **{**SETTINGS, "regions": "unused"})
    assert_unchanged(model, before)


def test_where_ebbtide_is_switched_off(monkeypatch):
    monkeypatch.setenv("EBBTIDE_DISABLE", "1")
    with pytest.raises(ConfigError, match="EBBTIDE_DISABLE"):
        measure(make(), batch(0), **SETTINGS)
