"""Regions inside regions, a user's checkpoints around regions, and recipes that change while graphs live."""

import pytest
import torch
from cases import make
from recipe_cases import EVERY, WIDTH, Mixed, Simple, Stack, batch, observed
from support import HandleRig, assert_equal
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ebbtide import EbbtideWarning, Recipe
from ebbtide._devices.sim import SimDevice
from ebbtide._types import Unable

CPU = torch.device("cpu")

ACTIONS = {
    "none": None,
    "keep": "keep",
    "offload": "offload",
    "recompute": "recompute",
    "selective": "selective",
    "every operator, kept": Recipe("selective", outputs="keep", ops=EVERY.ops),
}


class Deep(Simple):
    """A block with inner blocks, each called twice."""

    def __init__(self, depth=2):
        super().__init__()
        self.inner = Deep(depth - 1) if depth > 1 else Mixed()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        y = self.inner(self.first(x).sin())
        y = self.inner(functional.dropout(y, 0.1))
        return self.norm(self.second(y).tanh()) + x


def step(model, number=0):
    loss = model(batch(CPU, number))
    loss.backward()
    return [loss.detach(), *observed(model, CPU)]


def steps(model, count=3):
    torch.manual_seed(5)
    results = []
    for number in range(count):
        results += step(model, number)
    loss = model(batch(CPU, count))
    loss.backward(retain_graph=True)
    loss.backward()
    return [*results, *observed(model, CPU)]


def deep(depth):
    return make(lambda: Stack(lambda: Deep(depth)), CPU)


@pytest.fixture
def rig():
    rig = HandleRig(SimDevice(4, "shuffled"))
    yield rig
    rig.check_no_races()
    rig.check_at_rest()


@pytest.fixture(scope="module")
def plain():
    return {depth: steps(deep(depth)) for depth in (1, 2)}


def recipe_of(*actions):
    """The blocks, inner blocks, and modules of inner blocks."""
    names = ("layers.*", "layers.*.inner", "layers.*.inner.inner")
    chosen = {name: ACTIONS[action] for name, action in zip(names, actions, strict=False) if action != "none"}
    return chosen or None


@pytest.mark.parametrize("inner", ACTIONS)
@pytest.mark.parametrize("outer", ACTIONS)
def test_two_deep(outer, inner, rig, plain):
    model = deep(1)
    rig.offload(model, recipe_of(outer, inner))
    assert_equal(steps(model), plain[1])


@pytest.mark.parametrize(
    "actions",
    [
        ("recompute", "recompute", "recompute"),
        ("recompute", "selective", "recompute"),
        ("selective", "recompute", "selective"),
        ("selective", "selective", "selective"),
        ("every operator, kept", "every operator, kept", "every operator, kept"),
        ("recompute", "offload", "selective"),
        ("none", "recompute", "every operator, kept"),
        ("selective", "none", "recompute"),
        ("recompute", "keep", "recompute"),
    ],
    ids=", ".join,
)
def test_three_deep(actions, rig, plain):
    model = deep(2)
    rig.offload(model, recipe_of(*actions))
    assert_equal(steps(model), plain[2])


# -- between forward and backward --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "actions", [("recompute", "recompute"), ("selective", "selective"), ("recompute", "selective")]
)
@pytest.mark.parametrize("then", ["remove", "remove and apply again", "no recipe", "other recipe"])
def test_backward_follows_the_recipes_of_its_forward(actions, then, rig):
    model, twin = deep(1), deep(1)
    results = []
    for each in (model, twin):
        torch.manual_seed(5)
        handle = rig.offload(each, recipe_of(*actions)) if each is model else None
        results.append([])
        for number in range(2):
            loss = each(batch(CPU, number))
            if handle is not None:
                handle = _change(then, handle, each, rig, actions)
            loss.backward()
            results[-1] += observed(each, CPU)
    assert_equal(*results)


def _change(then, handle, model, rig, actions):
    if then == "no recipe":
        handle.set_recipe(None)
    elif then == "other recipe":
        handle.set_recipe(recipe_of(actions[1], "offload"))
    else:
        handle.remove()
        assert all("forward" not in module.__dict__ for module in model.modules())
        if then == "remove and apply again":
            return rig.offload(model, recipe_of("selective", "recompute"))
    return handle


def test_after_remove_modules_are_as_they_were_also_after_backward(rig):
    model = deep(1)
    handle = rig.offload(model, recipe_of("recompute", "recompute"))
    loss = model(batch(CPU))
    handle.remove()
    loss.backward()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# -- a user's checkpoints ----------------------------------------------------------------------------------------------


class ChecksLayers(Stack):
    def __init__(self, use_reentrant):
        super().__init__(Mixed)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x * 1.5
        for layer in self.layers:
            x = checkpoint(layer, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return x.square().mean()


def test_a_whole_model_inside_a_checkpoint_is_counted_and_warns_once(rig):
    model, twin = (make(lambda: Stack(Mixed), CPU) for _ in range(2))
    handle = rig.offload(model, "recompute")

    def steps_of(inner):
        results = []
        torch.manual_seed(5)
        for number in range(3):
            checkpoint(inner, batch(CPU, number).requires_grad_(), use_reentrant=False).backward()
            results += observed(inner, CPU)
        return results

    with pytest.warns(EbbtideWarning, match="Stack is called inside of .*checkpoint.*nothing is left to move") as found:
        ours = steps_of(model)
    assert len(found) == 1
    assert_equal(ours, steps_of(twin))
    assert handle.stats().unable == {Unable.USER_CHECKPOINT: 3}
    assert handle.stats().saved_tensors == 0


def test_a_model_without_saved_tensors_inside_a_checkpoint_does_not_warn(rig):
    """For example a teacher."""
    teacher = make(lambda: Stack(Mixed), CPU)
    handle = rig.offload(teacher, "recompute")

    def taught(x):
        with torch.no_grad():
            target = teacher(x)
        return (x.sin() - target).square().mean()

    checkpoint(taught, batch(CPU).requires_grad_(), use_reentrant=False).backward()
    assert handle.stats().unable == {}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_inside_a_checkpoint_the_recipe_is_ignored_counted_and_warns_once(use_reentrant, recipe, rig):
    model = make(lambda: ChecksLayers(use_reentrant), CPU)
    handle = rig.offload(model, recipe)
    with pytest.warns(EbbtideWarning, match="layers.0 was not prepared for recomputation") as found:
        ours = steps(model)
    assert len(found) == 1
    assert_equal(ours, steps(make(lambda: ChecksLayers(use_reentrant), CPU)))
    stats = handle.stats()
    assert stats.unable == {Unable.NO_GRAD if use_reentrant else Unable.USER_CHECKPOINT: 12}
    assert stats.recomputed.count == 0


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad", "ignore:Stack is called inside of torch.util"
)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_a_checkpoint_around_the_model(use_reentrant, recipe, rig):
    model, twin = (make(lambda: Stack(Mixed), CPU) for _ in range(2))
    rig.offload(model, recipe)
    results = []
    for each in (model, twin):
        torch.manual_seed(5)
        results.append([])
        for number in range(3):
            x = batch(CPU, number).requires_grad_()
            loss = checkpoint(each, x, use_reentrant=use_reentrant)
            loss.backward()
            results[-1] += [loss.detach(), x.grad, *observed(each, CPU)]
    assert_equal(*results)


def test_other_hooks_in_between_are_left_alone(rig):
    class Hooked(Stack):
        def forward(self, x):
            y = x * self.layers[0].first.bias
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                return super().forward(y)

    model = make(lambda: Hooked(Mixed), CPU)
    handle = rig.offload(model, "recompute")
    with pytest.warns(EbbtideWarning, match="other saved-tensor hooks stand between"):
        ours = steps(model)
    assert_equal(ours, steps(make(lambda: Hooked(Mixed), CPU)))
    assert handle.stats().unable == {Unable.OTHER_HOOKS: 12}
