"""Regions that a plan keeps rest: no hook of ours runs inside. Compared with the model before rest, and a twin."""

import contextlib
import copy
import dataclasses
import warnings
from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide import EbbtideWarning, Plan, Recipe, RegionPlan
from ebbtide._engine.engine import Engine
from ebbtide._model.regions import WHOLE
from ebbtide._utils.torch_private import top_pack_hook

KEEP = RegionPlan(Recipe("keep"))


class Block(torch.nn.Module):
    """Notes whether any saved-tensor hook is active inside."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.hooked = []

    def forward(self, x):
        self.hooked.append(top_pack_hook() is not None)
        return x + self.down(self.up(x).tanh())


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(8, 4)
        self.checkpoints = False

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x).square().mean()


def make():
    torch.manual_seed(0)
    return Model()


def step(model, seed=0):
    """Loss and gradients."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def steps_equal_to_twin(model, twin, count=4):
    for seed in range(count):
        assert same(step(model, seed), step(twin, seed))
        assert top_pack_hook() is None


def kept_by(handle, forward):
    """What one more forward adds to the counts."""
    before = {reason: kept.count for reason, kept in handle.stats().kept.items()}
    forward()
    return Counter({reason: kept.count for reason, kept in handle.stats().kept.items()}) - Counter(before)


def test_kept_regions_have_no_hooks_inside_and_the_others_do():
    model, twin = make(), make()
    recipes = {"layers.*": Recipe("keep"), "layers.1": Recipe("offload")}
    handle = ebbtide.offload(model, recipe=recipes, min_bytes=1)
    steps_equal_to_twin(model, twin)
    assert [layer.hooked[-1] for layer in model.layers] == [False, True, False]
    assert handle.stats().parcels.count > 0


def test_what_others_moved_leaves_at_the_entry_of_a_region_at_rest():
    """The window holds all of the first region, until a point of the next says that nothing may wait to leave."""
    model, twin = make(), make()
    handle = ebbtide.offload(model, mode="all", min_bytes=1)
    at_entry = dataclasses.replace(KEEP, release=((0, 0),))
    handle.set_plan(Plan({"layers.0": RegionPlan("offload"), "layers.1": at_entry, "layers.2": KEEP}, outside=KEEP))
    steps_equal_to_twin(model, twin)
    assert [layer.hooked[-1] for layer in model.layers] == [True, False, False]
    stats = handle.stats()
    assert stats.inbound.count == stats.parcels.count > 0 == stats.forwarded.count


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_before_backward_makes_nothing_leave(without_grad):
    """Parcels that wait to leave would take memory of the store in inference mode, which nobody may write later."""
    model, twin = make(), make()
    handle = ebbtide.offload(model, mode="all", min_bytes=1)
    at_entry = dataclasses.replace(KEEP, release=((0, 0),))
    waits = RegionPlan("offload", release=((0, 10**6),))
    handle.set_plan(Plan({"layers.0": KEEP, "layers.1": at_entry, "layers.2": waits}, outside=KEEP))
    for seed in range(4):
        x = torch.randn(4 * 2**seed, 8, generator=torch.Generator().manual_seed(seed))
        loss, expected = model(x), twin(x)
        with without_grad():
            assert torch.equal(model(x), loss)
        loss.backward()
        expected.backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    stats = handle.stats()
    assert stats.inbound.count == 0 < stats.forwarded.count == stats.parcels.count


def test_a_region_with_release_points_behind_its_entry_does_not_rest():
    model, twin = make(), make()
    handle = ebbtide.offload(model, mode="all", min_bytes=1)
    inside = dataclasses.replace(KEEP, release=((0, 10**6), (1, 0)))
    handle.set_plan(Plan({"layers.0": RegionPlan("offload"), "layers.1": inside, "layers.2": KEEP}, outside=KEEP))
    steps_equal_to_twin(model, twin)
    assert [layer.hooked[-1] for layer in model.layers] == [True, True, False]
    stats = handle.stats()
    assert stats.inbound.count == stats.parcels.count > 0 == stats.forwarded.count


def test_a_region_that_moves_nothing_reaches_the_points_behind_its_entry():
    model, twin = make(), make()
    handle = ebbtide.offload(model, mode="all", min_bytes=1)
    nothing = RegionPlan(Recipe("offload", sites=()), release=((1, 0),))
    handle.set_plan(Plan({"layers.0": RegionPlan("offload"), "layers.1": nothing, "layers.2": KEEP}, outside=KEEP))
    steps_equal_to_twin(model, twin)
    assert [layer.hooked[-1] for layer in model.layers] == [True, True, False]
    assert handle.stats().forwarded.count == 0


@pytest.mark.parametrize("regions", [(WHOLE,), ("layers.0", "layers.1", "layers.2")])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupt_while_parcels_leave_at_an_entry_leaves_no_hooks(regions, error, monkeypatch):
    model, twin = make(), make()
    handle = ebbtide.offload(model, mode="all", min_bytes=1)
    handle.set_plan(Plan(dict.fromkeys(regions, RegionPlan("offload", release=((0, 0),))), outside=KEEP))
    steps_equal_to_twin(model, twin, 2)
    x = torch.randn(4, 8)
    loss = model(x)  # one parcel waits

    def fails(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "release_down_to", fails)
        with pytest.raises(error):
            model(x)
    assert top_pack_hook() is None
    loss.backward()
    steps_equal_to_twin(model, twin)


@pytest.mark.filterwarnings("ignore:offload.* moved nothing")
def test_a_model_whose_plan_keeps_all_rests_as_a_whole():
    model, twin = make(), make()
    handle = ebbtide.offload(model, mode="all", min_bytes=1)
    handle.set_plan(Plan({f"layers.{k}": KEEP for k in range(3)}, outside=KEEP))
    steps_equal_to_twin(model, twin)
    assert not any(layer.hooked[-1] for layer in model.layers)
    handle.set_recipe({"layers.*": "offload"})
    steps_equal_to_twin(model, twin)
    assert all(layer.hooked[-1] for layer in model.layers)
    assert handle.stats().parcels.count > 0


@pytest.mark.filterwarnings("ignore:offload.* moved nothing")
def test_a_model_in_which_nothing_qualifies_rests_and_looks_now_and_then():
    model, twin = make(), make()
    handle = ebbtide.offload(model, mode="all", min_bytes="1MiB")
    first, *later = (kept_by(handle, lambda: step(model)) for _ in range(40))
    assert sum(first.values()) > 0
    assert all(each == first for each in later)
    assert [n for n, is_hooked in enumerate(model.layers[0].hooked) if is_hooked] == [0, 17, 34]
    steps_equal_to_twin(model, twin)


class SavesElsewhere(torch.autograd.Function):
    """As attention with dropout on an accelerator does: the state of the generator is a tensor of the CPU."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty(2, device="meta"), torch.eye(2).to_sparse())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert [t.layout for t in ctx.saved_tensors] == [torch.strided, torch.sparse_coo]
        return grad


@pytest.mark.filterwarnings("ignore:offload.* moved nothing")
def test_tensors_of_another_device_or_layout_do_not_end_the_rest():
    model, twin = make(), make()
    for each in (model, twin):
        each.layers[1].register_forward_hook(lambda module, args, y: SavesElsewhere.apply(y))
    ebbtide.offload(model, mode="all", min_bytes="1MiB")
    steps_equal_to_twin(model, twin)
    assert model.layers[0].hooked == [True, False, False, False]


@pytest.mark.filterwarnings("ignore:offload.* moved nothing")
@pytest.mark.parametrize("change", ["larger batch", "other shape", "unfrozen", "train", "train a part", "min_bytes"])
def test_a_forward_that_may_qualify_does_not_rest(change):
    """The limit is above all tensors of the first forwards, and below some of a forward after the change."""
    model, twin = make(), make()
    for each in (model, twin):
        each.layers.requires_grad_(change != "unfrozen")
        each.train(change != "train")
        each.layers[0].train(change != "train a part")
    limit = 4 * 8 * 4 if change == "min_bytes" else 4096
    handle = ebbtide.offload(model, mode="all", min_bytes=limit)
    assert same(step(model), step(twin))
    assert same(step(model), step(twin))
    # Not if all small tensors together are larger than one that would move.
    assert model.layers[0].hooked[-1] == (change == "min_bytes")
    x = torch.randn({"larger batch": (512, 8), "other shape": (2, 2, 8)}.get(change, (4, 8)))
    for each in (model, twin):
        each.layers.requires_grad_(True)
        each.train()
        each(x).backward()
    assert model.layers[0].hooked[-1]
    assert (handle.stats().parcels.count > 0) == (change in ("larger batch", "min_bytes"))


@pytest.mark.filterwarnings("ignore:offload.* moved nothing")
def test_a_frozen_model_moves_for_an_input_that_needs_a_gradient():
    """A perceptual loss: the same model on a target, of which autograd saves nothing, and on a prediction."""
    model = make().requires_grad_(False)
    handle = ebbtide.offload(model, mode="all", min_bytes=1)
    moved = []
    for seed in range(4):
        before = handle.stats().parcels.count
        target = model(torch.ones(4, 8))
        (model(torch.full((4, 8), 0.5 * seed, requires_grad=True)) - target).square().backward()
        moved.append(handle.stats().parcels.count - before)
    assert moved[0] > 0
    assert len(set(moved)) == 1


@pytest.mark.filterwarnings("ignore:offload.* moved nothing")
@pytest.mark.parametrize("outside", [None, KEEP])
def test_forwards_at_rest_count_what_they_keep(outside):
    model = make()
    handle = ebbtide.offload(model, mode="all", min_bytes=1)
    handle.set_plan(Plan({f"layers.{k}": KEEP for k in range(3)}, outside=outside))
    with torch.no_grad():
        model(torch.randn(4, 8))  # has nothing to count
    first, *later = (kept_by(handle, lambda: step(model)) for _ in range(4))
    assert sum(first.values()) > 0
    assert all(each == first for each in later)
    assert kept_by(handle, lambda: torch.no_grad()(model)(torch.randn(4, 8))) == Counter()


def test_a_forward_that_raises_at_rest_counts_nothing_and_leaves_no_hooks():
    model, twin = make(), make()
    handle = ebbtide.offload(model, recipe={"layers.*": "keep"}, min_bytes=1)
    steps_equal_to_twin(model, twin)
    whole = kept_by(handle, lambda: step(model))

    def fail(*_):
        raise KeyboardInterrupt

    remover = model.layers[1].up.register_forward_hook(fail)

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(4, 8))

    assert kept_by(handle, interrupted).total() < whole.total()
    assert top_pack_hook() is None
    remover.remove()
    steps_equal_to_twin(model, twin)
    assert kept_by(handle, lambda: step(model)) == whole


def test_hooks_of_the_user_around_receive_nothing_that_is_kept():
    model, twin = make(), make()
    ebbtide.offload(model, recipe={"layers.*": "keep"}, min_bytes=1)
    seen = []
    for seed in range(3):
        with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            result = step(model, seed)
        assert same(result, step(twin, seed))
    assert not seen


def test_hooks_of_the_user_that_outlast_a_region_stay_on_top():
    """Pushed before the region's forward and popped behind, by hooks made after ours."""

    def watched(model, seen):
        pair = saved_tensors_hooks(lambda t: seen.append(t) or t.double(), lambda t: t.float())
        model.layers[1].register_forward_pre_hook(lambda *_: pair.__enter__())
        model.layers[1].register_forward_hook(lambda *_: pair.__exit__())

    (model, seen), (twin, expected) = (make(), []), (make(), [])
    ebbtide.offload(model, recipe={"layers.*": "keep"}, min_bytes=1)
    watched(model, seen)
    watched(twin, expected)
    steps_equal_to_twin(model, twin)
    assert len(seen) == len(expected) > 0


def test_a_checkpoint_around_a_kept_region_keeps_its_hooks():
    model, twin = make(), make()
    model.checkpoints = twin.checkpoints = True
    handle = ebbtide.offload(model, recipe={"layers.*": "keep"}, min_bytes=1)
    steps_equal_to_twin(model, twin)
    model.checkpoints = twin.checkpoints = False
    steps_equal_to_twin(model, twin)
    assert not any(layer.hooked[-1] for layer in model.layers)
    assert handle.stats().parcels.count > 0  # of the head


def test_a_region_with_a_chosen_module_inside_does_not_rest():
    model, twin = make(), make()
    handle = ebbtide.offload(model, recipe={"layers.*": "keep"}, include=["layers.*.down"], min_bytes=1)
    steps_equal_to_twin(model, twin)
    assert all(layer.hooked[-1] for layer in model.layers)
    assert handle.stats().parcels.count > 0


def test_excluded_modules_do_not_rest():
    """They move again as soon as anybody says so, and number their tensors for the region around."""
    model, twin = make(), make()
    ebbtide.offload(model, mode="all", exclude=["layers.*"], min_bytes=1)
    steps_equal_to_twin(model, twin)
    assert all(layer.hooked[-1] for layer in model.layers)


class Calls(Block):
    """Calls a module that belongs to another region, under hooks of its own."""

    def __init__(self, other, hooks):
        super().__init__()
        self.other, self.hooks = [other], hooks

    def forward(self, x):
        with self.hooks():
            x = self.other[0](x)
            return super().forward(x) + self.other[0](x)


@pytest.mark.parametrize("recipe", ["offload", "recompute", "keep"])
@pytest.mark.parametrize("hooks", [contextlib.nullcontext, lambda: saved_tensors_hooks(torch.clone, torch.clone)])
def test_a_region_at_rest_may_call_another_region(recipe, hooks):
    def calling():
        model = make()
        torch.manual_seed(1)
        model.layers[1] = Calls(model.layers[0], hooks)
        return model

    model, twin = calling(), calling()
    recipes = {"layers.*": Recipe("keep"), "layers.0": Recipe(recipe)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EbbtideWarning)  # hooks inside rule out recomputation
        ebbtide.offload(model, recipe=recipes, min_bytes=1)
        steps_equal_to_twin(model, twin)


def test_copies_and_removal_at_rest():
    model, twin = make(), make()
    handle = ebbtide.offload(model, recipe={"layers.*": "keep"}, min_bytes=1)
    steps_equal_to_twin(model, twin)
    plain = copy.deepcopy(model)
    handle.remove()
    for each in (plain, model):
        steps_equal_to_twin(each, twin)
        assert not any(layer.hooked[-1] for layer in each.layers)
