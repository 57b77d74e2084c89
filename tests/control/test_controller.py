"""A handle that plans by itself: the first steps are measured, later steps have a plan, and all equal the twin's."""

import dataclasses
import gc
import sys
import warnings

import psutil
import pytest
import torch
from support import assert_equal
from torch import nn

import ebbtide
from ebbtide import ConfigError, PlanError
from ebbtide._control.controller import Phase
from ebbtide._control.ranks import Ranks, agreed_profile
from ebbtide._devices.cpu import CpuDevice
from ebbtide._planner.options import options_of
from ebbtide._profiling.profile import Profile

WIDTH = 64
ROWS = 256
SETTINGS = {"store": "disk", "min_bytes": 1}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Slope(Stack):
    """The loss has the gradient by the input in it: regions run backward inside of forward."""

    def forward(self, x):
        loss = super().forward(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    gc.collect()
    ebbtide.release_memory()


def make(depth=3, kind=Stack):
    torch.manual_seed(0)
    return kind(depth)


def batch(seed, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def step(model, seed, rows=ROWS):
    model.zero_grad()
    x = batch(seed, rows)
    loss = model(x)
    loss.backward()
    return [loss.detach(), x.grad, *[p.grad for p in model.parameters()]]


def follow(model, steps=8, rows=lambda k: ROWS):
    """Steps that equal the twin's, and the phase in which each began."""
    twin = make(len(model.layers), Slope if isinstance(model, Slope) else Stack)
    phases = []
    handle = model.__dict__["_ebbtide_handle"]
    for k in range(steps):
        assert_equal(step(model, k, rows(k)), step(twin, k, rows(k)))
        phases.append(handle._planning.controller.phase)
    return phases


def test_a_backward_inside_of_forward_is_planned():
    model = make(kind=Slope)
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    assert follow(model)[-1] is Phase.PLANNED
    assert handle.plan.predicted is not None


def a_large_budget():
    return psutil.Process().memory_info().rss + 2**34


def test_the_preparation_of_a_region_is_timed_in_the_step_that_recomputes_all(monkeypatch):
    """As if the device were asynchronous."""
    monkeypatch.setattr("ebbtide._devices.cpu.CpuDevice.is_async", True)
    model = make()
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    follow(model)
    host = handle.profile.host
    # How these compare is tested with costs that are set: a busy host may measure anything.
    assert host.moved_s > 0
    assert min(host.frame_s, host.op_s, host.saved_output_s) >= 0
    assert all(times.forward_s >= 0 and times.ops > 0 for times in host.regions)


class Growing(Stack):
    """More of its blocks run later."""

    active = 2

    def forward(self, x):
        for layer in self.layers[: self.active]:
            x = layer(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize(("settings", "action"), [({"budget": "64GiB"}, "recompute"), ({}, None)])
def test_regions_entered_by_no_measured_step_need_the_least_within_a_budget(settings, action):
    torch.manual_seed(0)
    model = Growing(4)
    handle = ebbtide.offload(model, **settings, **SETTINGS)
    for seed in range(5):
        step(model, seed)
    assert {region.name for region in handle.profile.regions} == {"layers.0", "layers.1"}
    recipe = handle.plan.recipe_of("layers.3")
    assert (None if recipe is None else recipe.action) == action
    twin = Growing(4)
    twin.load_state_dict(model.state_dict())
    model.active = twin.active = 4
    before = handle.stats().recomputed.count
    assert_equal(step(model, 5), step(twin, 5))
    assert (handle.stats().recomputed.count > before) == (action is not None)


class SkipsAtRandom(Stack):
    """As with stochastic depth. `skipped`: blocks of each forward to come."""

    def forward(self, x):
        skipped = self.skipped.pop(0)
        for number, layer in enumerate(self.layers):
            x = x if number in skipped else layer(x)
        return self.head(x).square().mean()


def skipping(*skipped):
    torch.manual_seed(0)
    model = SkipsAtRandom(6)
    model.skipped = list(map(set, skipped))
    return model


@pytest.mark.parametrize("settings", [{"budget": "64GiB"}, {"max_slowdown": 0.3}, {}])
def test_blocks_skipped_at_random_are_planned_by_those_that_both_measured_steps_entered(settings):
    every = [(5,), (1,), (4,), (0, 2), (), (3,), (1, 4)]
    model, twin = skipping(*every), skipping(*every)
    handle = ebbtide.offload(model, **settings, **SETTINGS)
    for seed in range(len(every)):
        found = step(model, seed), step(twin, seed)
        assert_equal(*([t for t in each if t is not None] for each in found))  # None: gradients of a skipped block
    assert [region.name for region in handle.profile.regions] == [f"layers.{k}" for k in (0, 2, 3, 5)]
    actions = {getattr(handle.plan.recipe_of(f"layers.{k}"), "action", None) for k in (1, 4)}
    assert actions == ({"recompute"} if "budget" in settings else {None})


def test_steps_that_enter_mostly_different_regions_are_measured_again():
    every = [(), (0, 1, 2), (3, 4, 5), (), (1,), (), ()]
    model = skipping(*every)
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    for seed in range(len(every)):
        step(model, seed)
    assert len(handle.profile.regions) == 5


@pytest.mark.parametrize("wrong", [{"regions": [3]}, {"budget": "64GiB", "profile": "nonsense"}])
def test_an_error_of_any_kind_leaves_no_handle_behind(wrong, monkeypatch):
    """Also one that is not ours."""
    if "profile" in wrong:
        wrong = {**wrong, "profile": measured_profile()}
        monkeypatch.setattr("ebbtide._control.controller.PlanTuner", lambda *_, **__: 1 // 0)
    model = make()
    with pytest.raises((ebbtide.ConfigError, ZeroDivisionError)):
        ebbtide.offload(model, **wrong, **SETTINGS)
    ebbtide.offload(model, **SETTINGS)
    follow(model, steps=1)


def measured_profile():
    model = make()
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    follow(model, steps=4)
    profile = handle.profile
    handle.remove()
    return profile


def test_a_profile_of_other_settings_is_refused():
    profile = measured_profile()
    with pytest.raises(PlanError, match=r"the profile is of min_bytes '1', not '1048576'"):
        ebbtide.offload(make(), budget="64GiB", profile=profile, store="disk")
    with pytest.raises(PlanError, match=r"of other regions than regions= names \(layers.0, layers.1"):
        ebbtide.offload(make(), budget="64GiB", profile=profile, regions=["layers.*.up"], **SETTINGS)
    frozen = make()
    frozen.layers[0].requires_grad_(False)
    with pytest.raises(PlanError, match="of them trained"):
        ebbtide.offload(frozen, budget="64GiB", profile=profile, **SETTINGS)


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}])
def test_compute_spins_before_each_region_unless_it_has_more_to_do(monkeypatch, is_behind, settings):
    """And before backward. Compute that is behind has not reached the region before."""
    held = []
    device = "ebbtide._devices.cpu.CpuDevice"
    model = make()
    monkeypatch.setattr(f"{device}.spin", lambda self, stream, seconds: held.append((_phase(model), seconds)))
    if is_behind:
        is_done = CpuDevice.is_done
        monkeypatch.setattr(f"{device}.is_done", lambda *on: _phase(model) is not Phase.TIMES and is_done(*on))
    ebbtide.offload(model, **SETTINGS, **settings)
    follow(model)
    # Recomputation gets ahead of the first region's backward where backward begins; reads begin outside of the regions.
    holds = 2 * len(model.layers) + (0 if settings else 1)
    assert [seconds > 0 for phase, seconds in held if phase is Phase.TIMES] == [True] * (1 if is_behind else holds)


def _phase(model):
    return model.__dict__["_ebbtide_handle"]._planning.controller.phase


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}, {"budget": 1.0}])
def test_the_first_steps_are_measured_and_all_equal_the_twin(settings):
    model = make()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    phases = follow(model)
    assert phases[:3] == [Phase.WARM, Phase.TIMES, Phase.DETAILS]
    assert set(phases[3:]) == {Phase.PLANNED}
    assert list(handle.plan.regions) == ["layers.0", "layers.1", "layers.2"]
    assert handle.plan.predicted is not None


def until_frozen(handle, model, most=100):
    """Number of steps."""
    for count in range(most):
        if handle.is_plan_frozen:
            return count
        step(model, count)
    return most


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}, {"max_slowdown": 0.5}])
def test_a_plan_is_frozen_once_its_steps_were_measured(settings):
    model = make()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    count = until_frozen(handle, model)
    assert 3 + 2 + 4 <= count < 100  # measured; while the order is learned; timed
    frozen = handle.plan
    for k in range(3):
        step(model, k)
    assert handle.is_plan_frozen
    assert handle.plan.regions == frozen.regions
    handle.set_plan(frozen)
    assert handle.is_plan_frozen


@pytest.mark.parametrize("measured", [0, 2])
def test_a_plan_that_never_comes_is_waited_for_by_nobody(measured, monkeypatch):
    model = make()
    handle = ebbtide.offload(model, budget="64GiB", **SETTINGS)
    for k in range(measured):
        step(model, k)
    assert not handle.is_plan_frozen
    with monkeypatch.context() as patch:
        patch.setenv("EBBTIDE_DISABLE", "1")
        assert handle.is_plan_frozen
    handle.remove()
    assert handle.is_plan_frozen


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        ({"budget": "1GiB"}, [{(1, ((0, 0),))}] * 3),
        ({"max_slowdown": 0.1}, [{(1, ())}, {(None, ())}, {(1, ())}]),
    ],
)
def test_measured_steps_have_windows_without_a_budget_alone(goal, expected):
    """Of these steps the timed one alone brings inputs back early: the others compare, and hold recomputed tensors for
    longer."""
    model, x = Stack(), torch.randn(ROWS, WIDTH, requires_grad=True)
    handle = ebbtide.offload(model, **goal, **SETTINGS)
    windows = []
    for _ in range(3):
        model(x).backward()
        windows.append({(region.prefetch_bytes, region.release) for region in handle.plan.regions.values()})
    handle.remove()
    assert windows == expected


class Collecting(Stack):
    """A forward in which Python's garbage collector looks at all objects, in the steps `when`."""

    def __init__(self, *when):
        super().__init__()
        self.when, self.steps = when, 0

    def forward(self, x):
        self.steps += 1
        if self.steps in self.when:
            gc.collect()
        return super().forward(x)


@pytest.mark.parametrize(("when", "numbers"), [((1, 3), "123"), ((2,), "1223"), ((2, 3), "1223")])
def test_a_timed_step_with_a_full_garbage_collection_is_repeated_once(when, numbers):
    """The collection takes longer than a forward of most models."""
    model, x = Collecting(*when), torch.randn(ROWS, WIDTH, requires_grad=True)
    handle = ebbtide.offload(model, budget="1GiB", **SETTINGS)
    found = ""
    for _ in numbers:
        loss = model(x)
        found += handle.plan.status.removeprefix("no plan yet: measuring step ").removesuffix(" of 3")
        loss.backward()
    handle.remove()
    assert found == numbers


def test_a_profile_says_what_the_regions_save():
    model = make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    follow(model, 5)
    profile = handle.profile
    assert profile.tokens == ROWS * WIDTH
    for region in profile.regions:
        # x for the norm, its output for the first product, that one's for gelu, and gelu's for the second.
        assert sum(save.nbytes for save in region.saved_tensors if save.nbytes >= 2**14) == ROWS * WIDTH * 4 * (
            1 + 1 + 4 + 4
        )
        assert [save.nbytes for save in region.inputs] == [ROWS * WIDTH * 4]
        assert [call.nbytes for call in region.expensive_ops] == [
            ROWS * WIDTH * 4 * 4
        ]  # the second product is never recomputed
        assert region.forward_s > 0
        assert region.recompute_s > 0
        assert region.backward_s > 0
    assert profile.base["parameters"] == sum(p.numel() * 4 for p in model.parameters())


def test_kept_regions_and_recomputed_regions_have_one_profile():
    kept, again = make(), make()
    ebbtide.offload(kept, **SETTINGS)
    ebbtide.offload(again, budget=a_large_budget(), **SETTINGS)
    for model in (kept, again):
        follow(model, 5)
    profiles = [model.__dict__["_ebbtide_handle"].profile for model in (kept, again)]
    saves = [
        [[(s.index, s.nbytes) for s in region.saved_tensors] for region in profile.regions] for profile in profiles
    ]
    assert saves[0][1:] == saves[1][1:]  # the caller holds the input of the first region


class Again(Stack):
    """Comes by one region twice, and by another one never."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(self.layers[0](x))


def test_every_gradient_is_counted_once():
    model = Again()
    handle = ebbtide.offload(model, regions=["layers.*", "unused"], **SETTINGS)
    for k in range(5):
        step(model, k)
    block, others = (4 * sum(p.numel() for p in m.parameters()) for m in (model.layers[0], model))
    found = [region.grad_bytes for region in handle.profile.regions]
    assert found == [0, block, block, others - 2 * block]  # of the head, and of what is not entered, before the last


def test_gradients_are_there_before_a_step_or_made_in_it():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    for k in range(4):
        if k % 2 == 0:
            model.zero_grad()  # details are recorded in the third step, and read in the fourth
        model(batch(k)).backward()
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    assert handle.profile.base["gradients"] == 0
    assert sum(region.grad_bytes for region in handle.profile.regions) == nbytes


class Twice(nn.Module):
    """Saves one tensor twice, and another one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.inner(x).exp()  # exp saves the result,
        return y.sin() + y * y  # and so do sin, and the product twice


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}])
def test_saved_tensors_of_one_memory_travel_together_or_not_at_all(settings):
    model = nn.Sequential(Twice(), Twice())
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    for k in range(5):
        model(batch(k)).sum().backward()
    for region in handle.profile.regions[1:]:
        owner = next(save for save in region.saved_tensors if save.nbytes > 0 and save.shares == -1 and save.index > 0)
        sharing = [save.index for save in region.saved_tensors if save.shares == owner.index]
        assert len(sharing) == 3
        for option in options_of(region):
            sites = option.recipe.sites
            if option.recipe.action == "offload" and sites is not None and owner.index in sites:
                assert set(sharing) <= set(sites)


def test_with_a_profile_the_first_step_has_a_plan(tmp_path):
    model = make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    follow(model, 5)
    handle.profile.save(tmp_path / "profile.json")
    handle.remove()
    loaded = Profile.load(tmp_path / "profile.json")
    handle = ebbtide.offload(model, budget=a_large_budget(), profile=loaded, **SETTINGS)
    assert handle.plan.predicted is not None
    assert set(follow(model, 3)) == {Phase.PLANNED}


def test_a_profile_of_something_else_is_refused():
    model = make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    follow(model, 5)
    profile = handle.profile
    handle.remove()
    for other in (make(4), make()):
        wrong = profile if len(other.layers) == 4 else dataclasses.replace(profile, made_for={"torch": "1.0"})
        with pytest.raises(PlanError, match="measure one here"):
            ebbtide.offload(other, budget="1GiB", profile=wrong, **SETTINGS)
        ebbtide.offload(other, **SETTINGS).remove()  # nothing is left of the first


def test_a_budget_that_nothing_fits_says_what_would():
    model = make()
    ebbtide.offload(model, budget="1MiB", **SETTINGS)
    with pytest.raises(PlanError, match="budget="):
        follow(model, 5)


def test_batches_of_other_sizes_have_plans_of_their_own():
    model, twin = make(), make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    planned_for = set()
    for k in range(12):
        rows = ROWS if k < 5 else (64, 200, 256, 512)[k % 4]
        assert_equal(step(model, k, rows), step(twin, k, rows))
        planned_for |= {handle._planning.controller.tuner.tokens} if k > 3 else set()
    assert handle._planning.controller.phase is Phase.PLANNED
    assert len(planned_for) == 4
    assert {64 * WIDTH, 256 * WIDTH, 512 * WIDTH} < planned_for


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}])
def test_batches_of_which_no_two_are_alike_are_planned_too(settings):
    model = make()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    phases = follow(model, 10, rows=lambda k: ROWS + 8 * k)
    assert set(phases[3:]) == {Phase.PLANNED}
    assert handle.profile.tokens == (ROWS + 16) * WIDTH


@pytest.mark.parametrize("change", ["set_recipe", "set_plan"])
@pytest.mark.parametrize("after", [1, 5])
def test_what_a_user_sets_stays(change, after):
    model, twin = make(), make()
    handle = ebbtide.offload(model, **SETTINGS)
    for k in range(10):
        if k == after:
            recipe = ebbtide.Recipe("recompute")
            plan = ebbtide.Plan({f"layers.{n}": ebbtide.RegionPlan(recipe) for n in range(3)})
            handle.set_recipe("recompute") if change == "set_recipe" else handle.set_plan(plan)
        assert_equal(step(model, k), step(twin, k))
    assert {r.action for r in handle.recipes.values()} == {"recompute"}


@pytest.mark.parametrize(
    "recipe", ["compress", {"layers.9": "keep"}, {"layers.*": ebbtide.Recipe("selective", ops=("matmul@mpl",))}]
)
def test_a_recipe_that_is_refused_leaves_the_planner_planning(recipe):
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    step(model, 0)
    with pytest.raises((ConfigError, ebbtide.ModuleError)):
        handle.set_recipe(recipe)
    assert set(follow(model)[3:]) == {Phase.PLANNED}
    assert handle.plan.predicted is not None


def test_a_plan_that_does_not_fit_is_one_error_and_training_may_go_on():
    model, twin = make(), make()
    handle = ebbtide.offload(model, budget="1MiB", **SETTINGS)
    errors = 0
    for k in range(8):
        try:
            ours = step(model, k)
        except PlanError:
            errors += 1
            continue
        assert_equal(ours, step(twin, k))
    assert errors == 1
    assert handle._planning.controller.phase is Phase.GAVE_UP


def test_alternating_sizes_are_not_planned_for_again_and_again():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    follow(model, 60, rows=lambda k: ROWS if k % 10 < 5 else 2 * ROWS)
    assert all(size.corrections <= 2 for size in handle._planning.controller.tuner._sizes.values())


@pytest.mark.parametrize(
    ("settings", "does"), [({}, "moves nothing"), ({"budget": "64GiB"}, "recomputes every region")]
)
def test_a_capture_before_there_is_a_plan_warns_once(monkeypatch, settings, does):
    """A CPU captures nothing: two of the first steps are marked as captured."""
    model = make()
    handle = ebbtide.offload(model, **SETTINGS, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(handle._attachment, "engine", lambda: None)
        patch.setattr(handle._attachment, "is_captured", lambda: True)
        with pytest.warns(ebbtide.EbbtideWarning, match=f"{does} in every replay") as warned:
            step(model, 0)
            step(model, 1)
    assert len(warned) == 1
    for k in range(6):
        step(model, k)
    assert handle.profile is not None  # measuring goes on after the capture
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(handle._attachment, "engine", lambda: None)
        monkeypatch.setattr(handle._attachment, "is_captured", lambda: True)
        step(model, 9)  # by a plan: no reason to warn


def test_forwards_without_backward_do_not_hold_the_plan_up():
    model, twin = make(), make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    for k in range(40):
        model(batch(k))  # dropped
        with torch.no_grad():
            model(batch(k))
        assert_equal(step(model, k), step(twin, k))
    assert handle._planning.controller.phase is Phase.PLANNED
    assert handle.profile.graphs == 1


def test_accumulated_and_interleaved_backwards_equal_the_twin():
    model, twin = make(), make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)

    def two(m, seed):
        m.zero_grad()
        losses = [m(batch(seed)), m(batch(seed + 100))]
        for loss in reversed(losses):
            loss.backward()
        return [*[loss.detach() for loss in losses], *[p.grad for p in m.parameters()]]

    for k in range(8):
        assert_equal(two(model, k), two(twin, k))
    assert handle._planning.controller.phase is Phase.PLANNED
    assert handle.profile.graphs == 2


class Exhausted(nn.Module):
    """A block that runs out of memory on demand."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.is_exhausted = False

    def forward(self, x):
        if self.is_exhausted:
            raise torch.OutOfMemoryError("no memory left")
        return self.block(x)


def said_when_out_of_memory(model):
    """In notes of the error, or where Python has none in a warning."""
    if sys.version_info >= (3, 11):
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(batch(0))
        return "".join(caught.value.__notes__)
    with pytest.warns(ebbtide.EbbtideWarning) as warned, pytest.raises(torch.OutOfMemoryError):
        model(batch(0))
    return "".join(str(warning.message) for warning in warned)


@pytest.mark.parametrize("on_oom", ["raise", "replan"])
@pytest.mark.parametrize("steps_before", [3, 5])
def test_out_of_memory_says_what_was_planned_and_goes_on(steps_before, on_oom):
    """Also in the first planned step, the first step that keeps more than necessary."""
    torch.manual_seed(0)
    model = nn.Sequential(Exhausted(), Exhausted())
    handle = ebbtide.offload(model, budget=a_large_budget(), on_oom=on_oom, **SETTINGS)
    for _ in range(steps_before):
        model(batch(0)).sum().backward()
    before = handle._planning.controller.user_budget_bytes
    model[1].is_exhausted = True
    assert "was predicted for a budget of" in said_when_out_of_memory(model)
    model[1].is_exhausted = False
    after = handle._planning.controller.tuner.limit_bytes
    assert (after < before) == (on_oom == "replan")
    model(batch(0)).sum().backward()


def test_a_model_without_repeated_blocks_wants_its_regions_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with pytest.raises(PlanError, match="regions="):
        ebbtide.offload(model, **SETTINGS)
    handle = ebbtide.offload(model, regions=["0", "1"], **SETTINGS)
    for _ in range(5):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert list(handle.plan.regions) == ["0", "1"]


@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_ranks_come_to_a_plan_however_many_forwards_a_step_has(forwards, monkeypatch):
    monkeypatch.setattr("ebbtide._model.planning.ranks_of", Ranks)
    model, twin = make(), make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)

    def accumulated(m, k):
        m.zero_grad()
        sum(m(batch(10 * k + j)) for j in range(forwards)).backward()
        return [p.grad for p in m.parameters()]

    for k in range(14):
        assert_equal(accumulated(model, k), accumulated(twin, k))
    assert handle._planning.controller.phase is Phase.PLANNED


@pytest.mark.parametrize("budget_bytes", [None, 2**40])
def test_several_forwards_and_one_backward_are_planned_for_once(budget_bytes):
    """Their times say nothing of one forward's, and are compared with none."""
    model, twin = make(), make()
    handle = ebbtide.offload(model, budget=budget_bytes, **SETTINGS)

    def together(m, k):
        m.zero_grad()
        (m(batch(k)) + m(batch(100 + k))).backward()
        return [p.grad for p in m.parameters()]

    for k in range(12):
        assert_equal(together(model, k), together(twin, k))
    assert handle._planning.controller.phase is Phase.PLANNED
    assert handle._planning.controller.tuner._size.corrections == 0
    assert handle.profile.graphs == 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("most", "count"), [(2, 2), (26, 26), (4, 6), (8, 9), (3, 4)])
def test_graphs_in_flight_are_counted(first, most, count):
    """`count` forwards a step, `most` of them before a backward; before all steps `first` with one forward. The last of
    the measured steps may be the only one with an order."""
    model = make(2)
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    for k in range(first):
        model(batch(k, 16)).backward()
    for _ in range(5):
        waiting = []
        for k in range(count):
            waiting.append(model(batch(k, 16)))
            if len(waiting) == most:
                waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()
    assert handle._planning.controller.phase is Phase.PLANNED
    assert handle.profile.graphs == most
    turns = [number for at in range(count - most) for number in (at, at + most)]
    assert handle.profile.passes == (*range(most), *turns, *range(count - most, count))


def test_dropped_graphs_and_later_steps_are_no_part_of_an_order():
    model = make(2)
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    for _ in range(5):
        losses = [model(batch(k, 16)) for k in range(3)]
        losses.pop(1)
        for _ in range(2):
            losses.pop().backward()
        for k in range(7):
            model(batch(k, 16)).backward()
    assert handle.profile.passes == (0, 1, 1, 0)


def test_an_empty_batch_makes_no_profile():
    model = make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    phases = follow(model, 8, rows=lambda k: 0 if k == 2 else ROWS)
    assert phases[-1] is Phase.PLANNED
    assert handle.profile.tokens == ROWS * WIDTH
    assert all(region.saved_bytes > 0 and region.forward_s > 0 for region in handle.profile.regions)


def test_regions_inside_of_regions_are_refused():
    with pytest.raises(PlanError, match=r"'layers.0.up' is inside of region 'layers.0'"):
        ebbtide.offload(make(), regions=["layers.*", "layers.*.up"], **SETTINGS)


def test_what_a_block_saves_outside_of_its_planned_parts_stays():
    model = make()
    handle = ebbtide.offload(model, regions=["layers.*.up"], **SETTINGS)
    seen = set()
    handle.subscribe(lambda event: seen.add(event.site.split("#")[0]))
    follow(model, 8)
    assert handle._planning.controller.phase is Phase.PLANNED
    assert seen <= {f"layers.{k}.up" for k in range(3)}
    # Input and output of gelu, and the input of the next norm; the last region's belongs to no region.
    tensor = ROWS * WIDTH * 4
    behind = [region.after_bytes for region in handle.profile.regions]
    assert behind[:-1] == [behind[0]] * 2
    assert behind[0] == pytest.approx((4 + 4 + 1) * tensor, rel=0.02)  # norms save a few numbers for each row
    assert behind[-1] == 0


def test_a_view_of_a_region_input_is_a_saved_tensor():
    """During recomputation a view of a leaf, as views of parameters are."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    model.add_module("part", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    handle = ebbtide.offload(model, budget=a_large_budget(), regions=["part"], **SETTINGS)
    for _ in range(4):
        model(torch.randn(2, ROWS, WIDTH)).sum().backward()
    (region,) = handle.profile.regions
    assert [save.nbytes for save in region.saved_tensors] == [2 * ROWS * WIDTH * 4] * 2


@pytest.mark.parametrize("names", ["layers.[01]", ["layers.0", "layers.1"], ("layers.[01]",)])
@pytest.mark.parametrize("settings", [{}, {"mode": "auto"}, {"budget": "64GiB", "on_oom": "replan"}])
def test_regions_are_what_is_planned(names, settings):
    model = make()
    handle = ebbtide.offload(model, regions=names, **settings, **SETTINGS)
    follow(model, 5)
    assert handle.plan.predicted is not None
    assert list(handle.plan.regions) == ["layers.0", "layers.1"]


def test_no_regions_are_none_to_refuse():
    for none in ((), []):
        handle = ebbtide.offload(make(), mode="all", regions=none, on_oom="raise", **SETTINGS)
        assert handle.recipes == {}


def test_regions_that_no_step_enters_are_given_up_on():
    model = Stack()
    model.unused = nn.Linear(8, 8)
    handle = ebbtide.offload(model, regions=["unused"], **SETTINGS)
    with pytest.warns(ebbtide.EbbtideWarning, match="no plan was made"):
        for k in range(20):
            step(model, k)
    assert handle._planning.controller.phase is Phase.GAVE_UP


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"budget": "40GiB", "recipe": "recompute"}, "recipe="),
        ({"budget": "40GiB", "include": "layers.*"}, "include="),
        ({"mode": "auto", "window": "1GiB"}, "window="),
        ({"mode": "all", "budget": "40GiB"}, "budget="),
        ({"mode": "off", "budget": "40GiB"}, "budget="),
        ({"budget": 1.5}, "between 0 and 1"),
        ({"budget": "40 parsecs"}, "budget="),
        ({"budget": -1}, "budget="),
        ({"mode": "most"}, "mode="),
        ({"budget": "40GiB", "on_oom": "retry"}, "on_oom='retry': write 'raise' or 'replan'"),
        ({"budget": "40GiB", "on_oom": None}, "on_oom=None: write 'raise' or 'replan'"),
        ({"on_oom": "replan"}, "on_oom='replan' .* the budget, and there is none: write one"),
        ({"mode": "auto", "on_oom": "replan"}, "on_oom='replan' .* the budget, and there is none: write one"),
        *[
            ({**nothing_planned, option: value}, f"{option}=.*with {says} nothing is planned: leave {says} out")
            for option, value in (("regions", "layers.*"), ("regions", [Block]), ("on_oom", "replan"))
            for nothing_planned, says in (
                ({"mode": "all"}, "mode='all'"),
                ({"mode": "off"}, "mode='off'"),
                ({"mode": "all", "recipe": "keep"}, "mode='all'"),
                ({"recipe": "recompute"}, "recipe="),
                ({"plan": ebbtide.Plan({})}, "plan="),
                ({"include": "layers.*"}, "include="),
                ({"keep_last": 1}, "keep_last="),
                ({"window": "1GiB"}, "window="),
            )
        ],
    ],
)
def test_settings_that_contradict_each_other(settings, text):
    model = make()
    with pytest.raises(ConfigError, match=text):
        ebbtide.offload(model, **SETTINGS, **settings)
    assert "_ebbtide_handle" not in model.__dict__


def test_ranks_plan_from_the_slowest_of_their_profiles():
    model = make()
    handle = ebbtide.offload(model, budget=a_large_budget(), **SETTINGS)
    follow(model, 5)
    mine = handle.profile
    slow = mine.at_speed(2.0)
    agreed = agreed_profile([mine, slow])
    assert agreed.plain_s == pytest.approx(slow.plain_s)
    assert agreed.regions[0].saved_tensors == slow.regions[0].saved_tensors


def test_a_profile_without_recomputation_serves_no_budget():
    model = make()
    handle = ebbtide.offload(model, **SETTINGS)
    follow(model, 5)
    profile = handle.profile
    handle.remove()
    with pytest.raises(PlanError, match="measured without a budget"):
        ebbtide.offload(model, budget=a_large_budget(), profile=profile, **SETTINGS)
    handle = ebbtide.offload(model, profile=profile, **SETTINGS)
    assert set(follow(model, 3)) == {Phase.PLANNED}


class CallsItself(Stack):
    """As Lightning has it: the step runs inside of a call, and calls the module for what it computes."""

    def forward(self, x, is_step=True):
        return self(x, is_step=False) if is_step else super().forward(x)


def test_a_module_that_calls_itself_is_measured_as_one_step():
    torch.manual_seed(0)
    model = CallsItself(3)
    ebbtide.offload(model, **SETTINGS)
    phases = follow(model)
    assert phases[:3] == [Phase.WARM, Phase.TIMES, Phase.DETAILS]
    assert set(phases[3:]) == {Phase.PLANNED}
