"""Outputs saved by a selective recipe, and outputs found not worth saving."""

import pytest
import torch
from cases import make
from recipe_cases import EVERY, ROWS, WIDTH, CastsInside, Products, Simple, Stack, batch, images, seeded_step, train
from support import HandleRig, assert_equal
from torch.nn import functional

import ebbtide
from ebbtide import Recipe
from ebbtide._devices.sim import SimDevice
from ebbtide._recompute.memory import history_of
from ebbtide._recompute.saved_outputs import SaveOutputsMode
from ebbtide._types import Output, Reason

CPU = torch.device("cpu")


@pytest.fixture
def rig():
    rig = HandleRig(SimDevice(7, "shuffled"))
    yield rig
    rig.check_no_races()
    rig.check_at_rest()


def dropped_in(model, handle, number=0):
    """Number of outputs not saved in a step because of earlier findings."""
    before = handle.stats().dropped.count
    seeded_step(model, number)
    return handle.stats().dropped.count - before


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.products += str(op) in ("aten.mm.default", "aten.addmm.default")
        return op(*args, **(kwargs or {}))


def products_in_backward(model):
    loss = model(batch(CPU))
    with Counting() as counting:
        loss.backward()
    return counting.products


class ChangesOne(Simple):
    """The first product is changed in place, the second is not, the third is not needed in recomputation."""

    def forward(self, x):
        y = functional.relu_(self.first(x))
        return self.first(self.second(y).sin()) + x


def sites_with(handle, output):
    return [
        (slots.region, site.index)
        for slots in handle._attachment.context._numbers.values()
        for sites in slots._sites
        for site in sites
        if history_of(site).output is output
    ]


@pytest.mark.parametrize("outputs", ["offload", "keep"])
def test_outputs_changed_inside_the_region_are_no_longer_saved(outputs, rig):
    model, twin = (make(lambda: Stack(ChangesOne), CPU) for _ in range(2))
    handle = rig.offload(model, Recipe("selective", outputs=outputs, ops=("matmul",)))
    assert_equal(seeded_step(model), seeded_step(twin))
    assert len(sites_with(handle, Output.CHANGED)) == 3
    assert len(sites_with(handle, Output.UNUSED)) == 3
    assert handle.stats().dropped.count == 0
    assert [dropped_in(model, handle, number) for number in (1, 2)] == [6, 6]
    model.zero_grad()
    twin.zero_grad()
    assert_equal(seeded_step(model), seeded_step(twin))
    assert products_in_backward(model) == products_in_backward(twin) + 3


@pytest.mark.parametrize("outputs", ["offload", "keep"])
def test_outputs_changed_after_the_region_are_no_longer_saved(outputs, rig):
    """The residual is added in place to the last product, whose cosine needs the unchanged value.

    Stock autograd refuses. Recomputation makes the product again, and the gradient equals that of an out-of-place sum.
    """

    class Needed(Simple):
        def forward(self, x):
            y = self.second(self.first(x).sin())
            return y, y.cos().sum()

    class Model(Stack):
        in_place = True

        def forward(self, x):
            total = 0
            for layer in self.layers:
                y, aside = layer(x)
                total = total + aside
                y = y.add_(x) if self.in_place else y + x
                x = y * 1.5
            return x.square().mean() + total

    model, twin = (make(lambda: Model(Needed), CPU) for _ in range(2))
    twin.in_place = False
    handle = rig.offload(model, Recipe("selective", outputs=outputs, ops=("matmul",)))
    for number in range(3):
        assert_equal(seeded_step(model, number), seeded_step(twin, number))
    assert len(sites_with(handle, Output.CHANGED)) == 3
    assert handle.stats().dropped.count == 6


def test_hidden_views_are_watched(rig):
    """A product of three dimensions ends in a view with a version counter of its own."""

    class Batched(Simple):
        def forward(self, x):
            y = functional.linear(x.view(2, 3, WIDTH), self.first.weight)
            y += 1.0
            return self.second(y.reshape(ROWS, WIDTH).sin()) + x

    model, twin = (make(lambda: Stack(Batched), CPU) for _ in range(2))
    handle = rig.offload(model, Recipe("selective", outputs="keep", ops=("matmul",)))
    assert_equal(seeded_step(model), seeded_step(twin))
    assert len(sites_with(handle, Output.CHANGED)) == 3


def test_an_unused_output_is_saved_after_its_next_use():
    """Recomputation uses the second product only in some steps."""

    class Sometimes(Simple):
        more = False

        def forward(self, x):
            y = self.second(self.first(x).sin())
            return y.sin() if self.more else y

    rig = HandleRig()
    model = make(lambda: Stack(Sometimes), CPU)
    handle = rig.offload(model, "selective")
    seeded_step(model)
    assert dropped_in(model, handle) == 3
    for layer in model.layers:
        layer.more = True
    assert dropped_in(model, handle) == 3
    assert dropped_in(model, handle) == 0


def test_a_graph_that_is_kept_hands_out_its_outputs_each_time(rig):
    model = make(lambda: Stack(Products), CPU)
    rig.offload(model, "selective")
    seeded_step(model)
    loss = model(batch(CPU))
    with Counting() as first:
        loss.backward(retain_graph=True)
    with Counting() as second:
        loss.backward()
    twin = make(lambda: Stack(Products), CPU)
    assert first.products == second.products == products_in_backward(twin)


def test_sites_choose_among_the_expensive_outputs(rig):
    model = make(lambda: Stack(Products), CPU)
    rig.offload(model, Recipe("selective", ops=("matmul",), sites=(1,)))
    assert products_in_backward(model) == products_in_backward(make(lambda: Stack(Products), CPU)) + 3


def test_operators_inside_some_modules(rig):
    model = make(lambda: Stack(Products), CPU)
    rig.offload(model, Recipe("selective", ops=("matmul@first",)))
    assert products_in_backward(model) == products_in_backward(make(lambda: Stack(Products), CPU))
    rig.handles[0].set_recipe(Recipe("selective", ops=("matmul@second",)))
    assert products_in_backward(model) == products_in_backward(make(lambda: Stack(Products), CPU)) + 3


def test_saved_outputs_travel_or_stay_as_the_recipe_says():
    for outputs, inputs in [("keep", "keep"), ("keep", "offload"), ("offload", "keep"), ("offload", "offload")]:
        rig = HandleRig()
        model = make(lambda: Stack(Products), CPU)
        handle = rig.offload(model, Recipe("selective", outputs=outputs, inputs=inputs, ops=("matmul",)))
        model(batch(CPU)).backward()
        stats = handle.stats()
        in_regions = 3 * (inputs == "offload") + 6 * (outputs == "offload")
        in_root = 1  # squared at the end, in one parcel with the last product
        assert stats.parcels.count + stats.shared.count == in_regions + in_root
        assert (stats.kept[Reason.RECIPE].count if Reason.RECIPE in stats.kept else 0) == 9 - in_regions


def test_a_predicate_receives_arguments_and_may_raise(rig):
    seen = []

    def large(op, *args, **kwargs):
        seen.append(op)
        return op is torch.ops.aten.addmm.default and args[1].shape[0] == ROWS

    model = make(lambda: Stack(Products), CPU)
    rig.offload(model, Recipe("selective", ops=(large,)))
    assert products_in_backward(model) == 3 * 2 * 2 - 1  # the first input needs no gradient
    assert torch.ops.aten.sin.default in seen

    def fails(op, *args, **kwargs):
        raise ZeroDivisionError

    rig.handles[0].set_recipe(Recipe("selective", ops=(fails,)))
    with pytest.raises(ZeroDivisionError):
        model(batch(CPU))
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


@torch.library.custom_op("ebbtide_tests::noisy_fwd", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Uses random numbers without the tag, like attention kernels of other packages."""
    return x * torch.rand_like(x)


noisy.register_autograd(lambda ctx, grad: grad * 0.5)


def test_a_saved_operator_of_another_package_may_use_random_numbers(rig):
    class Noisy(Simple):
        def forward(self, x):
            return functional.dropout(noisy(self.first(x)).sin(), 0.5) * torch.rand_like(x).exp()

    def is_noisy(op, *args, **kwargs):
        return "noisy" in str(op)

    model, twin = (make(lambda: Stack(Noisy), CPU) for _ in range(2))
    rig.offload(model, Recipe("selective", ops=(is_noisy,)))
    for number in range(3):
        assert_equal(seeded_step(model, number), seeded_step(twin, number))


def test_modes_of_the_user_see_nothing_twice(rig):
    """Saved outputs run no operator, and our own operators are hidden."""
    model = make(lambda: Stack(Products), CPU)
    rig.offload(model, EVERY)
    with Counting() as counting:
        model(batch(CPU))
    assert counting.products == 6


def test_no_output_is_left_after_backward():
    """Only the graph of a forward owns outputs."""
    rig = HandleRig()
    model = make(lambda: Stack(Products), CPU)
    rig.offload(model, EVERY)
    made = []
    init = SaveOutputsMode.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveOutputsMode, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1])
        loss = model(batch(CPU))
        assert sum(len(mode.outputs.tickets()) for mode in made) > 0
        loss.backward()
    assert len(made) == 3
    assert all(mode.outputs.tickets() == [] for mode in made)


@pytest.mark.parametrize("settings", [{"recipe": "selective"}, {"budget": "1TiB"}])
def test_operators_called_by_operators_are_cast_in_each_kind_of_step(settings):
    """Also with a handle that measures first."""
    results = []
    for _ in range(2):
        model = make(lambda: Stack(CastsInside), CPU)
        if not results:
            ebbtide.offload(model, store="mock", min_bytes=1, **settings)
        results.append(train(model, images, CPU, 6, lambda: torch.autocast("cpu", torch.bfloat16)))
    assert_equal(*results)
