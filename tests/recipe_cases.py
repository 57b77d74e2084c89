"""Models with recomputed regions, and ways to train them: the results equal the plain run's, bit for bit.

A case takes `apply`, which puts recipes on a new model, and the device, and returns tensors: losses, gradients,
buffers, the state of random number generators. tests/recompute runs the cases on the CPU and on the simulator,
tests/gpu/test_gpu.py on an accelerator. Every model has three repeated blocks, `layers`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from cases import Data, Explode, Transformer, gradients, make, tokens
from support import Boom
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ebbtide import Recipe

Apply: TypeAlias = Callable[[nn.Module], object]
Case: TypeAlias = Callable[[Apply, torch.device], list[torch.Tensor]]

WIDTH = 8
ROWS = 6


def every_op(op, *args, **kwargs):
    return True


def every_second_random_op(op, *args, **kwargs):
    """Chooses some operators with random numbers: the rest are recomputed."""
    return "rand" in str(op) or ("dropout" in str(op) and args[1] < 0.4)


EVERY = Recipe("selective", ops=(every_op,))
RECIPES: dict[str, Any] = {
    "recompute": "recompute",
    "recompute, inputs kept": Recipe("recompute", inputs="keep"),
    "selective": Recipe("selective", ops=("attention", "matmul", "convolution")),
    "selective, kept": Recipe("selective", inputs="keep", outputs="keep", ops=("matmul", "attention", "convolution")),
    "every operator": EVERY,
    "every operator, kept": Recipe("selective", outputs="keep", ops=(every_op,)),
    "every second random operator": Recipe("selective", ops=("matmul", every_second_random_op)),
    "mixture": {"layers.*": "selective", "layers.0": "recompute", "layers.1": EVERY},
    "pruned": Recipe("selective", sites=tuple(range(99)), prune=tuple(range(99))),
    "partly pruned": Recipe("selective", sites=tuple(range(99)), prune=(0, 2, 5), ops=(every_op,)),
    "some kept": {"layers.0": Recipe("selective", sites=(1, 2), ops=(every_op,)), "layers.2": "keep"},
}


class Stack(nn.Module):
    """Three blocks in a row."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def observed(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """State after a step besides the loss: gradients, buffers, random number generators."""
    return [
        *(grad.clone() for grad in gradients(model)),
        *(buffer.clone() for buffer in model.buffers()),
        torch.get_rng_state(),
        *([] if device.type == "cpu" else [torch.get_device_module(device.type).get_rng_state(device)]),
    ]


def train(
    model: nn.Module,
    batch: Callable[[Data], Any],
    device: torch.device,
    steps: int = 3,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> list[torch.Tensor]:
    """Some steps with SGD; `around` makes the context of each forward."""
    torch.manual_seed(3)
    data = Data(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results: list[torch.Tensor] = []
    for _ in range(steps):
        with around():
            loss = model(batch(data))
        loss.backward()
        results += [loss.detach(), *observed(model, device)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(p.detach().clone() for p in model.parameters())]


def rows(data: Data) -> torch.Tensor:
    return data.tensor(ROWS, WIDTH)


def images(data: Data) -> torch.Tensor:
    return data.tensor(2, 4, 5, 5)


def of(block: Callable[[], nn.Module], batch: Callable[[Data], torch.Tensor] = rows, **settings: Any) -> Case:
    """The case of three blocks."""

    def case(apply: Apply, device: torch.device) -> list[torch.Tensor]:
        model = make(lambda: Stack(block), device)
        apply(model)
        return train(model, batch, device, **settings)

    case.__name__ = getattr(block, "__name__", repr(block))
    return case


class Simple(nn.Module):
    """Two weights; subclasses write `forward`."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)


# -- random numbers ----------------------------------------------------------------------------------------------------


class Dropouts(Simple):
    def forward(self, x):
        y = functional.dropout(self.first(x), 0.5, self.training).sin()
        return functional.dropout(self.second(y).tanh(), 0.25, self.training) + x


class AttentionWithDropout(Simple):
    def forward(self, x):
        q = self.first(x).view(1, ROWS, 2, -1).transpose(1, 2)
        k = self.second(x).view(1, ROWS, 2, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, q * k, dropout_p=0.3)
        return functional.dropout(mixed.transpose(1, 2).reshape(ROWS, WIDTH), 0.2).sin() + x


class RandomOperators(Simple):
    """All kinds: from a tensor, from a shape, in place, fused, without randomness."""

    def forward(self, x):
        y = torch.native_dropout(self.first(x), 0.3, True)[0].sin()
        y = y * torch.rand(y.shape, device=x.device) + torch.randn_like(y)
        y = torch.native_dropout(self.second(y), 0.6, True)[0].tanh()
        y = torch.native_dropout(y, 0.0, True)[0] * torch.bernoulli(y.sigmoid().detach())
        y = y * torch.rand(ROWS, 1).to(x.device) + torch.empty_like(y).normal_()
        return y[torch.randperm(ROWS, device=x.device)] + functional.dropout(x, 0.1)


# -- autocast, attention back ends, default devices --------------------------------------------------------------------


class AutocastInside(Simple):
    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.first(x).sin()
            with torch.autocast(x.device.type, enabled=False):
                y = self.second(y.float())
            return (self.second(y) + self.second(y.cos())).float() + x


class CastsOften(Simple):
    """Tensors are cast at each use, a weight only once per autocast context."""

    def forward(self, x):
        y = self.first(x) * self.second(x)
        z = self.second(y.float() * 2.0) + self.first(y.float())
        return (self.first(z.float() + x) * self.second(z.float().sin())).float().tanh() + x


def autocast_outside(apply, device):
    return of(CastsOften, around=lambda: torch.autocast(device.type, torch.bfloat16))(apply, device)


@torch.library.custom_op("ebbtide_tests::pooled_convolution", mutates_args=())
def pooled_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An operator written in Python: autocast ignores the operator and casts the convolution inside."""
    return functional.max_pool2d(functional.conv2d(x, weight, padding=1), 3, 1, 1).to(x.dtype)


def _pooled_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = functional.max_pool2d(functional.conv2d(x, weight, padding=1), 3, 1, 1)
    return torch.autograd.grad(out, (x, weight), grad)


pooled_convolution.register_autograd(
    _pooled_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class CastsInside(nn.Module):
    """Operators that autocast casts, and operators with casts only inside."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.bilinear = nn.Bilinear(5, 5, 5)

    def forward(self, x):
        y = functional.avg_pool2d(self.convolution(x), 3, 1, 1).float()
        y = pooled_convolution(y.sin(), self.convolution.weight) + torch.cdist(y, y.cos())
        with torch.autocast(x.device.type, enabled=False):
            y = y + pooled_convolution(y, self.convolution.weight).sin()
        return self.bilinear(y, y.tanh()).sin() + x


def autocast_inside_operators(apply, device):
    return of(CastsInside, images, around=lambda: torch.autocast(device.type, torch.bfloat16))(apply, device)


def autocast_without_cache(apply, device):
    return of(CastsOften, around=lambda: torch.autocast(device.type, torch.bfloat16, cache_enabled=False))(
        apply, device
    )


def autocast_around_the_step(apply, device):
    """Backward runs inside autocast too, and inside a disabled autocast."""
    model = make(lambda: Stack(CastsOften), device)
    apply(model)
    results = []
    for _ in range(3):
        with torch.autocast(device.type, torch.bfloat16):
            model(rows(Data(device))).backward()
        loss = model(rows(Data(device)))
        with torch.autocast(device.type, torch.bfloat16):
            loss.backward()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(rows(Data(device)))
            with torch.autocast(device.type, enabled=False):
                loss.backward()
        results += [loss.detach(), *observed(model, device)]
    return results


def shared_block_under_autocast(apply, device):
    """The second call finds cached casts of the weights."""

    class Shared(Stack):
        def forward(self, x):
            return super().forward(self.layers[1](self.layers[0](x)) * x)

    model = make(lambda: Shared(CastsOften), device)
    apply(model)
    results = []
    for _ in range(3):
        with torch.autocast(device.type, torch.bfloat16):
            x = rows(Data(device))
            loss = model(x) + model(x.sin())
        loss.backward()
        results += [loss.detach(), *observed(model, device)]
    return results


class Attention(Simple):
    def forward(self, x):
        q = self.first(x).view(1, ROWS, 2, -1).transpose(1, 2)
        k = self.second(x).view(1, ROWS, 2, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, (q * k).sin())
        return mixed.transpose(1, 2).reshape(ROWS, WIDTH).tanh() + x


def plain_attention_around_forward(apply, device):
    return of(Attention, around=lambda: sdpa_kernel(SDPBackend.MATH))(apply, device)


def attention_order_around_forward(apply, device):
    order = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    return of(Attention, around=lambda: sdpa_kernel(order, set_priority=True))(apply, device)


class MakesTensors(Simple):
    def forward(self, x):
        y = self.first(x) * torch.arange(WIDTH, dtype=x.dtype) + torch.ones(WIDTH)
        return self.second(y.sin()) * torch.full((ROWS, 1), 0.5) + x


def default_device_around_forward(apply, device):
    return of(MakesTensors, around=lambda: torch.device(device))(apply, device)


def default_device_around_the_step(apply, device):
    model = make(lambda: Stack(MakesTensors), device)
    apply(model)
    results = []
    for _ in range(3):
        with torch.device(device):
            loss = model(rows(Data(device)))
            loss.backward()
        assert torch.get_default_device() == torch.device("cpu")
        results += [loss.detach(), *observed(model, device)]
    return results


# -- in place ----------------------------------------------------------------------------------------------------------


class InPlace(Simple):
    """Products changed in place, directly or through a view, by self-inverse and other operators."""

    def forward(self, x):
        y = self.first(x).relu_()
        y = self.second(y).add_(0.5).mul_(x)
        # For autograd, matmul of three dimensions returns no view.
        z = (y.unsqueeze(0) @ self.second.weight).add_(1.0).mul_(1.5)
        z = functional.silu(z, inplace=True).squeeze(0)
        z[1:3].mul_(2.0)
        return functional.linear(z.view(2, 3, WIDTH), self.first.weight).mul_(0.5).reshape(ROWS, WIDTH).sin() + x


class ChunksInPlace(Simple):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        a, b = torch.unsafe_chunk(self.second(x), 2, -1)
        y = torch.cat([a.sigmoid_(), b.tanh_()], -1)
        hidden, cell = self.cell(y, (x.sin(), y))
        a, b = torch.unsafe_split(self.second(hidden), 3)
        return torch.cat([a.add_(1.0), b.mul_(2.0)]).sin() * cell


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 1, bias=False)

    def forward(self, x):
        y = self.second(self.first(x).relu_()).add_(1.0)
        return (y.sigmoid() + x).to(memory_format=torch.channels_last)


def changed_after_the_region(apply, device):
    """The residual is added in place to a region's output."""
    model = make(lambda: Residuals(Products), device)
    apply(model)
    return train(model, rows, device)


class Products(Simple):
    def forward(self, x):
        return self.second(self.first(x).sin())


class Residuals(Stack):
    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y * 1.5
        return x.square().mean()


def input_changed_before_and_after(apply, device):
    """The embedding is copied, so the change after the region touches only the copy."""

    class Model(Stack):
        def forward(self, x):
            x = x.clone()
            for layer in self.layers:
                x = x * 2.0
                x.add_(1.0)
                x = layer(x)
                x = x.sin().mul_(3.0)
            return x.square().mean()

    model = make(lambda: Model(Products), device)
    apply(model)
    return train(model, rows, device)


# -- views, several outputs --------------------------------------------------------------------------------------------


class Views(Simple):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.wide(x).chunk(3, -1)
        a, b = (q @ k.t()).split([2, 4])
        mixed = torch.cat([a.sin(), b.cos()]) @ v
        y = self.first(mixed).t().exp().clamp(max=3.0).t() @ self.second.weight.t()
        return y[:, ::2].repeat_interleave(2, -1) * v.unflatten(-1, (2, 4)).transpose(1, 2).flatten(1) + x.expand_as(x)


class SeveralOutputs(Simple):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(self.first(x))
        values, indices = y.topk(4, -1)
        y = y.scatter(-1, indices, values.sin())
        parts = torch.unbind(self.second(y))
        y = torch.stack([part * (n + 1) for n, part in enumerate(parts)])
        z, (hidden, cell) = self.lstm(y.unsqueeze(1))
        w, _ = self.gru(z)
        best, where = w.squeeze(1).max(-1, keepdim=True)
        order = torch.sort(y, -1, descending=True)
        return z.squeeze(1) * best + hidden[0] * cell[0] + order.values.gather(-1, where) + x


class Lists(Simple):
    """Operators that return lists, numbers and several dtypes."""

    def forward(self, x):
        y = self.first(x)
        exps = torch._foreach_exp([y.clamp(max=1.0), x.clamp(max=1.0)])
        scale = float(y.detach().abs().max()) + y.detach().nonzero().shape[0]
        mantissa, exponent = torch.frexp(y.detach())
        return (
            self.second(exps[0] * exps[1]) / scale + mantissa * exponent + torch.linalg.vector_norm(x, dim=-1)[:, None]
        )


class Complex(Simple):
    def forward(self, x):
        z = torch.view_as_complex(self.first(x).view(ROWS, 4, 2))
        z = z * z.conj() * torch.fft.fft(z) + torch.complex(x[:, :4], x[:, 4:]).conj()
        real = torch.cat([z.real, z.imag], -1)
        return self.second(real).tanh() + z.conj().imag.repeat(1, 2) * 0.1


# -- custom functions --------------------------------------------------------------------------------------------------


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        y = x.sin() * scale
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        return grad * x.cos() * ctx.scale + y * 0.1, None


class Doubles(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * 2.0


class WithIndices(torch.autograd.Function):
    """One output without a gradient, and an attribute that is a tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.mask = x > 0
        indices = x.argsort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices, None, x)
        return x.exp().clamp(max=2.0), indices

    @staticmethod
    def backward(ctx, grad, _):
        indices, nothing, x = ctx.saved_tensors
        assert nothing is None
        return grad.gather(-1, indices) * ctx.mask * x


class CustomFunctions(Simple):
    def forward(self, x):
        y = Doubles.apply(ReadsTwice.apply(self.first(x), 1.5) * 1.25)
        z, indices = WithIndices.apply(self.second(y))
        return z.gather(-1, indices) + x


# -- what is passed to a region, and what comes back -------------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclasses.dataclass
class Plain:
    tensor: torch.Tensor
    name: str
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    others: list[Any]


@dataclasses.dataclass(slots=True)
class MutableSlots:
    tensor: torch.Tensor
    number: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    tensor: torch.Tensor
    inner: MutableSlots


class ManyArguments(Simple):
    def forward(self, x, mask, *, pair, table, plain, frozen, slots, function, weight, log, flag=None, words="none"):
        assert flag is None
        assert words == "two"
        y = self.first(x).masked_fill(mask, 0.5) * pair.left + pair.right[0] * table["scale"]
        y = y + plain.tensor * plain.inner.tensor * len(plain.name) + frozen.tensor.sin() * frozen.others[1]["deep"]
        y = y * slots.tensor.cos() * slots.inner.tensor * slots.inner.number + function(y)
        log.append(y.detach().sum())
        return self.second(y * table["scale"] + functional.linear(y, weight)).tanh() + x


class PassesMuch(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layers = nn.ModuleList(ManyArguments() for _ in range(3))

    def forward(self, x):
        log = []
        for layer in self.layers:
            y = x * 1.5
            x = layer(
                x,
                y > 0,
                pair=Pair(y, (x.exp().clamp(max=2.0), None)),
                table={"scale": x.sin(), "unused": 3, "again": y},
                plain=Plain(x, "plain", Plain(y, "inner")),
                frozen=Frozen(y, [None, {"deep": x.cos()}]),
                slots=FrozenSlots(x, MutableSlots(y.sin())),
                function=functools.partial(_weighted, x, scale=y),
                weight=self.embedding,
                log=log,
                words="two",
            )  # fmt: skip
            assert len(log) > 0
        assert len(log) == 3
        return functional.linear(x, self.embedding).square().mean() + torch.stack(log).sum() * 0


def _weighted(x, y, scale):
    return x * y.sigmoid() * scale


def arguments_of_all_kinds(apply, device):
    model = make(PassesMuch, device)
    apply(model)
    return train(model, rows, device)


class ReturnsMuch(Simple):
    def forward(self, x):
        y = self.first(x)
        return {"x": self.second(y.sin()) + x, "pair": Pair(y.cos(), [y.exp().clamp(max=2.0)]), "name": "z", "no": None}


class TakesParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ReturnsMuch() for _ in range(3))

    def forward(self, x):
        total = 0
        for layer in self.layers:
            out = layer(x)
            assert (out["name"], out["no"]) == ("z", None)
            x = out["x"]
            total = total + (out["pair"].left * out["pair"].right[0]).sum()
        return x.square().mean() + total * 0.01


def outputs_of_all_kinds(apply, device):
    model = make(TakesParts, device)
    apply(model)
    return train(model, rows, device)


class Collects(Simple):
    """Returns nothing: the result is appended to a list, an argument or a closure variable."""

    def forward(self, x, into):
        into.append(self.second(self.first(x).sin()).tanh() + x)


class CollectsParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Collects() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            into = []
            assert layer(x, into) is None
            (x,) = into
        return x.square().mean()


def regions_that_return_nothing(apply, device):
    model = make(CollectsParts, device)
    apply(model)
    return train(model, rows, device)


def gradients_one_by_one(apply, device):
    """Gradients of some leaves first, then of all others."""
    model = make(TakesParts, device)
    apply(model)
    results = []
    for step in range(3):
        loss = model(batch(device, step))
        results += torch.autograd.grad(loss, [model.layers[0].first.weight], retain_graph=True)
        results += torch.autograd.grad(loss, list(model.layers[1].parameters()), retain_graph=True)
        loss.backward()
        results += observed(model, device)
    return results


class Halves(nn.Module):
    """The model returns two losses that share regions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ReturnsMuch() for _ in range(3))

    def forward(self, x):
        one = other = 0
        for layer in self.layers:
            out = layer(x)
            x = out["x"]
            one = one + x.square().mean()
            other = other + (out["pair"].left.sin() * out["pair"].right[0]).sum()
        return one, other


def two_losses_of_the_same_regions(apply, device):
    model = make(Halves, device)
    apply(model)
    results = []
    for step in range(4):
        one, other = model(rows(Data(device, step)))
        for loss, retain in [(one, True), (other, False)][:: 1 if step % 2 else -1]:
            loss.backward(retain_graph=retain or loss is other)
        results += observed(model, device)
    return results


# -- buffers -----------------------------------------------------------------------------------------------------------


class BatchNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.other = nn.BatchNorm2d(4, momentum=None)
        self.instance = nn.InstanceNorm2d(4, track_running_stats=True)

    def forward(self, x):
        return self.instance(self.other(functional.relu(self.norm(self.conv(x)), inplace=True))) + x


class OwnNorm(nn.Module):
    """Functional normalisation: the kernel counts no versions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return functional.batch_norm(self.conv(x), self.mean, self.var, training=self.training).sin() + x


class Averages(Simple):
    """Buffers changed in place, changed through .data, replaced, and created at the first use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("hidden", torch.ones(WIDTH))
        self.register_buffer("anew", torch.zeros(()))
        self.register_buffer("late", None)
        self.register_buffer("steady", torch.linspace(0.5, 1.0, WIDTH))

    def forward(self, x):
        y = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.hidden.data.mul_(0.9).add_(y.square().mean(0))
            self.anew = self.anew + 1
            self.late = y.mean(0) if self.late is None else self.late * 0.5 + y.mean(0)
        # A clone: no version shows a change through .data, so a second forward would silently change a saved tensor.
        y = (y - self.mean) / self.hidden.clone() * self.anew * self.steady
        return self.second(y * self.late).tanh() + x


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.second(self.first(x).sin()).tanh() + x


def normalisation_in_both_modes(apply, device):
    """First evaluated, without changes; then trained."""
    results = []
    for block in (BatchNorms, OwnNorm):
        model = make(lambda block=block: Stack(block), device)
        apply(model)
        for step in range(6):
            model.train(step in (2, 3, 5))
            loss = model(images(Data(device, step)))
            loss.backward()
            results += [loss.detach(), *observed(model, device)]
    return results


# -- gradients inside, and a user's checkpoints ------------------------------------------------------------------------


class GradientInside(Simple):
    """Uses the gradient of an energy, as models of forces do."""

    def forward(self, x):
        y = self.first(x).sin()
        with torch.enable_grad():
            point = y.detach().requires_grad_()
            energy = (self.second(point).tanh() * point).exp().clamp(max=4.0).sum()
            (force,) = torch.autograd.grad(energy, point, create_graph=self.training)
        (of_all,) = torch.autograd.grad((y * y.cos()).sum(), y, create_graph=True)
        return self.first(force * y + of_all) @ self.second.weight + functional.dropout(x, 0.2)


class ChecksPoints(Simple):
    reentrant = False

    def forward(self, x):
        y = checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)
        return checkpoint(self.part, y, use_reentrant=self.reentrant) + x

    def part(self, y):
        return functional.dropout(self.second(y.sin()).exp().clamp(max=2.0), 0.2)


class ChecksPointsReentrantly(ChecksPoints):
    reentrant = True


class CatchesAll(Simple):
    """Suppresses every exception; a failing product does not count."""

    def forward(self, x):
        y = x
        for op in (self.first, self.fails, torch.sin, self.second, torch.tanh, self.fails, self.second, torch.exp):
            try:
                y = op(y)
            except Exception:  # noqa: PERF203
                y = y * 1.25
        return y.clamp(max=3.0) + self.first(x)

    def fails(self, y):
        return y @ torch.ones(3, 3, device=y.device)


# -- when backward runs ------------------------------------------------------------------------------------------------


class Mixed(Simple):
    """A mixture of all features."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.num_batches_tracked = None  # as in earlier releases of torch: only bytes show changed statistics
        self.attention = Attention()

    def forward(self, x):
        y = functional.dropout(self.first(self.norm(x)).relu_(), 0.2)
        return self.attention(self.second(y).sin()) * y + x


def mixed(apply, device):
    model = make(lambda: Stack(Mixed), device)
    apply(model)
    torch.manual_seed(5)
    return model


def batch(device, step=0):
    return rows(Data(device, step))


def seeded_step(model, number=0):
    """Loss and observed values of one step on the CPU, with a fixed seed."""
    torch.manual_seed(number)
    device = torch.device("cpu")
    loss = model(batch(device, number))
    loss.backward()
    return [loss.detach(), *observed(model, device)]


def accumulation(apply, device):
    model = mixed(apply, device)
    results = []
    for step in range(4):
        loss = model(batch(device, step))
        loss.backward()
        results.append(loss.detach())
    return [*results, *observed(model, device)]


def retained(apply, device):
    model = mixed(apply, device)
    results = []
    for step in range(3):
        loss = model(batch(device, step))
        for _ in range(step):
            loss.backward(retain_graph=True)
        loss.backward()
        results += observed(model, device)
    return results


def first_in_first_out(apply, device):
    return _in_order(apply, device, 0)


def last_in_first_out(apply, device):
    return _in_order(apply, device, -1)


def _in_order(apply, device, which):
    model = mixed(apply, device)
    results = []
    for step in range(3):
        losses = [model(batch(device, 3 * step + n)) for n in range(3)]
        while losses:
            losses.pop(which).backward()
        results += observed(model, device)
    return results


def gradient_penalty(apply, device):
    model = make(lambda: Stack(Dropouts), device)
    apply(model)
    torch.manual_seed(5)
    results = []
    for step in range(3):
        x = batch(device, step).requires_grad_()
        loss = model(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        results += [grad.detach(), x.grad, *observed(model, device)]
    return results


def only_some_gradients(apply, device):
    model = mixed(apply, device)
    results = []
    for step in range(3):
        x = batch(device, step).requires_grad_()
        loss = model(x)
        results += torch.autograd.grad(loss, list(model.layers[2].parameters()), retain_graph=True)
        results += torch.autograd.grad(loss, [x, *model.layers[0].parameters()], retain_graph=step == 1)
        if step == 1:
            loss.backward()
        results += observed(model, device)
    return results


def abandoned(apply, device):
    model = mixed(apply, device)
    results = []
    for step in range(3):
        model(batch(device, 10 + step))
        model(batch(device, step)).backward()
        results += observed(model, device)
    return results


def exceptions(apply, device):
    """Errors in a region's forward, after the forward, and in backward between two regions; the next step is normal."""
    model = mixed(apply, device)
    results = []
    for step in range(3):
        for place in range(3):
            hook = model.layers[1].attention.register_forward_hook(_raise) if place == 0 else None
            hook = model.layers[1].register_forward_pre_hook(_explode_later) if place == 1 else hook
            hook = model.layers[2].register_forward_hook(_raise) if place == 2 else hook
            with contextlib.suppress(Boom):
                model(batch(device, step)).backward()
            hook.remove()
            model.zero_grad()
        loss = model(batch(device, step))
        loss.backward()
        results += [loss.detach(), *observed(model, device)]
    return results


def _raise(*_):
    raise Boom


def _explode_later(module, args):
    return Explode.apply(*args)


def evaluation_between(apply, device):
    model = mixed(apply, device)
    results = []
    for step in range(3):
        loss = model(batch(device, step))
        with torch.no_grad():
            results.append(model.eval()(batch(device, 20 + step)))
        with torch.inference_mode():
            results.append(model(batch(device, 30 + step)).clone())
        model(batch(device, 40 + step)).backward()
        model.train()
        loss.backward()
        results += observed(model, device)
    return [torch.empty_like(r).copy_(r) for r in results]


def adversaries(apply, device):
    maker, judge = make(lambda: Stack(Dropouts), device, 1), make(lambda: Judge(), device, 2)
    apply(maker.requires_grad_(True))
    apply(judge)
    torch.manual_seed(1)
    results = []
    for step in range(3):
        x = batch(device, step)
        real, fake = judge(x), judge(x + maker(x))
        (fake - real).backward(retain_graph=step == 1)
        judge.zero_grad()
        judge.requires_grad_(False)
        judge(x + maker(x)).backward()
        judge.requires_grad_(True)
        results += [real.detach(), fake.detach(), *observed(judge, device), *observed(maker, device)]
    return results


class Judge(Stack):
    def __init__(self):
        super().__init__(Products)

    def forward(self, x):
        return super().forward(x.sin())


def two_models_in_turns(apply, device):
    one, other = mixed(apply, device), make(lambda: Stack(Views), device, 2)
    apply(other)
    results = []
    for step in range(3):
        first = one(batch(device, step))
        second = other(batch(device, step))
        first.backward()
        third = one(batch(device, step + 3))
        (second + third).backward()
        results += [*observed(one, device), *observed(other, device)]
    return results


def one_block_for_all(apply, device):
    """Shared weights: each block is called several times in a forward, and the model twice."""

    class Shared(Stack):
        def forward(self, x):
            for layer in [*self.layers, self.layers[0], self.layers[0], self.layers[2]]:
                x = layer(x)
            return x.square().mean()

    model = make(lambda: Shared(Mixed), device)
    apply(model)
    torch.manual_seed(5)
    results = []
    for step in range(3):
        loss = model(batch(device, step)) + model(batch(device, step + 7))
        loss.backward()
        results += [loss.detach(), *observed(model, device)]
    return results


def hooks_of_users(apply, device):
    """Hooks on modules and tensors: values and number of calls."""
    model = mixed(apply, device)
    seen: list[torch.Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
        layer.register_full_backward_hook(lambda m, gi, go: seen.extend(g.clone() for g in (*gi, *go) if g is not None))
        layer.attention.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
        layer.register_forward_pre_hook(lambda m, args: args[0].register_hook(seen.append) and None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    results = []
    for step in range(3):
        loss = model(batch(device, step).requires_grad_())
        loss.register_hook(seen.append)
        loss.backward()
        results += [*seen, *observed(model, device)]
        seen.clear()
    return results


def optimizer_in_backward(apply, device):
    """The optimizer changes each weight as soon as the gradient is complete."""
    model = mixed(apply, device)

    @torch.no_grad()
    def update(parameter):
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    results = []
    for step in range(3):
        loss = model(batch(device, step))
        loss.backward()
        results += [loss.detach(), *(p.detach().clone() for p in model.parameters())]
    return results


def transformer(apply, device):
    model = make(Transformer, device)
    model.head.weight = model.embedding.weight
    apply(model)
    results = []
    for step in range(3):
        loss = model(tokens(device, step))
        loss.backward()
        results += [loss.detach(), *observed(model, device)]
    return results


def attention_read_twice(apply, device):
    """`grad_fn._saved_...` outside of backward, before and after."""
    model = make(lambda: Stack(Products), device)
    apply(model)
    results = []
    outputs = []
    model.layers[1].register_forward_hook(lambda m, args, out: outputs.append(out.grad_fn))
    for step in range(3):
        loss = model(batch(device, step))
        node = outputs.pop()
        results += [node._saved_self.clone(), node._saved_self.clone()]
        loss.backward(retain_graph=True)
        results += [node._saved_self.clone()]
        loss.backward()
        results += observed(model, device)
    return results


CASES: list[Case] = [
    of(Dropouts), of(AttentionWithDropout), of(RandomOperators),
    of(AutocastInside), autocast_outside, autocast_inside_operators, autocast_without_cache,
    autocast_around_the_step, shared_block_under_autocast, plain_attention_around_forward,
    attention_order_around_forward, default_device_around_forward, default_device_around_the_step,
    of(InPlace), of(ChunksInPlace), of(Convolutions, images), changed_after_the_region, input_changed_before_and_after,
    of(Views), of(SeveralOutputs), of(Lists), of(Complex), of(CustomFunctions),
    arguments_of_all_kinds, outputs_of_all_kinds, regions_that_return_nothing, gradients_one_by_one,
    two_losses_of_the_same_regions,
    of(BatchNorms, images), of(OwnNorm, images), of(Averages), of(Spectral), normalisation_in_both_modes,
    of(GradientInside), of(ChecksPoints), of(ChecksPointsReentrantly), of(CatchesAll),
    of(Mixed), accumulation, retained, first_in_first_out, last_in_first_out, gradient_penalty, only_some_gradients,
    abandoned, exceptions, evaluation_between, adversaries, two_models_in_turns, one_block_for_all, hooks_of_users,
    optimizer_in_backward, transformer, attention_read_twice,
]  # fmt: skip
