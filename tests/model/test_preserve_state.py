"""Code inside `restored` leaves no trace, for all kinds of buffers and of carried state."""

import copy
import random
from collections import deque

import numpy
import pytest
import torch
from support import bits
from torch import nn

import ebbtide
from ebbtide import ModuleError
from ebbtide._dry_run import measure, plan
from ebbtide._model.preserve_state import restored


class Twin(torch.Tensor):
    """A wrapper around two tensors."""

    @staticmethod
    def __new__(cls, one, other):
        return torch.Tensor._make_wrapper_subclass(cls, one.size(), dtype=one.dtype)

    def __init__(self, one, other):
        self.one, self.other = one, other

    def __tensor_flatten__(self):
        return ["one", "other"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Twin(inner["one"], inner["other"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def part(name):
            return [getattr(arg, name) if isinstance(arg, Twin) else arg for arg in args]

        made = func(*part("one"), **(kwargs or {})), func(*part("other"), **(kwargs or {}))
        return args[0] if func.__name__.endswith("_.Tensor") or func is torch.ops.aten.copy_.default else Twin(*made)


class Stuck(Twin):
    """A tensor without an operator to copy."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"no {func}")


def inference(t):
    with torch.inference_mode():
        return t.clone()


def doubled(buffer):
    buffer.mul_(2)


def cleared(buffer):
    buffer.zero_()


def changed_below(buffer):
    """Changes a memory cell behind several elements."""
    buffer.as_strided((1,), (1,), 0).add_(1)


ONES = torch.arange(1.0, 5.0)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("make_buffer", "change"),
    [
        (lambda: ONES.clone(), doubled),
        (lambda: ONES.clone().expand(3, 4), changed_below),
        (lambda: ONES.clone()[:1].expand(4), changed_below),
        (lambda: ONES.clone().unfold(0, 3, 1), changed_below),
        (lambda: torch.ones(4, 4)[:, 1:3], doubled),
        (lambda: torch.ones(()), doubled),
        (lambda: torch.ones(0, 3).expand(5, 0, 3), doubled),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), doubled),
        (lambda: ONES.clone().requires_grad_(), doubled),
        (lambda: inference(ONES), doubled),
        (lambda: inference(ONES).expand(3, 4), changed_below),
        (lambda: torch.eye(3).to_sparse(), doubled),
        (lambda: torch.eye(3).to_sparse(), cleared),
        (lambda: torch.eye(3).to_sparse_csr(), doubled),
        (lambda: torch.eye(3).to_sparse_csr(), cleared),
        (lambda: torch.eye(4).to_sparse_bsr(2), cleared),
        (lambda: Twin(ONES.clone(), ONES + 1), doubled),
    ],
    ids=[
        "plain", "expanded", "one element", "windows", "columns", "scalar", "empty", "conjugate", "with gradient",
        "inference", "inference, expanded", "coo", "coo cleared", "csr", "csr cleared", "bsr cleared", "wrapper",
    ],
)  # fmt: skip
def test_a_buffer_is_the_identical_tensor_with_identical_bytes(make_buffer, change):
    model = nn.Linear(2, 2)
    buffer = make_buffer()
    model.register_buffer("known", buffer)
    before = parts_of(buffer)
    with restored(model, []):
        with torch.inference_mode(buffer.is_inference()), torch.no_grad():
            change(buffer)
        assert parts_of(buffer) != before or buffer.numel() == 0
        model.known = None
    assert model.known is buffer
    assert parts_of(buffer) == before


def parts_of(buffer):
    """The bytes of each component."""
    if isinstance(buffer, Twin):
        return [bits(buffer.one), bits(buffer.other)]
    if buffer.layout is torch.sparse_coo:
        return [bits(buffer.coalesce().indices()), bits(buffer.coalesce().values())]
    if buffer.layout is not torch.strided:
        return [bits(buffer.crow_indices()), bits(buffer.col_indices()), bits(buffer.values())]
    return [bits(buffer)]


def test_a_buffer_that_cannot_be_copied_is_refused_before_anything_runs():
    model = nn.Linear(2, 2)
    model.inner = nn.Module()
    model.inner.register_buffer("stuck", Stuck(ONES, ONES))
    with pytest.raises(ModuleError, match=r"buffer 'inner.stuck' is a Stuck \(torch.strided\)"), restored(model, []):
        pytest.fail("it ran")


class Shifted(nn.Module):
    """Blocks, and a buffer with a single row in memory for all rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.register_buffer("shift", torch.ones(1, 8).expand(4, 8))
        self.register_buffer("fixed", inference(torch.ones(8)))
        self.register_buffer("learned", torch.ones(8, requires_grad=True))

    def forward(self, x):
        x = x + self.shift + self.fixed + self.learned
        for layer in self.layers:
            x = layer(x)
        self.shift[:1].add_(1)
        return x.sum()


SETTINGS = {"store": "disk", "min_bytes": 1}


def test_a_model_with_such_buffers_is_measured_and_left_as_it_was():
    model = Shifted()
    buffers = dict(model.named_buffers())
    before = {name: bits(buffer) for name, buffer in buffers.items()}
    model.learned.grad = grad = torch.full((8,), 3.0)
    measure(model, torch.randn(4, 8), **SETTINGS)
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {k: id(b) for k, b in buffers.items()}
    assert {name: bits(buffer) for name, buffer in model.named_buffers()} == before
    assert model.learned.grad is grad
    assert torch.equal(grad, torch.full((8,), 3.0))
    ebbtide.release_memory()


def test_a_buffer_without_memory_is_refused_at_the_entry_point():
    model = Shifted()
    model.register_buffer("missing", torch.ones(3, device="meta"))
    with pytest.raises(ModuleError, match="meta device"):
        measure(model, torch.randn(4, 8), **SETTINGS)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(8), nn.LazyBatchNorm1d(affine=False)], ids=["parameter", "buffer"])
def test_lazy_modules_must_be_initialised(lazy):
    model = Shifted()
    model.lazy = lazy
    with pytest.raises(ModuleError, match="run one forward"):
        measure(model, torch.randn(4, 8), **SETTINGS)


# -- carried state, generators -----------------------------------------------------------------------------------------


class Carries(nn.Module):
    """State in each kind of attribute, all read by the next forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.hidden = None
        self.calls = 0
        self.sums = torch.zeros(8)
        self.history = [torch.zeros(8)]
        self.nested = {"states": [(torch.ones(8), {"steps": 0})], "names": {"a"}}
        self.last = deque([torch.zeros(8)], maxlen=2)
        self.noise = torch.Generator().manual_seed(3)
        self.others = [random.Random(4), numpy.random.default_rng(5), numpy.random.RandomState(6)]

    def forward(self, x):
        self.calls += 1
        if not hasattr(self, "mask"):
            self.mask = x.detach().mean(0) > 0
        for layer in self.layers:
            x = layer(x)
        state, counted = self.nested["states"][-1]
        x = x * self.mask + self.calls + self.sums + self.history[-1] + self.last[-1] * state + counted["steps"]
        x = x if self.hidden is None else x + self.hidden
        x = x + torch.randn(8, generator=self.noise) + self.others[0].gauss(0, 1) + self.others[1].random()
        x = x * self.others[2].randn()
        self.hidden = x.mean(0).tanh().detach()
        self.sums.add_(self.hidden)
        self.sums.data.mul_(0.5)
        self.history.append(self.hidden)
        self.last.append(self.hidden)
        counted["steps"] += 1
        self.nested["states"].append((self.hidden, {"steps": 3}))
        self.nested["names"].add(f"b{self.calls}")
        return x.square().mean()


def losses_of(model):
    found = []
    for seed in range(3):
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("budget", [None, "64GiB"])
def test_a_model_that_carries_state_goes_on_as_if_nothing_had_been_measured(steps_before, budget):
    torch.manual_seed(0)
    model = Carries()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        for seed in range(steps_before):
            each(torch.randn(4, 8, generator=torch.Generator().manual_seed(9 + seed))).backward()
    before = dict(vars(model))
    held = [model.history, model.nested, model.nested["states"], model.last]
    contents = [copy.copy(each) for each in held]
    plan(model, torch.randn(4, 8), budget=budget, **SETTINGS)
    now = vars(model)
    assert now.keys() == before.keys()
    assert all(now[name] is before[name] for name in before)
    assert [list(each) for each in held] == [list(each) for each in contents]
    assert losses_of(model) == losses_of(twin)
    ebbtide.release_memory()


def test_an_lstm_with_state_across_batches():
    class Carrying(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(8, 8) for _ in range(2))
            self.states = [None, None]

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x, state = layer(x, self.states[number])
                self.states[number] = tuple(t.detach() for t in state)
            return x.square().mean()

    torch.manual_seed(0)
    model = Carrying()
    twin = copy.deepcopy(model)
    measure(model, torch.randn(4, 8), **SETTINGS)
    assert model.states == [None, None]
    assert losses_of(model) == losses_of(twin)
    ebbtide.release_memory()


def test_registers_and_resources_are_left_alone():
    class Resource:
        pass

    class Sets(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "resource"):
                self.resource, self.register_ = Resource(), []
                self.register_.append(self.resource)
            return super().forward(x)

    model = Sets(2, 2)
    with restored(model, []):
        model(torch.ones(1, 2))
        resource = model.resource
    assert model.resource is resource
    assert model.register_ == [resource]


def test_an_attribute_that_cannot_be_copied_is_refused_before_anything_runs():
    model = nn.Linear(2, 2)
    model.stuck = [Stuck(ONES, ONES)]
    with pytest.raises(ModuleError, match=r"attribute 'stuck' of a Linear is a Stuck"), restored(model, []):
        pytest.fail("it ran")
