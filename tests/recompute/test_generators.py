"""Generators besides torch's defaults, and trackers that set the defaults: recomputation repeats the random numbers of
forward, and leaves all states as before."""

import contextlib
import random
import sys
import types
import warnings

import numpy
import pytest
import torch
from cases import make
from recipe_cases import RECIPES, WIDTH, Dropouts, Simple, Stack, batch, observed
from support import HandleRig, assert_equal
from torch import nn
from torch.nn import functional

from ebbtide import EbbtideWarning
from ebbtide._recompute import generators
from ebbtide._types import Unable

CPU = torch.device("cpu")


@pytest.fixture
def rig():
    rig = HandleRig()
    yield rig
    rig.check_at_rest()


def seed_all(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def random_numbers():
    """A number of each process-wide generator; a call for normal numbers may leave a second number in the state."""
    return [random.gauss(0, 1), random.random(), numpy.random.randn(), numpy.random.rand(), torch.rand(()).item()]


def steps(model, count=4, call=None):
    """Two graphs at a time, as in a pipeline: each continues with the random state after the other."""
    seed_all(5)
    results = []
    for number in range(count):
        losses = [(call or model)(batch(CPU, 2 * number + n)) for n in range(2)]
        for loss in losses:
            loss.backward()
            results += [loss.detach(), *observed(model, CPU)]
    return results


def both(kind):
    return make(lambda: Stack(kind), CPU), make(lambda: Stack(kind), CPU)


# -- drawn in Python ---------------------------------------------------------------------------------------------------


class FromPython(Simple):
    """An odd count of normal numbers: each second call finds a leftover number."""

    def forward(self, x):
        y = functional.dropout(self.first(x), 0.2) * random.gauss(0, 1)
        return self.second(y.sin()).exp().clamp(max=3.0) * (1 + random.random()) + x


class FromNumpy(Simple):
    def forward(self, x):
        y = self.first(x).sin() * numpy.random.randn()
        scale = torch.from_numpy(numpy.random.rand(WIDTH)).float()
        return self.second(y).tanh() * scale + x


class Later(Simple):
    """Draws no number in the first two calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        y = self.first(x).sin()
        if self.calls > 2:
            y = y * random.random() * numpy.random.rand()
        return self.second(y).exp().clamp(max=3.0)


class FromItsOwn(Simple):
    """Generators of each kind, also in containers."""

    def __init__(self):
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)
        self.python = random.Random(2)
        self.many = [numpy.random.default_rng(3), numpy.random.RandomState(4)]
        self.named = {"mersenne": numpy.random.Generator(numpy.random.MT19937(5)), "bits": numpy.random.PCG64(6)}

    def forward(self, x):
        y = self.first(x) + torch.randn(WIDTH, generator=self.noise)
        y = y.sin() * self.python.gauss(0, 1) + self.many[0].normal() * self.many[1].randn()
        y = y * self.named["mersenne"].random() * (self.named["bits"].random_raw() % 5)
        return self.second(y).exp().clamp(max=3.0) + x


def states_of(model):
    """States of the generators of `FromItsOwn`."""
    bits = [(layer.many[0].bit_generator.state, layer.named["bits"].state) for layer in model.layers]
    numbers = [(layer.many[1].randn(), layer.named["mersenne"].random()) for layer in model.layers]
    return bits, numbers, [(layer.noise.get_state().tolist(), layer.python.getstate()) for layer in model.layers]


@pytest.mark.parametrize("recipe", ["recompute", "selective", "every operator", "pruned"])
@pytest.mark.parametrize("kind", [FromPython, FromNumpy, Later])
def test_numbers_of_process_wide_generators_are_repeated(rig, kind, recipe):
    model, twin = both(kind)
    rig.offload(model, RECIPES[recipe])
    ours = steps(model), random_numbers()
    plain = steps(twin), random_numbers()
    assert_equal(ours[0], plain[0])
    assert ours[1] == plain[1]


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_numbers_of_generators_in_modules_are_repeated(rig, recipe):
    model, twin = both(FromItsOwn)
    rig.offload(model, recipe)
    assert_equal(steps(model), steps(twin))
    assert states_of(model) == states_of(twin)


@pytest.mark.parametrize("recipe", ["recompute", "selective"])
def test_numbers_of_generators_as_arguments_are_repeated(rig, recipe):
    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Takes() for _ in range(3))

        def forward(self, x):
            noise = torch.Generator().manual_seed(1)
            options = {"rng": numpy.random.default_rng(2), "python": [random.Random(3)]}
            for layer in self.layers:
                x = layer(x, noise, options=options)
            return x.square().mean() * (1 + options["rng"].random() + torch.rand((), generator=noise))

    class Takes(Simple):
        def forward(self, x, noise, options):
            y = self.first(x).sin() * torch.rand(WIDTH, generator=noise) * options["rng"].random()
            return self.second(y).exp().clamp(max=3.0) * options["python"][0].random() + x

    model, twin = make(Passes, CPU), make(Passes, CPU)
    rig.offload(model, recipe)
    assert_equal(steps(model), steps(twin))


def test_a_state_is_copied_only_after_a_change(monkeypatch, rig):
    """A copy costs more than the rest of the preparation of a recomputation, and most regions never draw a number."""
    copies = []
    for generator in (generators._PYTHON, generators._NUMPY):
        monkeypatch.setattr(generator, "read", lambda read=generator.read: copies.append(1) or read())
    model, _ = both(Dropouts)
    rig.offload(model, "recompute")
    seed_all(1)
    for number in range(3):
        model(batch(CPU, number)).backward()
    assert len(copies) == 2
    random_numbers()
    model(batch(CPU)).backward()
    assert len(copies) == 4


DRAWS = {
    "random": (generators._PYTHON, random.random),
    "gauss": (generators._PYTHON, lambda: random.gauss(0, 1)),
    "choice": (generators._PYTHON, lambda: random.choice("ab")),
    "rand": (generators._NUMPY, numpy.random.rand),
    "randn": (generators._NUMPY, numpy.random.randn),
}


@pytest.mark.parametrize(("generator", "draw"), DRAWS.values(), ids=DRAWS)
def test_every_draw_is_seen(generator, draw):
    seed_all(3)
    for _ in range(5):
        state = generator.state()
        assert not state.was_used()
        first = draw()
        assert state.was_used()
        state.put_back()
        assert not state.was_used()
        assert draw() == first


def test_draws_of_a_new_bit_generator_are_seen_too():
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        test_every_draw_is_seen(generators._NUMPY, numpy.random.randn)
    finally:
        numpy.random.set_bit_generator(before)


# -- trackers ----------------------------------------------------------------------------------------------------------


class StatesTracker:
    """As Megatron-Core's, of the CPU's default generator."""

    def __init__(self):
        self.states_ = {}
        self._current_state_name = "default-rng"

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states

    def add(self, name, seed):
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()
        return self

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        before, around = torch.get_rng_state(), self._current_state_name
        if around != "default-rng":
            self.states_[around] = before
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before if around == "default-rng" else self.states_[around])
            self._current_state_name = around


class HeldGenerators(StatesTracker):
    """As TransformerEngine's for captured graphs: generators hold the states, and stay identical objects."""

    def add(self, name, seed):
        self.states_[name] = torch.Generator().manual_seed(seed)
        return self

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name].get_state())
        try:
            yield
        finally:
            self.states_[name].set_state(torch.get_rng_state())
            torch.set_rng_state(before)


SEED = 17
NAMES = ("model-parallel-rng", "expert-parallel-rng")
TRACKER = types.SimpleNamespace(now=None)


def new_tracker(kind=StatesTracker):
    TRACKER.now = kind().add(NAMES[0], SEED).add(NAMES[1], SEED + 1)
    return TRACKER.now


def bits_of(tracker):
    states = tracker.get_states().values()
    return [state.get_state() if isinstance(state, torch.Generator) else state for state in states]


class Forks(Simple):
    """Draws from the default state and from states of the tracker in turn, also in nested forks."""

    def forward(self, x):
        tracker = self.tracker()
        y = functional.dropout(self.first(x), 0.2)
        with tracker.fork():
            y = functional.dropout(y.sin(), 0.5)
            with tracker.fork(NAMES[1]):
                y = functional.dropout(y, 0.3)
        noise = torch.rand(WIDTH)
        with tracker.fork(NAMES[1]):
            noise = noise * torch.rand(WIDTH)
        return functional.dropout(self.second(y * noise).exp().clamp(max=3.0), 0.1) + x

    def tracker(self):
        return TRACKER.now


class Holds(Forks):
    def __init__(self):
        super().__init__()
        self.rng = TRACKER.now

    def tracker(self):
        return self.rng


class ForksAgain(Forks):
    """For a model inside a fork (sequence parallelism): a region forks the state of the outer fork once more."""

    def forward(self, x):
        with self.tracker().fork():
            y = functional.dropout(self.first(x).sin(), 0.3)
        return functional.dropout(self.second(y).exp().clamp(max=3.0), 0.3) + x


def in_fork(model):
    def call(x):
        with TRACKER.now.fork():
            return model(x)

    return call


def megatron(monkeypatch, tracker):
    module = types.SimpleNamespace(_CUDA_RNG_STATE_TRACKER=tracker)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", module)


def transformer_engine(monkeypatch, tracker):
    module = types.SimpleNamespace(get_all_rng_states=lambda: tracker.states_)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", module)


@pytest.mark.parametrize("recipe", ["recompute", "selective", "every operator", "pruned"])
@pytest.mark.parametrize("tracker", [StatesTracker, HeldGenerators])
@pytest.mark.parametrize("known_by", [megatron, transformer_engine, None], ids=["Megatron", "TE", "held"])
def test_masks_of_a_known_tracker_are_repeated(rig, monkeypatch, known_by, tracker, recipe):
    results = []
    for _ in range(2):
        now = new_tracker(tracker)
        model = make(lambda: Stack(Forks if known_by else Holds), CPU)
        if not results:
            if known_by is not None:
                known_by(monkeypatch, now)
            handle = rig.offload(model, RECIPES[recipe])
        results.append([*steps(model), *bits_of(now)])
    assert_equal(*results)
    assert handle.stats().unable == {}
    assert handle.stats().recomputed.count > 0


def test_forks_inside_of_forks(rig, monkeypatch):
    results = []
    for _ in range(2):
        now = new_tracker()
        model = make(lambda: Stack(ForksAgain), CPU)
        if not results:
            megatron(monkeypatch, now)
            handle = rig.offload(model, "recompute")
        results.append([*steps(model, call=in_fork(model)), *bits_of(now)])
        assert now._current_state_name == "default-rng"
    assert_equal(*results)
    assert handle.stats().unable == {}


@pytest.mark.parametrize("recipe", ["recompute", "selective", "every operator", "pruned"])
@pytest.mark.parametrize("tracker", [StatesTracker, HeldGenerators])
def test_an_unknown_tracker_ends_recomputation_of_a_region(rig, tracker, recipe):
    """Also in the first forward: tensors saved before the fork are recomputed, the rest is kept."""
    results = []
    for _ in range(2):
        now = new_tracker(tracker)
        model = make(lambda: Mixed(Forks, Dropouts), CPU)
        if not results:
            handle = rig.offload(model, RECIPES[recipe])
            with pytest.warns(EbbtideWarning, match=r"layers\.0 was not prepared.*random number generator") as warned:
                results.append([*steps(model), *bits_of(now)])
            assert len(warned) == 1
        else:
            results.append([*steps(model), *bits_of(now)])
    assert_equal(*results)
    assert handle.stats().unable == {Unable.UNKNOWN_RNG: 2 * 8}
    assert handle.stats().recomputed.count > 0


class Mixed(nn.Module):
    """Two blocks of a kind around a block of another kind."""

    def __init__(self, one, other):
        super().__init__()
        self.layers = nn.ModuleList([one(), other(), one()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_an_unknown_tracker_inside_of_nested_regions(rig):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), Forks()

        def forward(self, x):
            return self.inner(self.first(x).sin()).exp().clamp(max=2.0)

    results = []
    for _ in range(2):
        now = new_tracker()
        model = make(lambda: Stack(Outer), CPU)
        if not results:
            handle = rig.offload(model, {"layers.*": "recompute", "layers.*.inner": "recompute"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EbbtideWarning)
            results.append([*steps(model), *bits_of(now)])
    assert_equal(*results)
    assert set(handle.stats().unable) == {Unable.UNKNOWN_RNG}


def test_tensors_kept_after_an_unknown_state_are_read_twice(rig):
    results = []
    for _ in range(2):
        new_tracker()
        model = make(lambda: Stack(Forks), CPU)
        if not results:
            rig.offload(model, "recompute")
        seed_all(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EbbtideWarning)
            loss = model(batch(CPU))
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([loss.detach(), *observed(model, CPU)])
    assert_equal(*results)
