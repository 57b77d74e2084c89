"""Regions whose recomputation could silently differ from forward: each equals its twin without recomputation."""

import copy
import dataclasses

import pytest
import torch
from support import assert_equal
from test_offload import offload
from torch import nn

import ebbtide
from ebbtide import ModifiedError, ModuleError, Recipe

RECIPES = ("recompute", "selective", Recipe("selective", outputs="keep"))


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


class Blocks(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x, *args):
        for layer in self.layers:
            x = layer(x, *args)
        return x


def rows():
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)


def step(model, *args):
    return model(rows(), *args).square().mean()


def three_steps(model, take):
    results = []
    for _ in range(3):
        model.zero_grad()
        torch.manual_seed(3)
        loss = take(model)
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        results += [b.clone() for b in model.buffers()]
    return results


def check(make, recipe, take=step):
    """The results of `take`, gradients and buffers equal the plain run's."""
    torch.manual_seed(0)
    model = Blocks(make)
    twin = copy.deepcopy(model)
    handle = offload(model, recipe=recipe)
    assert_equal(three_steps(model, take), three_steps(twin, take))
    return handle


class ChangedProducts(nn.Module):
    """torch returns a product without bias through a view with a version counter of its own."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        h = self.a(x)
        h += x
        h = self.b(h.sin())
        h.mul_(2)
        return h.sin()


class ChangedParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)

    def forward(self, x):
        left, right = self.a(x).unsafe_chunk(2, -1)
        left.mul_(2)
        return (left.sin() * right).sin()


class OwnBackward(nn.Module):
    """Forces from an energy: the region runs a backward inside."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        y = x.detach().requires_grad_()
        energy = self.norm(self.a(y)).tanh().square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return (x + self.b(force)).sin()


class Caching(nn.Module):
    """The very first call computes a value that later calls, recomputation included, do not."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8, 8))
        self.table = None

    def forward(self, x):
        if self.table is None:
            with torch.no_grad():
                self.table = torch.eye(8) @ torch.ones(8, 8)
        return ((((x.reshape(8, 8) @ self.a).sin() + self.table) @ self.b).sin()).reshape(2, 4, 8)


@pytest.mark.parametrize("make", [ChangedProducts, ChangedParts, OwnBackward, Caching])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recomputation_equals_forward(make, recipe):
    assert check(make, recipe).stats().host_bytes == 0


def test_a_product_changed_outside_the_region_is_recomputed():
    def take(model):
        h = rows()
        for layer in model.layers:
            h = h + layer(h)
            out = layer(h)
            out += h
            h = out.sin()
        return h.square().mean()

    class Root(Blocks):
        def forward(self, x):
            return take(self)

    torch.manual_seed(0)
    model = Root(lambda: nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8, bias=False)))
    twin = copy.deepcopy(model)
    offload(model, recipe="selective")
    assert_equal(three_steps(model, step), three_steps(twin, step))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(4)
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.norm(self.a(x)).sin()).sin()


class OwnNorm(nn.Module):
    """functional.batch_norm writes running statistics without a new version."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(self.a(x), self.running_mean, self.running_var, training=self.training).sin()


class Shared(nn.Module):
    """One buffer in two modules: the first writes, the second reads."""

    def __init__(self):
        super().__init__()
        average = torch.ones(())
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.a.register_buffer("average", average)
        self.b.register_buffer("average", average)

    def forward(self, x):
        with torch.no_grad():
            self.a.average.mul_(0.5).add_(x.mean())
        return self.b(self.a(x) * self.b.average).sin()


class Updating(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.average = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        self.average.mul_(0.9)
        return (self.a(x) * self.average).sin()


def with_functional_weights(model):
    weights = {name: 1.5 * p for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, (rows(),)).square().mean()


def with_an_average(model):
    """During forward, another model's weights replace the region's, and another training mode too."""
    other = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    own = dict(model.layers[0].a._parameters)
    model.layers[0].a.weight = nn.Parameter(other["layers.0.a.weight"] * 2)
    loss = step(model)
    for name, p in own.items():
        setattr(model.layers[0].a, name, p)
    return loss


def in_another_mode(model):
    class Switch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            model.eval()
            return grad

    model.train()
    return Switch.apply(step(model))


@pytest.mark.parametrize("take", [step, with_functional_weights, with_an_average, in_another_mode])
@pytest.mark.parametrize("make", [Two, OwnNorm, Shared])
@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_recomputation_reads_the_state_of_forward(make, take, recipe):
    assert check(make, recipe, take).stats().host_bytes == 0


def test_modules_that_came_after_offload_are_restored_too():
    model = Blocks(lambda: nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.SiLU()))
    twin = copy.deepcopy(model)
    offload(model, recipe="recompute")
    for blocks in (model, twin):
        for layer in blocks.layers:
            layer[1] = nn.BatchNorm1d(4)
    assert_equal(three_steps(model, step), three_steps(twin, step))


@pytest.mark.parametrize("name", ["a.weight", "a.bias"])
def test_a_parameter_changed_before_backward_raises(name):
    model = Blocks(Two)
    offload(model, recipe="recompute")
    loss = step(model)
    with torch.no_grad():
        model.layers[1].get_parameter(name).mul_(2)
    with pytest.raises(ModifiedError, match=name.split(".")[1]):
        loss.backward()


def test_a_region_that_changes_its_parameters_is_refused():
    model = Blocks(Updating)
    model.requires_grad_(False)
    model.layers[0].a.requires_grad_()
    model.layers[1].a.requires_grad_()
    offload(model, recipe="recompute")
    with torch.set_grad_enabled(True), pytest.raises(ModuleError, match="'average'"):
        step(model)


def test_inference_tensors_are_handed_through():
    with torch.inference_mode():
        bias = torch.randn(8)

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.register_buffer("shift", bias)

        def forward(self, x, bias):
            return self.a(x + bias + self.shift).sin()

    model = Blocks(Biased)
    handle = offload(model, recipe="recompute")
    grads = [torch.autograd.grad(step(model, bias), model.layers[0].a.weight)]
    handle.remove()
    grads += [torch.autograd.grad(step(model, bias), model.layers[0].a.weight)]
    assert_equal(*grads)


@dataclasses.dataclass
class Node:
    factor: torch.Tensor
    parent: object = None


class WithNode(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, node):
        return self.a(x * node.parent.parent.factor).sin()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_an_argument_may_lead_back_to_itself(recipe):
    node = Node(torch.linspace(0, 1, 8))
    node.parent = Node(torch.zeros(8), node)
    check(WithNode, recipe, lambda model: step(model, node))


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return (self.a(x).double() * torch.tensor([0.1] * 8)).sin().float()


def test_the_default_dtype_is_that_of_the_first_run():
    def take(model):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return step(model)
        finally:
            torch.set_default_dtype(previous)

    check(Constants, "recompute", take)


def test_recipes_do_not_depend_on_the_ones_before():
    class Headed(Blocks):
        def __init__(self):
            super().__init__(Two)
            self.head = Two()

        def forward(self, x):
            return self.head(super().forward(x))

    model = Headed()
    handle = offload(model)
    handle.set_recipe({"head": "recompute", "layers.*.a": "keep"})
    assert list(handle.recipes) == ["head", "layers.0.a", "layers.1.a"]
    handle.set_recipe("recompute")
    assert list(handle.recipes) == ["layers.0", "layers.1"]
    assert list(handle.regions) == ["layers.0", "layers.1"]


def test_a_saved_tensor_does_not_share_bytes_from_before_a_change_through_a_hidden_view():
    class Root(Blocks):
        def forward(self, x):
            for layer in self.layers:
                h = layer(x)
                h.mul_(2)
                # The halves are saved with version counters of their own, equal to the saved output's.
                left, right = h.unsafe_chunk(2, -1)
                x = torch.cat([left * right, left.sin() * right], -1)
            return x

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.a(x)

    torch.manual_seed(0)
    model = Root(Product)
    twin = copy.deepcopy(model)
    offload(model, recipe="selective")
    assert_equal(three_steps(model, step), three_steps(twin, step))
