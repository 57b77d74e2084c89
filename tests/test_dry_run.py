"""Planning on an example batch: the plan equals that of a training, and the model is restored, bit for bit."""

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
from ebbtide._planner.solve import Solver

GIB = 2**30


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


@pytest.fixture(scope="module")
def profile():
    return measure(make(), batch(0), **SETTINGS)


class Noisy(nn.Module):
    """Batch statistics, dropout, random numbers of every generator, a replaced buffer and a missing buffer."""

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
    """Everything that must not change, by identity and by bytes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    grads = {name: p.grad for name, p in model.named_parameters()}
    rng_states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m._compiled_call_impl, m.training, sorted(m.__dict__))
        for m in model.modules()
    ]
    copies = [None if t is None else t.detach().clone() for t in (*tensors.values(), *grads.values())]
    return {**tensors, **{f"{name}.grad": grad for name, grad in grads.items()}}, copies, rng_states, hooks


def assert_unchanged(model, before):
    tensors, copies, rng_states, hooks = before
    now, now_copies, now_rng_states, now_hooks = state_of(model)
    assert {name: id(t) for name, t in now.items()} == {name: id(t) for name, t in tensors.items()}
    pairs = zip(copies, now_copies, strict=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
    assert torch.equal(rng_states[0], now_rng_states[0])
    assert rng_states[1] == now_rng_states[1]
    assert all(numpy.array_equal(a, b) for a, b in zip(rng_states[2], now_rng_states[2], strict=True))
    assert hooks == now_hooks


def with_gradients(model):
    model(batch(1)).sum().backward()
    return model


@pytest.mark.parametrize("budget", [None, "1TiB"])
@pytest.mark.parametrize("prepare", [lambda model: model, with_gradients], ids=["fresh", "gradients"])
def test_the_model_is_restored(budget, prepare):
    model = prepare(Noisy())
    model.layers[1][2].eval()
    example = batch(0)
    example.grad = torch.ones_like(example)
    before, grad = state_of(model), example.grad
    plan(model, example, budget=budget, **SETTINGS)
    assert_unchanged(model, before)
    assert example.grad is grad
    assert torch.equal(grad, torch.ones_like(grad))


class Stop(BaseException):
    pass


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_model_is_restored_after_an_exception(failing):
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
    """Without memory allocated before the step."""
    return dataclasses.replace(profile, base_bytes=0, base={})


@pytest.mark.parametrize("is_tight", [False, True])
def test_training_follows_the_plan_and_equals_the_twin(profile, is_tight):
    model, twin = make(), make()
    known = light(profile) if is_tight else None
    budget = Solver(known).smallest_budget() if is_tight else 2**50
    planned = plan(model, batch(0), budget=str(budget), profile=known, **SETTINGS)
    assert planned.budget_bytes == budget
    assert list(planned.regions) == ["layers.0", "layers.1", "layers.2"]
    assert is_tight == any(region.recipe.action != "keep" for region in planned.regions.values())
    handle = ebbtide.offload(model, plan=planned, **SETTINGS)
    for k in range(3):
        assert_equal(step(model, k), step(twin, k))
    assert handle.profile is None  # no planner
    assert (handle.stats().recomputed.count + handle.stats().out.count > 0) == is_tight


def test_a_profile_equals_the_profile_of_a_training(profile):
    model = make()
    handle = ebbtide.offload(model, budget=psutil.virtual_memory().total, **SETTINGS)
    follow(model, 5)
    for mine, others in zip(profile.regions, handle.profile.regions, strict=True):
        assert [(s.index, s.nbytes) for s in mine.saved_tensors] == [(s.index, s.nbytes) for s in others.saved_tensors]
        assert [(d.index, d.nbytes, d.op) for d in mine.expensive_ops] == [
            (d.index, d.nbytes, d.op) for d in others.expensive_ops
        ]
    assert profile.made_for == handle.profile.made_for
    assert profile.tokens == handle.profile.tokens == ROWS * WIDTH
    assert profile.device_bytes == psutil.virtual_memory().total
    assert profile.has_recomputation


def test_the_device_spins_before_times_are_taken(monkeypatch):
    """Before each region in forward and backward of the timed step, and before each recomputation of the detailed step;
    never for long."""
    held = []
    monkeypatch.setattr(CpuDevice, "spin", lambda self, stream, seconds: held.append(seconds))
    regions = len(measure(make(), batch(0), **SETTINGS).regions)
    assert len(held) == 3 * regions
    assert len(set(held[2 * regions :])) == 1
    assert all(0 < seconds <= 0.1 for seconds in held)


def test_reserved_bytes_are_part_of_the_peak(profile):
    keeps = plan(make(), batch(0), budget=2**50, profile=profile)
    reserves = plan(make(), batch(0), budget=2**50, profile=profile, reserve="3GiB")
    assert reserves.predicted.peak_bytes == keeps.predicted.peak_bytes + 3 * GIB
    assert measure(make(), batch(0), reserve="1TiB", **SETTINGS).base["reserved"] == 2**40


def test_with_a_profile_no_step_runs(profile):
    model = make()
    model.register_forward_pre_hook(lambda *_: pytest.fail("it was called"))
    half = plan(model, batch(0, ROWS // 2), budget="1TiB", profile=profile)
    whole = plan(model, batch(0), budget="1TiB", profile=profile)
    assert half.predicted.step_s == pytest.approx(whole.predicted.step_s / 2)
    with pytest.raises(PlanError, match="the profile is of model"):
        plan(make(4), batch(0), budget="1TiB", profile=profile)


def test_a_profile_without_recomputation_serves_no_budget(profile):
    kept = dataclasses.replace(profile, regions=tuple(dataclasses.replace(r, recompute_s=0.0) for r in profile.regions))
    with pytest.raises(PlanError, match="measured without a budget"):
        plan(make(), batch(0), budget="1TiB", profile=kept)
    assert plan(make(), batch(0), profile=kept).budget_bytes is None


def test_a_share_is_of_the_device_memory(profile):
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


def test_an_impossible_budget_names_a_possible_one():
    with pytest.raises(PlanError, match="budget="):
        plan(make(), batch(0), budget="1MiB", **SETTINGS)


# -- batches and losses ------------------------------------------------------------------------------------------------


class Returns(Stack):
    """Returns `make_output` of the last value."""

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
    "example",
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
def test_batches(example):
    assert len(plan(Returns(torch.sum), example, **SETTINGS).regions) == 2


def test_under_no_grad_and_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        profile = measure(make(), batch(0), **SETTINGS)
    assert {save.nbytes for region in profile.regions for save in region.saved_tensors} >= {ROWS * WIDTH * 4 * 2}


# -- what cannot be ----------------------------------------------------------------------------------------------------


def frozen():
    return make().requires_grad_(False)


def trained_in_backward():
    model = make()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    return model


@pytest.mark.parametrize(
    ("model", "example", "settings", "error", "message"),
    [
        (lambda: make().eval(), batch(0), {}, ModuleError, "call train"),
        (frozen, batch(0), {}, ModuleError, "no parameter that requires a gradient"),
        (trained_in_backward, batch(0), {}, ModuleError, "would train the model"),
        (make, None, {}, ConfigError, "example_batch is of type NoneType"),
        (make, {"x": 3}, {}, ConfigError, "no tensor in it"),
        (make, batch(0) * 2, {}, ConfigError, "detach"),
        (make, batch(0), {"loss": lambda output: 3}, ConfigError, "loss= returns a int"),
        (make, batch(0), {"loss": lambda output: torch.ones(2)}, ConfigError, r"returns a tensor of shape \(2,\)"),
        (make, batch(0), {"loss": lambda output: torch.ones(1)}, ConfigError, "does not depend on any parameter"),
        (lambda: Returns(lambda x: "text"), batch(0), {}, ConfigError, "returns a str, in which no loss is found"),
        (make, batch(0), {"reserve": "much"}, ConfigError, "reserve='much' is not a size"),
        (make, batch(0), {"budget": 1.5}, ConfigError, "between 0 and 1"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 2)), batch(0), {}, PlanError, "regions="),
    ],
)
def test_impossible_settings_are_refused(model, example, settings, error, message):
    built = model()
    before = state_of(built)
    with pytest.raises(error, match=message):
        plan(built, example, **{**SETTINGS, **settings})
    assert_unchanged(built, before)


def test_a_model_with_a_handle_is_refused():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    with pytest.raises(ModuleError, match="already applied"):
        measure(model, batch(0), **SETTINGS)
    assert model.__dict__["_ebbtide_handle"] is handle


def test_a_batch_that_enters_no_region_is_refused():
    model = make()
    model.unused = nn.Linear(8, 8)
    before = state_of(model)
    with pytest.raises(PlanError, match=r"entered none of the 1 regions \(unused\)"):
        measure(model, batch(0), **{**SETTINGS, "regions": "unused"})
    assert_unchanged(model, before)


def test_a_dry_run_needs_ebbtide_enabled(monkeypatch):
    monkeypatch.setenv("EBBTIDE_DISABLE", "1")
    with pytest.raises(ConfigError, match="EBBTIDE_DISABLE"):
        measure(make(), batch(0), **SETTINGS)
