"""Lifetimes: memory of regions, state after failures, and how often code runs."""

import collections
import contextlib
import copy
import gc
import inspect
import threading
import weakref

import pytest
import torch
from cases import Data, make
from recipe_cases import EVERY, WIDTH, Dropouts, Mixed, Products, Simple, Stack, batch, observed, seeded_step
from support import Boom, HandleRig, assert_equal
from torch import nn

import ebbtide
from ebbtide import Recipe, RecomputeError
from ebbtide._devices.sim import SimDevice
from ebbtide._recompute import frame
from ebbtide._recompute.frame import Frame, Holder

CPU = torch.device("cpu")


NESTED = {"layers.*": "selective", "layers.*.attention": "recompute"}


@pytest.fixture
def rig():
    rig = HandleRig(SimDevice(9, "late"))
    yield rig
    rig.check_no_races()
    rig.check_at_rest()


def check_no_traces(*handles):
    """No hooks, modes or sessions are active in this thread."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert all(handle._attachment.session() is None for handle in handles)


# -- memory ------------------------------------------------------------------------------------------------------------


class Retries(nn.Module):
    """Runs an operator again that ran out of memory."""

    def forward(self, x):
        return self.tanh(self.tanh(self.tanh(x)))

    def tanh(self, x):
        try:
            return x.tanh()
        except torch.OutOfMemoryError:
            return x.tanh()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_tensor_lost_in_code_that_retries_is_an_error(failing, monkeypatch):
    model = nn.Sequential(Retries())
    ebbtide.offload(model, recipe={"0": "recompute"}, verify=0)
    loss = model(torch.randn(2, WIDTH, requires_grad=True)).sum()
    compared = []

    def matches(recomputed, saved):
        compared.append(recomputed)
        if len(compared) == failing:
            raise torch.OutOfMemoryError
        return recomputed == saved

    monkeypatch.setattr(frame, "_matches", matches)
    with pytest.raises(RecomputeError, match="saved 3 tensors in forward, and 1 of them are missing"):
        loss.backward()


class KeepsAGraph(nn.Module):
    """Keeps a graph of each forward, and saves another shape in the second forward."""

    def __init__(self, seen):
        super().__init__()
        self.see = seen.append  # a list among the attributes would be set back behind a recomputation

    def forward(self, x):
        y = x.exp()
        self.see((x.sin(), weakref.ref(y.untyped_storage())))
        return y[: 3 - len(self.see.__self__)].exp()


def test_a_failed_recomputation_drops_its_tensors():
    """Hooks of a recomputed tensor that the region keeps refer to the recomputation."""
    seen = []
    model = nn.Sequential(KeepsAGraph(seen))
    handle = ebbtide.offload(model, recipe={"0": "recompute"}, verify=0)
    loss = model(torch.randn(2, WIDTH, requires_grad=True)).sum()
    with pytest.raises(RecomputeError):
        loss.backward()
    del loss
    gc.collect()
    assert [storage() for _, storage in seen] == [None, None]
    check_no_traces(handle)


class Watched(Simple):
    """Records storages by name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        if torch._C._current_graph_task_id() == -1:
            product = self.first(x)
            sine = product.sin()
            out = self.second(sine)
            refs = {"input": x, "product": product, "cheap": sine, "last": out}
            self.seen.append({name: weakref.ref(t.untyped_storage()) for name, t in refs.items()})
            return out.tanh()
        return self.second(self.first(x).sin()).tanh()


ALIVE = {
    "keep": {"input", "product", "cheap"},
    "offload": set(),
    "recompute": set(),
    "selective": set(),
    Recipe("recompute", inputs="keep"): {"input"},
    Recipe("selective", inputs="keep"): {"input"},
    Recipe("selective", outputs="keep"): {"product", "last"},
    Recipe("selective", inputs="keep", outputs="keep"): {"input", "product", "last"},
}


@pytest.mark.parametrize("recipe", ALIVE, ids=str)
def test_live_tensors_between_forward_and_backward(recipe):
    rig = HandleRig(window=1)
    model = make(lambda: Stack(Watched), CPU)
    rig.offload(model, recipe)
    loss = model(batch(CPU) * 1.5)
    for layer in model.layers[:-1]:  # the last output may still be on the outbound lane
        (refs,) = layer.seen
        alive = {name for name, ref in refs.items() if ref() is not None}
        if layer is not model.layers[0]:
            assert alive == ALIVE[recipe]
        else:
            assert alive - {"input"} == ALIVE[recipe] - {"input"}
    loss.backward()
    del loss
    assert not any(ref() is not None for layer in model.layers for refs in layer.seen for ref in refs.values())
    rig.check_at_rest()


def test_a_saved_output_is_freed_after_its_read(rig):
    """Not only after the last saved tensor of the region."""

    class Checks(Simple):
        def forward(self, x):
            product = self.first(x)
            if torch._C._current_graph_task_id() == -1:
                storage = weakref.ref(product.untyped_storage())
                product.register_hook(lambda _: alive.append(storage() is not None))
            return self.second(product.sin()).tanh()

    alive = []
    model = make(lambda: Stack(Checks), CPU)
    rig.offload(model, Recipe("selective", outputs="keep"))
    for number in range(3):
        seeded_step(model, number)
    assert alive == [False] * 9


@pytest.mark.parametrize("recipe", ["recompute", "selective", EVERY, NESTED], ids=str)
@pytest.mark.parametrize("end", ["backward", "dropped", "retained", "partial", "error"])
def test_nothing_of_a_pass_outlives_its_graph(recipe, end, rig):
    gc.collect()
    gc.disable()  # no cycles: all objects end with the graph
    try:
        model = make(lambda: Stack(Mixed), CPU)
        rig.offload(model, recipe)
        alive = weakref.WeakSet()
        with pytest.MonkeyPatch.context() as patch:
            _note(patch, Frame, alive)
            _note(patch, Holder, alive)
            for number in range(3):
                loss = model(batch(CPU, number))
                _finish(end, loss, model)
                assert len(alive) > 0 or end == "backward"
                del loss
                assert len(alive) == 0
    finally:
        gc.enable()


def _note(patch, kind, alive):
    init = kind.__init__

    def noting(self, *args):
        init(self, *args)
        alive.add(self)

    patch.setattr(kind, "__init__", noting)


def _finish(end, loss, model):
    if end == "backward":
        loss.backward()
    elif end == "retained":
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    elif end == "partial":
        torch.autograd.grad(loss, list(model.layers[2].parameters()), retain_graph=True)
    elif end == "error":
        hook = model.layers[1].second.weight.register_hook(_raise)
        with contextlib.suppress(Boom):  # pytest.raises() would keep the traceback, and through it the graph
            loss.backward()
            pytest.fail("no error")
        hook.remove()
        # torch owns the graph of a failed backward until the next backward.
        torch.ones((), requires_grad=True).exp().backward()


def _raise(*_):
    raise Boom


@pytest.mark.parametrize("recipe", ["recompute", EVERY], ids=str)
def test_values_of_a_kept_graph_go_as_they_are_read(recipe, rig):
    """A retained graph must not accumulate recomputed values."""
    model = make(lambda: Stack(Products), CPU)
    rig.offload(model, recipe)
    holders = weakref.WeakSet()
    with pytest.MonkeyPatch.context() as patch:
        _note(patch, Holder, holders)
        loss = model(batch(CPU))
    loss.backward(retain_graph=True)
    assert len(holders) > 0
    assert all(holder.value is None for holder in holders)


# -- failures ----------------------------------------------------------------------------------------------------------


class Fails(Simple):
    """Raises a given error, in forward or in recomputation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.error = None
        self.in_recomputation = False

    def forward(self, x):
        self.count += 1
        y = torch.nn.functional.dropout(self.first(x), 0.3).sin()
        if self.error is not None and (torch._C._current_graph_task_id() != -1) is self.in_recomputation:
            raise self.error
        return self.second(y).exp().clamp(max=3.0) + x


@pytest.mark.parametrize("recipe", ["recompute", "selective", EVERY], ids=str)
@pytest.mark.parametrize("in_recomputation", [False, True], ids=["forward", "recomputation"])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_error_in_a_region_leaves_no_state_behind(recipe, in_recomputation, error, rig):
    model, twin = (make(lambda: Stack(Fails), CPU) for _ in range(2))
    handle = rig.offload(model, recipe)
    for number in range(3):
        model.layers[1].error, model.layers[1].in_recomputation = error(), in_recomputation
        torch.manual_seed(1)
        counts = [layer.count for layer in model.layers]
        with pytest.raises(error):
            _forward_and_backward(model, number)
        if in_recomputation:
            state = torch.get_rng_state()
            torch.manual_seed(1)
            twin(batch(CPU, number))
            assert torch.equal(state, torch.get_rng_state())
        else:
            for layer in [*twin.layers][:2]:
                layer.count += 1
        check_no_traces(handle)
        assert all(layer.count is count for layer, count in zip(model.layers, counts, strict=True))
        assert [layer.count.item() for layer in model.layers] == [layer.count.item() for layer in twin.layers]
        model.layers[1].error = None
        model.zero_grad()
        twin.zero_grad()
        assert_equal(seeded_step(model, number), seeded_step(twin, number))


def _forward_and_backward(model, number):
    model(batch(CPU, number)).backward()


def test_backward_can_be_retried_after_a_failed_recomputation(rig):
    model, twin = (make(lambda: Stack(Fails), CPU) for _ in range(2))
    rig.offload(model, EVERY)
    results = []
    for each in (model, twin):
        torch.manual_seed(1)
        each.layers[1].in_recomputation = True
        loss = each(batch(CPU))
        if each is model:
            model.layers[1].error = Boom()
            with pytest.raises(Boom):
                loss.backward(retain_graph=True)
            model.layers[1].error = None
            model.zero_grad()
        loss.backward()
        results.append([loss.detach(), *observed(each, CPU)])
    assert_equal(*results)


def test_tensors_saved_by_a_failed_region_can_be_read(rig):
    class Model(Stack):
        def forward(self, x):
            aside = []
            for layer in self.layers:
                with contextlib.suppress(Boom):
                    x = layer(x, aside)
            return x.square().mean() + sum(aside)

    class Asides(Simple):
        def forward(self, x, aside):
            y = torch.nn.functional.dropout(self.first(x), 0.3).exp().clamp(max=3.0)
            aside.append(self.second(y).sin().sum())
            if len(aside) == 2:
                raise Boom
            return y + x

    for recipe in ("recompute", EVERY):
        model, twin = (make(lambda: Model(Asides), CPU) for _ in range(2))
        handle = rig.offload(model, recipe)
        for number in range(3):
            assert_equal(seeded_step(model, number), seeded_step(twin, number))
            check_no_traces(handle)


# -- how often code runs -----------------------------------------------------------------------------------------------


class Recorded(Simple):
    def __init__(self):
        super().__init__()
        self.log = collections.UserList()  # process-wide: a list in the module would be restored after recomputation

    def forward(self, x):
        self.log.append("start")
        y = self.second(self.first(x).sin()).cos()
        self.log.append("saved")
        y = y + 1.0
        self.log.append("end")
        return y


def test_code_after_the_last_saved_tensor_is_not_recomputed(rig):
    model = make(lambda: Stack(Recorded), CPU)
    rig.offload(model, "recompute")
    loss = model(batch(CPU))
    loss.backward(retain_graph=True)
    assert all(layer.log == ["start", "saved", "end", "start"] for layer in model.layers)
    loss.backward()
    assert all(layer.log == ["start", "saved", "end", "start", "start"] for layer in model.layers)


def test_only_needed_regions_are_recomputed(rig):
    model = make(lambda: Stack(Recorded), CPU)
    rig.offload(model, "recompute")
    loss = model(batch(CPU))
    torch.autograd.grad(loss, model.layers[2].second.weight)
    assert [layer.log.count("start") for layer in model.layers] == [1, 1, 2]


def test_hooks_of_the_region_are_called_once_and_hooks_inside_as_often_as_it_runs(rig):
    model = make(lambda: Stack(Products), CPU)
    rig.offload(model, "recompute")
    calls = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append("before"))
        layer.register_forward_hook(lambda *_: calls.append("after"))
        layer.register_full_backward_hook(lambda *_: calls.append("backward"))
        layer.first.register_full_backward_hook(lambda *_: calls.append("backward inside"))
    model(batch(CPU).requires_grad_()).backward()
    assert {name: calls.count(name) for name in calls} == dict.fromkeys(
        ["before", "after", "backward", "backward inside"], 3
    )


def test_without_grad_nothing_is_prepared(rig):
    model = make(lambda: Stack(Recorded), CPU)
    handle = rig.offload(model, "recompute")
    with torch.no_grad():
        model(batch(CPU))
    with torch.inference_mode():
        model(batch(CPU))
    stats = handle.stats()
    assert (stats.recomputed.count, stats.unable, stats.saved_tensors) == (0, {}, 0)
    model.eval()
    twin = make(lambda: Stack(Recorded), CPU)
    assert_equal(seeded_step(model), seeded_step(twin.eval()))
    assert handle.stats().recomputed.count > 0


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["recompute", "selective", EVERY], ids=str)
def test_backward_in_another_thread(recipe):
    rig = HandleRig()
    model, twin = (make(lambda: Stack(Mixed), CPU) for _ in range(2))
    handle = rig.offload(model, recipe)
    for number in range(3):
        torch.manual_seed(number)
        loss = model(batch(CPU, number))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        check_no_traces(handle)
        torch.manual_seed(number)
        other = twin(batch(CPU, number))
        other.backward()
        assert_equal([loss.detach(), *observed(model, CPU)], [other.detach(), *observed(twin, CPU)])
        del loss
    rig.check_at_rest()


def test_two_threads_run_one_graph_backward_at_once():
    rig = HandleRig()
    model, twin = (make(lambda: Stack(Products), CPU) for _ in range(2))
    rig.offload(model, "selective")
    loss, other = model(batch(CPU)), twin(batch(CPU))
    expected = torch.autograd.grad(other, list(twin.parameters()))
    results = {}
    barrier = threading.Barrier(2)

    def work(rank, loss):
        barrier.wait()
        results[rank] = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

    threads = [threading.Thread(target=work, args=(rank, loss)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal(results[0], expected)
    assert_equal(results[1], expected)
    del loss
    rig.check_at_rest()


# -- attributes of the module ------------------------------------------------------------------------------------------


def test_names_and_signatures_stay_and_copies_are_plain(rig):
    model, twin = (make(lambda: Stack(Mixed), CPU) for _ in range(2))
    handle = rig.offload(model, {"layers.*": "recompute", "layers.*.attention": "selective"})
    seeded_step(model)
    seeded_step(twin)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert_equal(list(model.state_dict().values()), list(twin.state_dict().values()))
    assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
    for mine, other in zip(model.modules(), twin.modules(), strict=True):
        assert inspect.signature(mine.forward) == inspect.signature(other.forward)
        assert mine.forward.__name__ == other.forward.__name__
    for module in (model, model.layers[0], model.layers):
        assert all("forward" not in inner.__dict__ for inner in copy.deepcopy(module).modules())
    assert_equal(seeded_step(copy.deepcopy(model), 1), seeded_step(copy.deepcopy(twin), 1))
    handle.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert_equal(seeded_step(copy.deepcopy(model), 1), seeded_step(copy.deepcopy(twin), 1))


def test_a_forward_that_was_put_on_the_instance_is_put_back(rig):
    model = make(lambda: Stack(Products), CPU)
    own = model.layers[0].forward
    model.layers[0].forward = own
    handle = rig.offload(model, "recompute")
    seeded_step(model)
    assert model.layers[0].forward is not own
    handle.remove()
    assert model.layers[0].__dict__["forward"] is own


def test_regions_without_arguments_and_saved_tensors(rig):
    class Nothing(nn.Module):
        def forward(self):
            return 3.0

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Nothing() for _ in range(3))
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return (x * self.weight * sum(layer() for layer in self.layers)).sin().sum()

    model, twin = Model(), Model()
    handle = rig.offload(model, "selective")
    assert_equal(seeded_step(model), seeded_step(twin))
    assert handle.stats().recomputed.count == 0


def test_many_graphs_at_once(rig):
    model, twin = (make(lambda: Stack(Dropouts), CPU) for _ in range(2))
    rig.offload(model, EVERY)
    results = []
    for each in (model, twin):
        torch.manual_seed(1)
        losses = [each(Data(CPU, n).tensor(3, WIDTH)) for n in range(6)]
        for loss in [*losses[::2], *losses[1::2]]:
            loss.backward()
        results.append(observed(each, CPU))
    assert_equal(*results)
