"""Arguments of a region: the accepted kinds, and the refused ones."""

import collections
import dataclasses
import functools

import pytest
import torch
from cases import make
from recipe_cases import ROWS, WIDTH, FrozenSlots, MutableSlots, Pair, Plain, Products, Simple, batch, observed
from support import HandleRig, assert_equal
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ebbtide import ModifiedError, ModuleError
from ebbtide._recompute.arguments import Arguments

CPU = torch.device("cpu")


@pytest.fixture
def rig():
    rig = HandleRig()
    yield rig
    rig.check_at_rest()


def taken_apart(*args, **kwargs):
    arguments = Arguments(args, kwargs)
    tensors = arguments.take_tensors()
    return arguments, tensors


# -- taken apart and put together --------------------------------------------------------------------------------------


@dataclasses.dataclass
class WithDefault:
    tensor: torch.Tensor | None = None
    made: torch.Tensor | None = dataclasses.field(default=None, init=False)
    names: list[str] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: [t, (t, {"a": t}), None, 3],
        lambda t: Pair(t, {"deep": [t]}),
        lambda t: collections.OrderedDict(a=t, b=1),
        lambda t: collections.defaultdict(list, a=[t]),
        lambda t: collections.deque([t, 2]),
        lambda t: Plain(t, "name", Plain(t, "inner", [t])),
        lambda t: FrozenSlots(t, MutableSlots(t, 7)),
        lambda t: WithDefault(t),
        lambda t: functools.partial(max, t, key=Plain(t, "key")),
    ],
)
def test_new_containers_with_the_tensors_in_their_places(wrap):
    t, other = torch.ones(3), torch.zeros(3)
    given = wrap(t)
    arguments, tensors = taken_apart(given, keyword=given, flag=True)
    assert [id(found) for found in tensors] == [id(t)]  # once, for several occurrences
    for _ in range(2):
        (args, kwargs) = arguments.rebuild([other])
        assert kwargs["flag"] is True
        assert type(args[0]) is type(given)
        assert all(found is other for found in taken_apart(args, kwargs)[1])
        assert repr(args[0]) == repr(given).replace("1., 1., 1.", "0., 0., 0.")
        assert given is t or args[0] is not given
    assert taken_apart(given)[1][0] is t  # the arguments are unchanged


def test_taken_tensors_have_no_further_references():
    import weakref

    t = torch.ones(3)
    alive = weakref.ref(t)
    arguments, tensors = taken_apart([t], Plain(t, "x"), FrozenSlots(t, MutableSlots(t)), functools.partial(max, t))
    del t, tensors
    assert alive() is None
    assert arguments.rebuild([torch.zeros(1)])[0][0][0].shape == (1,)


def test_objects_without_tensors_are_handed_through():
    plain, partial, thing = Plain("no tensor", "x"), functools.partial(max, 1), object()
    arguments, tensors = taken_apart(plain, partial, thing=thing)
    assert tensors == []
    (args, kwargs) = arguments.rebuild([])
    assert args[0] is plain
    assert args[1] is partial
    assert kwargs["thing"] is thing


# -- regions -----------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, block, call):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.call = call

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square().mean()


def check(rig, block, call, recipes=("recompute", "selective"), make_batch=batch):
    for recipe in recipes:
        model, twin = (make(lambda: Layers(block, call), CPU) for _ in range(2))
        rig.offload(model, recipe)
        for number in range(3):
            results = []
            for each in (model, twin):
                torch.manual_seed(number)
                loss = each(make_batch(CPU, number))
                loss.backward()
                results.append([loss.detach(), *observed(each, CPU)])
            assert_equal(*results)


class ChangesInput(Simple):
    def forward(self, x):
        x += self.second(self.first(x * 2.0).cos())
        return x


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_a_region_that_changes_an_input_is_an_error_with_the_name(recipe, rig):
    model = make(lambda: Layers(ChangesInput, lambda layer, x: layer(x * 1.5)), CPU)
    rig.offload(model, {"layers.1": recipe})
    with pytest.raises(ModuleError, match=r"layers\.1 changes a tensor in place.*\(6, 8\).*'keep' or 'offload'"):
        model(batch(CPU))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    rig.handles[0].set_recipe("offload")
    twin = make(lambda: Layers(ChangesInput, lambda layer, x: layer(x * 1.5)), CPU)
    results = []
    for each in (model, twin):
        loss = each(batch(CPU))
        loss.backward()
        results.append([loss.detach(), *observed(each, CPU)])
    assert_equal(*results)


def test_an_input_changed_after_the_region_is_an_error(rig):
    def call(layer, x):
        y = layer(x)
        x.detach().add_(1.0)
        return y

    for recipe in ("recompute", "selective"):
        model = make(lambda: Layers(Products, call), CPU)
        rig.offload(model, recipe)
        loss = model(batch(CPU))
        with pytest.raises(ModifiedError, match="modified in place"):
            loss.backward()


class AddsTwoTensors(Simple):
    def forward(self, x, pair):
        return self.second(self.first(x).sin()) * (pair.a + pair.b).cos() * x


def test_tensor_subclasses(rig):
    check(rig, AddsTwoTensors, lambda layer, x: layer(x, TwoTensor((x * 2.0).detach(), (x + 1.0).detach())))


NESTED_ARE_NEW = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")


def call_nested(layer, x, change=None):
    """Call a region with a strided nested tensor, which has no shape; `change` gets the tensor afterwards."""
    nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.strided) * 1.5
    y = layer(nested)
    if change is not None:
        change(nested.detach())
    return torch.nested.to_padded_tensor(y, 0.0).flatten(0, 1)[:ROWS]


@NESTED_ARE_NEW
def test_strided_nested_tensors(rig):
    check(rig, Products, call_nested)


@NESTED_ARE_NEW
@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_a_changed_strided_nested_tensor_is_an_error(recipe, rig):
    model = make(lambda: Layers(Products, functools.partial(call_nested, change=lambda t: t.mul_(2.0))), CPU)
    rig.offload(model, recipe)
    loss = model(batch(CPU))
    with pytest.raises(ModifiedError, match=r"\[torch.FloatTensor \[\(2, 8\), \(4, 8\)\]\] is at version 1; expected"):
        loss.backward()
    model = make(lambda: Layers(ChangesInput, call_nested), CPU)
    rig.offload(model, {"layers.1": recipe})
    with pytest.raises(ModuleError, match=r"layers\.1 changes a tensor in place.*\(\(2, 8\), \(4, 8\)\)"):
        model(batch(CPU))


def test_subclasses_inside(rig):
    class Wraps(Simple):
        def forward(self, pair):
            return (pair * pair.sin()).exp()

    for recipe in ("recompute", "selective"):
        model, twin = (make(lambda: Layers(Wraps, lambda layer, x: layer(x).clamp(max=2.0)), CPU) for _ in range(2))
        rig.offload(model, recipe)
        for number in range(3):
            results = []
            for each in (model, twin):
                pair = TwoTensor(batch(CPU, number), batch(CPU, number + 3)).requires_grad_()
                loss = each(pair)
                loss.backward()
                results.append([loss.a.detach(), loss.b.detach(), pair.grad.a, pair.grad.b])
            assert_equal(*results)


def test_distributed_tensors(rig, process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    class Parallel(Simple):
        def __init__(self):
            super().__init__()
            self.first.weight = nn.Parameter(distribute_tensor(self.first.weight.detach(), mesh, [Shard(0)]))

        def forward(self, x):
            return (x @ self.first.weight.t()).sin() * x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Parallel() for _ in range(2))

        def forward(self, x):
            x = distribute_tensor(x, mesh, [Replicate()])
            for layer in self.layers:
                x = layer(x)
            return x.full_tensor().square().mean()

    for recipe in ("recompute", "selective"):
        model, twin = make(Model, CPU), make(Model, CPU)
        rig.offload(model, recipe)
        for number in range(3):
            results = []
            for each in (model, twin):
                loss = each(batch(CPU, number))
                loss.backward()
                grads = [p.grad.full_tensor().clone() for p in each.parameters() if type(p) is not nn.Parameter]
                results.append([loss.detach(), *grads])
            assert len(results[0]) == 3
            assert_equal(*results)


def test_whole_numbers_masks_and_complex_numbers(rig):
    class Embeds(Simple):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, WIDTH)

        def forward(self, numbers, x, mask, phases):
            y = self.table(numbers) * x + self.first(x.masked_fill(mask, 0.25))
            return y * torch.view_as_real(torch.view_as_complex(self.second(y).view(ROWS, 4, 2)) * phases).flatten(1)

    def call(layer, x):
        numbers = torch.arange(ROWS) % 5
        return layer(numbers, x, mask=x > 0.2, phases=torch.polar(torch.ones(4), torch.arange(4.0)).conj())

    check(rig, Embeds, call)


def test_tensors_in_closures_and_weights_as_arguments(rig):
    class Uses(Simple):
        def forward(self, x, function, weight, repeated):
            assert weight is repeated
            assert weight.is_leaf
            return function(self.first(x)) @ weight * repeated.sum() + x

    def call(layer, x):
        outer = x.sin()
        return layer(x, lambda y: y * outer, layer.second.weight, repeated=layer.second.weight)

    check(rig, Uses, call)


def test_model_outputs_of_transformers(rig):
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Returns(Simple):
        def forward(self, given):
            y = self.second(self.first(given.last_hidden_state).sin()) * given["hidden_states"][0]
            return outputs.BaseModelOutput(last_hidden_state=y, hidden_states=(y.cos(),))

    def call(layer, x):
        given = outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x.sin(), x.exp().clamp(max=2.0)))
        out = layer(given)
        return out.last_hidden_state + out.hidden_states[0]

    check(rig, Returns, call)


def test_a_list_that_the_region_appends_to_is_appended_to_once(rig):
    class Appends(Simple):
        def forward(self, x, log, *, seen):
            log.append(x.detach().sum())
            seen["count"] = seen.get("count", 0) + 1
            return self.second(self.first(x).sin() + len(log)) + x

    logs = []

    def call(layer, x):
        log, seen = [], {"x": x}
        logs.append((log, seen))
        return layer(x, log, seen=seen)

    check(rig, Appends, call)
    assert len(logs) == 2 * 2 * 3 * 3
    assert all(len(log) == 1 and seen["count"] == 1 for log, seen in logs)
