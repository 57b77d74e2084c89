"""Training programs of users, one function each, for any device: results equal the plain run, bit for bit.

A case takes a context (to be entered any number of times) and a device, and returns tensors:
losses, gradients, observed tensors. tests/engine/test_cases.py runs them on the CPU and on the simulator,
tests/gpu/test_gpu.py on an accelerator.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from support import Boom, Explode
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Context: TypeAlias = contextlib.AbstractContextManager[Any]
Case: TypeAlias = Callable[[Context, torch.device], list[torch.Tensor]]


class Data:
    """Equal numbers for equal calls, on any device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device="cpu").to(self._device)

    def leaf(self, *shape: int) -> torch.Tensor:
        return self.tensor(*shape).requires_grad_()


class SaveAll(torch.autograd.Function):
    """Saves any tensors; appends the unpacked tensors to `seen`, and passes gradients through."""

    @staticmethod
    def forward(ctx, x, seen, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.extend(ctx.saved_tensors)
        return grad, None, *(None for _ in ctx.saved_tensors)


class Block(nn.Module):
    """Attention and a feed-forward part, written plainly."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def make(kind: Callable[[], nn.Module], device: torch.device, seed: int = 0) -> nn.Module:
    """A module with equal weights on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind().to(device)


def tokens(device: torch.device, step: int = 0, rows: int = 2, length: int = 8, vocabulary: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(vocabulary, (rows, length), generator=generator).to(device)


def gradients(*owners: nn.Module | torch.Tensor) -> list[torch.Tensor]:
    leaves = [p for owner in owners for p in (owner.parameters() if isinstance(owner, nn.Module) else [owner])]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def finish(loss: torch.Tensor, *owners: nn.Module | torch.Tensor) -> list[torch.Tensor]:
    loss.backward()
    return [loss.detach(), *gradients(*owners)]


# -- what is saved -----------------------------------------------------------------------------------------------------


def one_input_of_three(context, device):
    data = Data(device)
    batch, *weights = data.leaf(6, 8), data.leaf(8, 8), data.leaf(8, 8), data.leaf(8, 8)
    with context:
        x = batch + 1.0
        q, k, v = (x @ w for w in weights)
        del x
        loss = (q + k + v).exp().sum()
    return finish(loss, batch, *weights)


def chunked_qkv(context, device):
    data = Data(device)
    batch, weight = data.leaf(6, 8), data.leaf(8, 24)
    with context:
        q, k, v = (batch @ weight).chunk(3, -1)
        loss = (q * k.t().t() * v + q).exp().sum()
        del q, k, v
    return finish(loss, batch, weight)


def expanded(context, device):
    data = Data(device)
    bias, weight = data.leaf(8), data.leaf(5, 8)
    with context:
        wide = bias.sin().expand(5, 8)
        loss = (wide * weight.exp()).sin().sum()
        del wide
    return finish(loss, bias, weight)


def column_of_a_wide_matrix(context, device):
    """A view with gaps, and an expanded view: saved without the bytes between."""
    data = Data(device)
    x = data.leaf(16, 512)
    with context:
        column = (x * 2.0)[:, :1]
        wide = (x * 3.0)[:, 1:2].expand(-1, 4)
        loss = (column.exp() * column * wide * wide.sin()).exp().clamp(max=9.0).sum()
        del column, wide
    return finish(loss, x)


def transposed(context, device):
    data = Data(device)
    x, w = data.leaf(7, 8), data.leaf(7, 9)
    with context:
        loss = (x.sin().t() @ w.cos()).t().exp().sum()
    return finish(loss, x, w)


def channels_last(context, device):
    conv = make(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), device)
    conv = conv.to(memory_format=torch.channels_last)
    images = Data(device).tensor(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    with context:
        loss = conv(images * 1.5).square().mean()
    return finish(loss, conv)


def offset_views(context, device):
    data = Data(device)
    x = data.leaf(4100)
    with context:
        rows = (x * 1.5)[1:4097].view(8, 512)
        loss = (rows[1:7].sin() * rows[:6] + rows[2:8, 3:].sum()).exp().clamp(max=3.0).sum()
        del rows
    return finish(loss, x)


def complex_numbers(context, device):
    data = Data(device)
    x = data.leaf(4, 8, 2)
    with context:
        z = torch.view_as_complex(x * 2.0)
        loss = (z.conj() * z * z.conj().imag * torch.fft.fft(z)).abs().sin().sum()
        del z
    return finish(loss, x)


def dropout(context, device):
    data = Data(device)
    x, w = data.leaf(6, 8), data.leaf(8, 8)
    torch.manual_seed(3)
    with context:
        loss = functional.dropout(functional.dropout(x @ w, 0.5).sin() @ w, 0.25).square().sum()
    return finish(loss, x, w)


def masks(context, device):
    """Dropout written by hand, causal attention, and masks used more than once, in parts, broadcast and transposed."""
    data = Data(device)
    x, w = data.leaf(12, 8), data.leaf(8, 8)
    with context:
        kept = data.tensor(12, 8) > -0.5
        y = torch.where(kept, x @ w, 0.0) / 0.7
        causal = torch.ones(12, 12, dtype=torch.bool, device=device).tril()
        mixed = torch.softmax((y @ y.t()).masked_fill(~causal, float("-inf")), -1) @ y
        mixed = mixed.masked_fill(kept, 0.5).sin() + mixed.t().masked_fill(kept.t(), 0.25).t().cos()
        first = mixed.masked_fill(kept[:1], 2.0).exp().clamp(max=9.0) * mixed.masked_fill(kept[:, 3:4], 1.5)
        top = torch.where(kept[5:], first[5:], first[:7].sin())
        loss = (mixed * first).exp().sin().sum() + top.square().sum()
        del kept, causal
    return finish(loss, x, w)


def in_place_operations(context, device):
    data = Data(device)
    x, w = data.leaf(6, 8), data.leaf(8, 8)
    with context:
        loss = ((x @ w).relu_().mul(1.1).sigmoid_() @ w).tanh_().sum()
    return finish(loss, x, w)


def parts_changed_apart(context, device):
    """Each part has a version counter, over shared memory: gates of recurrent cells."""
    data = Data(device)
    x, w = data.leaf(6, 8), data.leaf(8, 16)
    with context:
        a, b, c, d = torch.unsafe_chunk(x @ w, 4, -1)
        loss = (a.sigmoid_() * b.tanh_() + c.sigmoid_() * d.mul_(0.5).exp_()).sin().sum()
        del a, b, c, d
    return finish(loss, x, w)


def batch_norm(context, device):
    net = make(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 1)), device)
    with context:
        loss = net(Data(device).tensor(3, 2, 6, 6)).square().mean()
    return [*finish(loss, net), *(buffer.clone() for buffer in net.buffers())]


def weights_and_transposes(context, device):
    data = Data(device)
    x, w = data.leaf(6, 8), nn.Parameter(data.tensor(8, 8))
    with context:
        loss = (((x @ w).sin() @ w.t()).cos() @ w.detach()).square().sum()
    return finish(loss, x, w)


def tied_weights(context, device):
    model = make(Transformer, device)
    model.head.weight = model.embedding.weight
    with context:
        loss = model(tokens(device))
    return finish(loss, model)


def bfloat16_autocast(context, device):
    model = make(Transformer, device)
    results = []
    for step in range(2):
        with context, torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens(device, step))
        results += finish(loss, model)
    return [result.clone() for result in results]


def saved_attributes_read_twice(context, device):
    x, w = Data(device).leaf(6, 8), Data(device, 1).leaf(8, 8)
    with context:
        y = (x * 2.0).exp()
        loss = (y @ w).sin().sum()
    node = y.grad_fn
    del y
    first, second = node._saved_result, node._saved_result
    return [first.clone(), second.clone(), *finish(loss, x, w)]


# -- when backward runs ------------------------------------------------------------------------------------------------


def plain_step(context, device):
    model = make(Transformer, device)
    with context:
        loss = model(tokens(device))
    return finish(loss, model)


def backward_inside(context, device):
    model = make(Transformer, device)
    with context:
        return finish(model(tokens(device)), model)


def three_steps(context, device):
    model = make(Transformer, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = []
    for step in range(3):
        with context:
            loss = model(tokens(device, step))
        loss.backward()
        results += [loss.detach(), *(grad.clone() for grad in gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(p.detach().clone() for p in model.parameters())]


def accumulation(context, device):
    model = make(Transformer, device)
    losses = []
    for step in range(3):
        with context:
            loss = model(tokens(device, step)) / 3
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *gradients(model)]


def retained_twice(context, device):
    model = make(Transformer, device)
    with context:
        loss = model(tokens(device))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return finish(loss, model)


def double_backward(context, device):
    data = Data(device)
    x, w = data.leaf(6, 8), data.leaf(8, 8)
    with context:
        loss = (x @ w).tanh().exp().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = first.square().sum()
    return [first.detach(), *finish(penalty, x, w)]


def second_order_outside(context, device):
    data = Data(device)
    x, w = data.leaf(6, 8), data.leaf(8, 8)
    with context:
        loss = ((x @ w).tanh() @ w).exp().sum()
    first = torch.autograd.grad(loss, (x, w), create_graph=True)
    return [*(f.detach() for f in first), *finish(loss + sum(f.square().sum() for f in first), x, w)]


def two_forwards_oldest_first(context, device):
    return _two_forwards(context, device, 0)


def two_forwards_newest_first(context, device):
    return _two_forwards(context, device, -1)


def _two_forwards(context, device, which):
    model = make(Transformer, device)
    losses = []
    for step in range(2):
        with context:
            losses.append(model(tokens(device, step)))
    while losses:
        losses.pop(which).backward()
    return gradients(model)


def dropped_graph(context, device):
    model = make(Transformer, device)
    with context:
        model(tokens(device, 5))
    return plain_step(context, device)


def partial_backward(context, device):
    model = make(Transformer, device)
    with context:
        loss = model(tokens(device))
    head = torch.autograd.grad(loss, model.head.weight, retain_graph=True)
    return [*head, *torch.autograd.grad(loss, list(model.layers[0].parameters()))]


def exception_in_forward(context, device):
    model = make(Transformer, device)
    hook = model.head.register_forward_pre_hook(_raise)
    with contextlib.suppress(Boom), context:
        model(tokens(device, 7))
    hook.remove()
    with context:
        loss = model(tokens(device))
    return finish(loss, model)


def _raise(module, args):
    raise Boom


def exception_in_backward(context, device):
    model = make(Transformer, device)
    with context:
        x = model.layers[0](model.embedding(tokens(device)))
        bad = model.layers[1](Explode.apply(x)).square().sum()
    with contextlib.suppress(Boom):
        bad.backward()
    del x, bad
    model.zero_grad()
    with context:
        loss = model(tokens(device))
    return finish(loss, model)


def no_grad_and_eval_between(context, device):
    model = make(Transformer, device)
    results = []
    for step in range(2):
        with context:
            loss = model(tokens(device, step))
        with context, torch.no_grad():
            results.append(model.eval()(tokens(device, step + 10)))
        with torch.inference_mode():
            results.append(model(tokens(device, step + 20)).clone())
        model.train()
        results.append(loss.detach())
        loss.backward()
    return [*(torch.empty_like(r).copy_(r) for r in results), *gradients(model)]


def nested_doors(context, device):
    model = make(Transformer, device)
    with context:
        x = model.embedding(tokens(device))
        with context:
            x = model.layers[0](x)
        with context, context:
            x = model.layers[1](x)
        loss = model.head(x).square().mean()
    return finish(loss, model)


def two_models(context, device):
    one, other = make(Transformer, device, 1), make(Transformer, device, 2)
    with context:
        first = one(tokens(device, 1))
        second = other(tokens(device, 2))
    first.backward()
    with context:
        third = one(tokens(device, 3))
    (second + third).backward()
    return [first.detach(), second.detach(), third.detach(), *gradients(one, other)]


def adversaries(context, device):
    """Two models in turns, one frozen while the other learns."""
    wide = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Sigmoid())  # noqa: E731
    maker, judge = make(wide, device, 1), make(wide, device, 2)
    noise = Data(device)
    results = []
    for _ in range(2):
        with context:
            fake = maker(noise.tensor(4, 8))
            judged = judge(fake.detach()).mean() - judge(noise.tensor(4, 8)).mean()
        judged.backward()
        results += [grad.clone() for grad in gradients(judge)]
        judge.requires_grad_(False)
        with context:
            fooled = -judge(fake).mean()
        fooled.backward()
        judge.requires_grad_(True)
        results += [fooled.detach(), *(grad.clone() for grad in gradients(maker))]
    return results


# -- the user's own checkpoint -----------------------------------------------------------------------------------------


def checkpoint_inside(context, device):
    return _checkpointed_layers(context, device, use_reentrant=False)


def reentrant_checkpoint_inside(context, device):
    return _checkpointed_layers(context, device, use_reentrant=True)


def checkpoint_of_containers(context, device):
    """Tensors in a tuple, in keywords and bound to the function; random numbers of the device are drawn."""
    model = make(Transformer, device)
    noise = Data(device, 1)
    torch.manual_seed(0)

    def part(pair, *, layer, scale):
        return functional.dropout(layer(pair[0]) * scale + pair[1], 0.2)

    with context:
        x = model.embedding(tokens(device))
        for layer in model.layers:
            bound = functools.partial(part, scale=noise.tensor(16).exp())
            x = checkpoint(bound, (x, x * 0.5), layer=layer, use_reentrant=False)
        loss = model.head(x).exp().mean()
    return finish(loss, model)


def checkpoint_with_outputs_away(context, device):
    """The policy wants random and product ops offloaded: torch alone recomputes them."""
    model = make(Transformer, device)
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
    drawn = {torch.ops.aten.rand_like.default, torch.ops.aten.native_dropout.default}
    torch.manual_seed(0)

    def policy(ctx, op, *args, **kwargs):
        away = op in products or op in drawn
        return CheckpointPolicy.MUST_CPU_OFFLOAD if away else CheckpointPolicy.PREFER_RECOMPUTE

    def part(layer, x):
        x = functional.dropout(layer(x), 0.2)
        return functional.dropout((x + torch.rand_like(x)).sin(), 0.2)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with context:
        x = model.embedding(tokens(device))
        for layer in model.layers:
            x = checkpoint(part, layer, x, use_reentrant=False, context_fn=contexts)
        loss = model.head(x).exp().mean()
    return finish(loss, model)


def _checkpointed_layers(context, device, use_reentrant):
    model = make(Transformer, device)
    with context:
        x = model.embedding(tokens(device))
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        loss = model.head(x).exp().mean()
    return finish(loss, model)


def checkpoint_outside(context, device):
    return _checkpointed_door(context, device, use_reentrant=False)


def reentrant_checkpoint_outside(context, device):
    return _checkpointed_door(context, device, use_reentrant=True)


def _checkpointed_door(context, device, use_reentrant):
    """The context is entered inside of the checkpoint, and around the rest of the model."""
    model = make(Transformer, device)

    def part(x):
        with context:
            return model.layers[1](model.layers[0](x))

    with context:
        x = model.embedding(tokens(device)).sin()
    y = checkpoint(part, x, use_reentrant=use_reentrant)
    with context:
        loss = model.head(model.layers[2](y)).square().mean()
    return finish(loss, model)


CASES: list[Case] = [
    one_input_of_three, chunked_qkv, expanded, column_of_a_wide_matrix, transposed, channels_last, offset_views,
    complex_numbers, dropout, masks, in_place_operations, parts_changed_apart, batch_norm, weights_and_transposes,
    tied_weights, bfloat16_autocast, saved_attributes_read_twice,
    plain_step, backward_inside, three_steps, accumulation, retained_twice, double_backward, second_order_outside,
    two_forwards_oldest_first, two_forwards_newest_first, dropped_graph, partial_backward, exception_in_forward,
    exception_in_backward, no_grad_and_eval_between, nested_doors, two_models, adversaries,
    checkpoint_of_containers, checkpoint_with_outputs_away,
    checkpoint_inside, reentrant_checkpoint_inside, checkpoint_outside, reentrant_checkpoint_outside,
]  # fmt: skip


# -- layouts a save may have -------------------------------------------------------------------------------------------


def _bytes_as(dtype):
    return lambda data: data.tensor(64).view(torch.uint8).clone().view(dtype)[:32].clone()


LAYOUTS: dict[str, Callable[[Data], torch.Tensor]] = {
    "contiguous": lambda data: data.tensor(4, 8),
    "0-d": lambda data: data.tensor(1).sum(),
    "one element": lambda data: data.tensor(1),
    "zero-size": lambda data: data.tensor(4, 8)[:, 3:3],
    "transposed": lambda data: data.tensor(4, 8).t(),
    "permuted": lambda data: data.tensor(2, 3, 4, 5).permute(3, 0, 2, 1),
    "channels_last": lambda data: data.tensor(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels_last 3d": lambda data: data.tensor(2, 3, 4, 5, 2).contiguous(memory_format=torch.channels_last_3d),
    "expanded": lambda data: data.tensor(4, 1).expand(4, 64),
    "expanded scalar": lambda data: data.tensor(1).sum().expand(4, 64),
    "offset": lambda data: data.tensor(1001)[3:997],
    "aligned offset": lambda data: data.tensor(4096)[128:256],
    "unaligned offset": lambda data: data.tensor(4096)[131:259],
    "every second": lambda data: data.tensor(4096)[1::2],
    "every hundredth": lambda data: data.tensor(4096)[7::100],
    "column": lambda data: data.tensor(64, 128)[:, 5],
    "two columns": lambda data: data.tensor(64, 128)[:, 5:7],
    "columns, transposed": lambda data: data.tensor(64, 128)[:, 5:8].t(),
    "column, expanded": lambda data: data.tensor(64, 128)[:, 5:6].expand(64, 3),
    "corners, expanded in front": lambda data: data.tensor(64, 128)[::63, ::127].expand(2, 2, 2),
    "overlapping": lambda data: data.tensor(64).as_strided((10, 4), (2, 1)),
    "overlapping with gaps": lambda data: data.tensor(4096).as_strided((3, 3), (1000, 1000)),
    "unfolded": lambda data: data.tensor(64).unfold(0, 8, 3),
    "diagonal": lambda data: data.tensor(100, 100).diagonal(),
    "float64": lambda data: data.tensor(4, 8).double(),
    "bfloat16": lambda data: data.tensor(4, 8).bfloat16(),
    "half": lambda data: data.tensor(4, 8).half(),
    "bool": lambda data: data.tensor(4, 8) > 0,
    "bool, odd": lambda data: data.tensor(3, 7, 5) > 0,
    "bool, channels_last": lambda data: (data.tensor(2, 3, 4, 5) > 0).contiguous(memory_format=torch.channels_last),
    "bool, transposed": lambda data: (data.tensor(4, 9) > 0).t(),
    "bool, offset": lambda data: (data.tensor(5000) > 0)[1031:2100],
    "bool, expanded": lambda data: (data.tensor(7, 1, 9) > 0).expand(7, 5, 9),
    "bool, expanded scalar": lambda data: (data.tensor(1).sum() > 0).expand(4, 64),
    "bool, overlapping": lambda data: (data.tensor(64) > 0).as_strided((10, 4), (2, 1)),
    "bool, columns": lambda data: (data.tensor(64, 1280) > 0)[:, 700:705],
    "bool, of a part of floats": lambda data: (data.tensor(999) > 0).float().view(torch.uint8).view(torch.bool)[3:77],
    "int64": lambda data: data.tensor(4, 8).mul(9).long(),
    "uint8": lambda data: data.tensor(4, 8).view(torch.uint8),
    "uint16": _bytes_as(torch.uint16),
    "float8_e4m3fn": _bytes_as(torch.float8_e4m3fn),
    "float8_e5m2": _bytes_as(torch.float8_e5m2),
    "NaNs and zeros": lambda data: torch.cat([data.tensor(4) * float("nan"), data.tensor(4) * -0.0]),
    "complex64": lambda data: torch.complex(data.tensor(4, 8), data.tensor(4, 8)),
    "complex128": lambda data: torch.complex(data.tensor(4, 8).double(), data.tensor(4, 8).double()),
    "conj": lambda data: torch.complex(data.tensor(4, 8), data.tensor(4, 8)).conj(),
    "conj, transposed": lambda data: torch.complex(data.tensor(4, 8), data.tensor(4, 8)).conj().t(),
    "conj, column": lambda data: torch.complex(data.tensor(64, 128), data.tensor(64, 128)).conj()[:, 3],
    "neg": lambda data: torch.complex(data.tensor(4, 8), data.tensor(4, 8)).conj().imag,
    "neg, column": lambda data: torch.complex(data.tensor(64, 128), data.tensor(64, 128)).conj().imag[:, 3],
    "conj of neg": lambda data: torch._neg_view(torch.complex(data.tensor(4, 8), data.tensor(4, 8))).conj(),
    "real of complex": lambda data: torch.complex(data.tensor(4, 8), data.tensor(4, 8)).real,
}


def unpacked_layout(context: Context, device: torch.device, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor that backward read for a saved tensor with the layout, and the expected tensor."""
    seen: list[torch.Tensor] = []
    x = Data(device, 1).leaf(8)
    with context:
        y = SaveAll.apply(x, seen, LAYOUTS[layout](Data(device)))
        loss = y.exp().sin().sum()  # pushes y out
        del y
    loss.backward()
    (got,) = seen
    return got, LAYOUTS[layout](Data(device))


# -- changed after the save --------------------------------------------------------------------------------------------


def changed_moved(context, device):
    x = Data(device).leaf(6, 8)
    with context:
        y = x * 2.0
        loss = y.sin().exp().sin().sum()
    y.add_(1.0)
    return loss


def changed_inside(context, device):
    x = Data(device).leaf(6, 8)
    with context:
        y = x * 2.0
        z = y.sin()
        y.add_(1.0)
        return (z.exp() + y).sin().sum()


def changed_through_a_view(context, device):
    x = Data(device).leaf(6, 8)
    with context:
        y = x * 2.0
        loss = y[1:4].sin().exp().sin().sum()
    y[5].zero_()
    return loss


def changed_kept(context, device):
    x, scale = Data(device).leaf(6, 8), Data(device, 1).leaf(6, 8)
    with context:
        loss = (x.sin() * scale).exp().sum()
    with torch.no_grad():
        scale.add_(1.0)
    return loss


CHANGED: list[Callable[[Context, torch.device], torch.Tensor]] = [
    changed_moved,
    changed_inside,
    changed_through_a_view,
    changed_kept,
]
