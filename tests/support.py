"""Shared by tests: contexts and handles over a chosen device, and random training programs."""

import contextlib
import gc
import itertools
import random
from collections.abc import Callable

import torch
from capturing import CapturingSim
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ebbtide._config import OffloadConfig
from ebbtide._context import OffloadActivations
from ebbtide._devices.cpu import CpuDevice
from ebbtide._devices.sim import SimDevice
from ebbtide._engine.context import HookContext, Limits
from ebbtide._engine.engine import Engine
from ebbtide._engine.engines import Engines
from ebbtide._offload import OffloadHandle
from ebbtide._stores.host import HostStore
from ebbtide._types import StoreFactory
from ebbtide._utils.torch_private import OperatorMode

ROOM = 2**28


class Rig:
    """`offload_activations` over a device and store, with access to the engine."""

    def __init__(
        self,
        device=None,
        make_store: StoreFactory | None = None,
        window: int = 1,
        prefetch: int = 1 << 20,
        min_bytes: int = 1,
    ) -> None:
        self.device = CpuDevice() if device is None else device
        make_store = make_store or (lambda own: HostStore(own, ROOM))
        self.engines = Engines(make_store, lambda _: self.device)
        self.hook_context = HookContext(Limits(window, prefetch, min_bytes), lambda _: True)
        self.context = OffloadActivations(OffloadConfig(), self.engines, self.hook_context)

    @property
    def engine(self) -> Engine:
        return self.engines.on(torch.device("cpu"))

    @property
    def stats(self):
        return self.context.stats()

    def check_at_rest(self) -> None:
        """No graph lives any more: no saved tensor may be left."""
        engine = self.engine
        engine._drain_frees()
        if engine._by_storage or self._held_bytes(engine):
            gc.collect()  # a traceback may hold a frame that holds a graph
            engine._drain_frees()
        assert self._held_bytes(engine) == 0
        assert engine._outbound.resident_bytes == 0
        assert engine._ahead_bytes == 0
        assert engine._by_storage == {}

    @staticmethod
    def _held_bytes(engine: Engine) -> int:
        """Without the memory kept by captured graphs."""
        stats = engine.store_stats()
        return stats.used_bytes - stats.captured_bytes


class HandleRig(Rig):
    """`offload` over a device and store: makes handles."""

    def __init__(self, device=None, **settings) -> None:
        small = {"make_store": lambda own: HostStore(own, 2**24, smallest_slab_bytes=2**14)}
        super().__init__(device, **(small | settings))
        self.handles: list[OffloadHandle] = []

    def offload(self, module: torch.nn.Module, recipe=None) -> OffloadHandle:
        """Everything may move, as with `ebbtide.offload`."""
        handle = OffloadHandle(
            module, OffloadConfig(), self.engines, HookContext(self.hook_context.limits, lambda _: True)
        )
        handle._install()
        handle.set_recipe(recipe)
        self.handles.append(handle)
        return handle

    def check_no_races(self) -> None:
        if isinstance(self.device, SimDevice):
            self.device.finish()
            assert self.device.faults == []


def leaves(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def same(run: Callable[[contextlib.AbstractContextManager], list[torch.Tensor]], rig: Rig, times: int = 3) -> None:
    """`run`'s results equal the plain results, bit for bit, also when the timetable has learned."""
    plain = run(contextlib.nullcontext())
    for _ in range(times):
        assert_equal(run(rig.context), plain)
    del plain
    rig.check_at_rest()


def assert_equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    for mine, twin in zip(ours, plain, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (twin.dtype, twin.shape, twin.stride())
        assert bits(mine) == bits(twin)


def bits(t: torch.Tensor) -> bytes:
    """The elements as bytes: NaNs compare too, and minus zero differs from zero. A boolean is true or false."""
    t = t.detach().view(torch.uint8).ne(0) if t.dtype is torch.bool else t
    # clone, not contiguous(): one element of stride 0 is contiguous and cannot be viewed as bytes.
    plain = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).cpu().numpy().tobytes()


class OperatorNames(OperatorMode):
    """Records the names of operators, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.name())
        return op(*args, **(kwargs or {}))


class Boom(RuntimeError):
    """Raised by a program on purpose."""


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Boom


class Program:
    """A random training program: equal tensors, operations and order for equal seeds.

    `run(context, side)` runs under a context; `side` makes contexts in which a second compute stream is current.
    Returns every loss and gradient, and the name of every error, in order.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._width = self._random.choice([4, 8, 12])
        self._rows = self._random.choice([3, 16])
        self._layers = [self._random.choice(_LAYERS) for _ in range(self._random.randint(2, 6))]
        self._on_side = [self._random.random() < 0.25 for _ in self._layers]
        self._steps = [self._random.choice(_STEPS) for _ in range(4)]

    def __str__(self) -> str:
        layers = ", ".join(
            layer.__name__ + ("*" if s else "") for layer, s in zip(self._layers, self._on_side, strict=True)
        )
        return f"seed {self._seed}: [{layers}] then [{', '.join(step.__name__ for step in self._steps)}]"

    def run(self, context, side) -> list[object]:
        torch.manual_seed(self._seed)
        shapes = [(self._width, self._width)] * len(self._layers)
        self.weights = [w.requires_grad_() for w in torch.stack([torch.randn(s) for s in shapes]).unbind()]
        self.weights = [w.detach().clone().requires_grad_() for w in self.weights]
        self.batch = torch.randn(self._rows, self._width)
        results: list[object] = []
        for step in self._steps:
            step(self, context, side, results)
            results += [None if w.grad is None else w.grad.clone() for w in self.weights]
            for w in self.weights:
                w.grad = None
        return results

    def forward(self, context, side) -> torch.Tensor:
        with context:
            x = self.batch * 1.5
            for layer, weight, on_side in zip(self._layers, self.weights, self._on_side, strict=True):
                with side() if on_side else contextlib.nullcontext():
                    x = layer(x, weight)
            return x.square().mean()


def _linear(x, w):
    return (x @ w).tanh()


def _qkv(x, w):
    q, k, v = x @ w, x @ w.t(), x @ (w * 2)
    return torch.softmax(q @ k.t(), -1) @ v


def _chunks(x, w):
    a, b, c = (torch.cat([x, x, x], -1) @ torch.block_diag(w, w, w)).chunk(3, -1)
    return a * b.sigmoid() + c.exp().clamp(max=3.0)


def _norm(x, w):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w[0], w[1]) + x


def _dropout(x, w):
    return torch.nn.functional.dropout(x @ w, 0.3).sin()


def _masked(x, w):
    y = x @ w
    mask = y > 0.3
    return torch.where(mask, y.sin(), y) + y.masked_fill(mask, 0.5).cos() * x.masked_fill(mask[:, :1], 0.1)


def _inplace(x, w):
    return (x @ w).relu_().mul(1.1).sigmoid_()


def _column(x, w):
    return x * (x[:, :1].exp() @ w[:1]).tanh()


def _gates(x, w):
    a, b = (x @ torch.cat([w, w.t()], -1)).unsafe_chunk(2, -1)
    a, b = a.sigmoid_(), b.tanh_()
    return a * b + b.cos() * a


def _rows(x, w):
    top, rest = (x @ w).sin().split([1, x.shape[0] - 1])
    return torch.cat([top.cos(), rest.cos()])


def _transposed(x, w):
    return (x.t().exp().clamp(max=4.0).t() @ w).tanh()


def _checkpointed(x, w):
    return checkpoint(_linear, x, w, use_reentrant=False)


def _reentrant(x, w):
    return checkpoint(_linear, x, w, use_reentrant=True)


_LAYERS = [
    _linear, _qkv, _chunks, _norm, _dropout, _masked, _inplace, _column, _gates, _rows, _transposed,
    _checkpointed, _reentrant,
]  # fmt: skip


def _plain(program, context, side, results):
    loss = program.forward(context, side)
    loss.backward()
    results.append(loss.detach())


def _inside(program, context, side, results):
    with context:
        loss = program.forward(context, side)
        loss.backward()
    results.append(loss.detach())


def _accumulate(program, context, side, results):
    for _ in range(2):
        _plain(program, context, side, results)


def _first_in_first_out(program, context, side, results):
    losses = [program.forward(context, side) for _ in range(3)]
    while losses:
        losses.pop(0).backward()


def _last_in_first_out(program, context, side, results):
    losses = [program.forward(context, side) for _ in range(2)]
    while losses:
        losses.pop().backward()


def _retained(program, context, side, results):
    loss = program.forward(context, side)
    loss.backward(retain_graph=True)
    loss.backward()
    results.append(loss.detach())


def _dropped(program, context, side, results):
    program.forward(context, side)
    _plain(program, context, side, results)


def _partial(program, context, side, results):
    if _reentrant in program._layers:  # refuses partial gradients
        return
    loss = program.forward(context, side)
    results += torch.autograd.grad(loss, program.weights[-1:])


def _on_side_stream(program, context, side, results):
    loss = program.forward(context, side)
    with side():
        loss.backward()
    results.append(loss.detach())


def _older_graph_on_side_stream(program, context, side, results):
    """The side stream has waited for the older graph's forward, and for nothing later."""
    with context:
        older = (program.batch @ program.weights[0]).sin().exp().sum()
    point = side.point()
    newer = program.forward(context, side)
    with side(after=point):
        older.backward()
        with side(after=point):  # reuses the room of the parcel just read
            third = program.forward(context, side)
    newer.backward()
    third.backward()
    results.append(older.detach())


def _read_aside(program, context, side, results):
    """A side stream saves what the main stream has made, and another one goes on without waiting for it."""
    with context, side.watched():
        x = (program.batch @ program.weights[0]).sin()
        away = x.exp()
        here = away.exp()
        new, other, gathered, packed = x + 1.0, x + 2.0, x + 3.0, x > 0.3
    point = side.point()
    with side():
        with context, side.watched():
            read = (away * here).masked_fill(packed, 1.0).sum() + (gathered[:, 1] * gathered[:, 2]).sum()
            read = read + (new * other).sum()  # last: nothing behind makes the main stream wait for its kernel
        del x, away, here, new, other, gathered, packed
        with side(after=point):
            loss = program.forward(context, side)
    read.backward()
    loss.backward()
    results += [read.detach(), loss.detach()]


def _two_versions(program, context, side, results):
    """One storage saved before and after an in-place change; only the later graph runs backward."""
    with context:
        x = (program.batch @ program.weights[0]).sin()
        unused = x.cos()
        pushes = program.forward(contextlib.nullcontext(), side)
        x.add_(1.0)
        loss = x.cos().sum()
    loss.backward()
    results += [unused.detach(), pushes.detach()]


def _explodes_in_forward(program, context, side, results):
    try:
        with context:
            kept = program.forward(contextlib.nullcontext(), side).exp()
            raise Boom
    except Boom:
        results.append("Boom")
    del kept


def _explodes_in_backward(program, context, side, results):
    with context:
        loss = Explode.apply(program.forward(contextlib.nullcontext(), side)).exp()
    try:
        loss.backward()
    except Boom:
        results.append("Boom")


def _modified(program, context, side, results):
    with context:
        x = (program.batch @ program.weights[0]).sin()
        y = x.exp()  # saves the result
        z = y * x
        x.add_(1.0)  # `y * x` saved x
        loss = z.sum()
    try:
        loss.backward()
    except RuntimeError:
        results.append("modified")


def _modified_late(program, context, side, results):
    with context:
        x = (program.batch @ program.weights[0]).sin()
        loss = (x * x.cos()).exp().sum()
    x.mul_(2.0)
    try:
        loss.backward()
    except RuntimeError:
        results.append("modified")


_STEPS = [
    _plain, _plain, _inside, _accumulate, _first_in_first_out, _last_in_first_out, _retained, _dropped, _partial,
    _on_side_stream, _older_graph_on_side_stream, _read_aside, _two_versions,
    _explodes_in_forward, _explodes_in_backward, _modified, _modified_late,
]  # fmt: skip


class OneStream:
    """The plain twin has no streams to choose from."""

    def __call__(self, after=None):
        return contextlib.nullcontext()

    def point(self):
        return None

    def watched(self):
        return contextlib.nullcontext()


class SideStreams:
    """Two more compute streams of the simulator, in turn."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._names = itertools.cycle(["left", "right"])

    def __call__(self, after=None):
        return self._device.compute_on(next(self._names), after)

    def point(self):
        return self._device.record(self._device.current_stream())

    def watched(self):
        return _Watched(self._device)


class _Watched(OperatorMode):
    """The simulator sees what operators inside read and make, behind the hooks of saved inputs."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._touch((args, kwargs))
        out = func(*args, **kwargs)
        self._touch(out)
        return out

    def _touch(self, values):
        for t in tree_leaves(values):
            if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes():
                self._device.touch(t)


def explore(seed: int) -> str | None:
    """Run program `seed` on the simulator and compare with its plain twin. None, or what went wrong."""
    program = Program(seed)
    plain = program.run(contextlib.nullcontext(), OneStream())
    choose = random.Random(~seed)
    device = SimDevice(seed, choose.choice(["late", "early", "shuffled"]))
    window, prefetch = choose.choice([1, 200, 1000, 10**6]), choose.choice([1, 500, 3000, 10**6])
    min_bytes = choose.choice([1, 1, 1, 250])
    rig = Rig(device, lambda own: HostStore(own, 2**24, smallest_slab_bytes=2**14), window, prefetch, min_bytes)
    ours = program.run(rig.context, SideStreams(device))
    device.finish()
    if device.faults:
        return f"{program}: {device.faults[0]} ({len(device.faults)} faults)"
    if found := difference(ours, plain):
        return f"{program}: {found}"
    rig.check_at_rest()
    return None


def explore_captured(seed: int) -> str | None:
    """Run program `seed` eagerly, then in a captured graph, then eagerly again, on a simulator that refuses what CUDA
    refuses. None, or what went wrong."""
    program = Program(seed)
    plain = program.run(contextlib.nullcontext(), OneStream())
    choose = random.Random(~seed)
    device = CapturingSim(seed, choose.choice(["late", "early", "shuffled"]))
    window, prefetch = choose.choice([1, 200, 1000, 10**6]), choose.choice([1, 500, 3000, 10**6])
    rig = Rig(device, lambda own: HostStore(own, 2**24, smallest_slab_bytes=2**14), window, prefetch)
    rounds = [program.run(rig.context, SideStreams(device))]
    older = program.forward(rig.context, SideStreams(device))
    with device.capture():
        del older
        rounds.append(program.run(rig.context, SideStreams(device)))
        left = program.forward(rig.context, SideStreams(device))
        left.backward(retain_graph=True)
    rounds.append(program.run(rig.context, SideStreams(device)))
    del left
    device.finish()
    if device.faults:
        return f"{program}: {device.faults[0]} ({len(device.faults)} faults)"
    for which, ours in enumerate(rounds):
        if found := difference(ours, plain):
            return f"{program}: round {which}: {found}"
    rig.check_at_rest()
    return None


def difference(ours: list[object], plain: list[object]) -> str | None:
    if len(ours) != len(plain):
        return f"{len(ours)} results, {len(plain)} in the plain run"
    for at, (mine, twin) in enumerate(zip(ours, plain, strict=True)):
        is_same = bits(mine) == bits(twin) if _both_tensors(mine, twin) else type(mine) is type(twin) and mine == twin
        if not is_same:
            return f"result {at} differs from the plain run"
    return None


def _both_tensors(mine: object, twin: object) -> bool:
    return isinstance(mine, torch.Tensor) and isinstance(twin, torch.Tensor)
