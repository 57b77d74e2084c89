"""Losses and kernels that overwrite their arguments, as Liger's do: equal results, or the error of torch."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import ebbtide
from ebbtide import ModifiedError, Plan, Recipe, RegionPlan, compat
from ebbtide._recompute import saved_outputs
from ebbtide._utils.storage import checksum_of

MOVES = {"store": "mock", "min_bytes": 1}
ALL = {**MOVES, "mode": "all", "window": "1KiB"}  # a small part of the saved tensors, as in a large model
WIDTH, WORDS, TOKENS = 32, 50, 24


def write(t, value):
    """Write like a custom kernel, without a new version."""
    t.detach().numpy()[...] = value.detach().numpy()


class FusedCrossEntropy(torch.autograd.Function):
    """Writes the gradient over the logits in forward and saves the result; scales in place in backward."""

    @staticmethod
    def forward(ctx, logits, target):
        chances = logits.softmax(-1)
        loss = functional.nll_loss(chances.log(), target)
        write(logits, (chances - functional.one_hot(target, WORDS)) / len(target))
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        write(logits, logits * grad)
        return logits, None


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Computes both gradients in forward, chunk by chunk, and saves nothing else."""

    @staticmethod
    def forward(ctx, x, weight, target):
        grad_x, grad_weight, losses = torch.empty_like(x), torch.zeros_like(weight), []
        for rows in torch.arange(len(x)).chunk(4):
            logits = x[rows] @ weight.t()
            chances = logits.softmax(-1)
            losses.append(functional.nll_loss(chances.log(), target[rows], reduction="sum"))
            write(logits, (chances - functional.one_hot(target[rows], WORDS)) / len(x))
            grad_x[rows] = logits @ weight
            grad_weight += logits.t() @ x[rows]
        ctx.save_for_backward(grad_x.detach(), grad_weight.detach())
        return sum(losses) / len(x)

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        for each in (grad_x, grad_weight):
            write(each, each * grad)
        return grad_x, grad_weight, None


class SiluTimes(torch.autograd.Function):
    """Writes two gradients over two saved tensors, in backward."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        grad_gate = grad * up * (sigmoid * (1 - gate * (sigmoid - 1)))
        write(up, grad * gate * sigmoid)
        write(gate, grad_gate)
        return gate, up


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(SiluTimes.apply(self.gate(y), self.up(y)))


class Turned(torch.autograd.Function):
    """Writes the result over the input, the output of a product, as Liger does with q and k."""

    @staticmethod
    def forward(ctx, x):
        write(x, x.roll(1, -1) * 1.5)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return (grad * 1.5).roll(-1, -1)


class TurningLayer(Layer):
    def forward(self, x):
        y = self.norm(x)
        return x + self.down(functional.silu(Turned.apply(self.gate(y))) * self.up(y))


class InPlaceLayer(Layer):
    def forward(self, x):
        y = functional.silu(self.gate(self.norm(x)), inplace=True).mul_(1.5)
        return x + self.down(functional.relu(self.up(x), inplace=True) + y)


def fused(x, head, target):
    return FusedCrossEntropy.apply(head(x), target)


def fused_linear(x, head, target):
    return FusedLinearCrossEntropy.apply(x, head.weight, target)


def chunked(x, head, target):
    pairs = zip(x.chunk(4), target.chunk(4), strict=True)
    return sum(functional.cross_entropy(head(rows), part, reduction="sum") for rows, part in pairs) / len(x)


def torchs_linear(x, head, target):
    return functional.linear_cross_entropy(x, head.weight, target)


LOSSES = [fused, fused_linear, chunked, torchs_linear]


class Net(nn.Module):
    def __init__(self, layer, loss):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self._loss = loss

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return self._loss(x, self.lm_head, target)


def train(model, context=contextlib.nullcontext):
    """Losses and gradients of five steps of two parts each, with an incoming gradient other than 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(5):
        for part in range(2):
            random = torch.Generator().manual_seed(2 * step + part)
            x = torch.randn(TOKENS, WIDTH, generator=random)
            target = torch.randint(WORDS, (TOKENS,), generator=random)
            with context():
                loss = model(x, target)
            (loss / 2).backward()
            results.append(loss.detach().clone())
        results += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(p.detach() for p in model.parameters())]


def same(ours, plain):
    return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    "settings",
    [ALL, {**ALL, "window": "1GiB"}, {**MOVES, "recipe": "selective"}, {**MOVES, "recipe": "recompute"}, MOVES],
    ids=["everything", "all in the window", "selective", "recompute", "auto"],
)
@pytest.mark.parametrize("layer", [Layer, TurningLayer, InPlaceLayer])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
def test_a_training_computes_the_same(loss, layer, settings):
    model = Net(layer, loss)
    plain = train(copy.deepcopy(model))
    handle = ebbtide.offload(model, **settings)
    assert same(train(model), plain)
    if settings is ALL:
        assert handle.stats().out.nbytes > 0
        assert handle.stats().inbound.nbytes > 0
    handle.remove()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_training_in_contexts_computes_the_same(monkeypatch, loss):
    monkeypatch.setattr(compat.OffloadActivations, "settings", {"store": "mock"})
    model = Net(Layer, loss)
    plain = train(copy.deepcopy(model))
    theirs = copy.deepcopy(model)
    ours = ebbtide.offload_activations(**ALL)
    assert same(train(model, lambda: ours), plain)
    context = compat.get_act_offloading_ctx_manager(theirs, min_offload_size=1, max_fwd_stash_size=1)
    before = context.stats().parcels.count
    assert same(train(theirs, lambda: context), plain)
    assert context.stats().parcels.count > before


class Overwrites(torch.autograd.Function):
    """Writes the gradient over the logits with torch's operators, which count versions."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits.detach())
        loss = logits.exp().sum()
        logits.exp_()
        return loss

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].mul_(grad)


def test_a_saved_tensor_overwritten_later_raises_as_without_hooks():
    def loss(context):
        weight = torch.ones(8, 8, requires_grad=True)
        with context:
            logits = (weight * 2.0).sin()
            return (logits * logits).sum() + Overwrites.apply(logits)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(contextlib.nullcontext()).backward()
    with pytest.raises(ModifiedError):
        loss(ebbtide.offload_activations(**ALL)).backward()


def losses_and_gradients(model, x):
    for p in model.parameters():
        p.grad = None
    loss = model(x, torch.arange(TOKENS) % WORDS)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def turning(fails=False):
    model = Net(TurningLayer, fused)

    def fail(module, args, output):
        raise torch.OutOfMemoryError("as from a device")

    hook = model.layers[0].gate.register_forward_hook(fail) if fails else None
    return model, torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)), hook


def test_a_failed_forward_compares_no_checksums():
    model, x, hook = turning(fails=True)
    ebbtide.offload(model, **MOVES, recipe="selective")
    with pytest.raises(torch.OutOfMemoryError, match="as from a device"):
        model(x, torch.arange(TOKENS) % WORDS)
    hook.remove()
    for _ in range(2):
        assert same(losses_and_gradients(model, x), losses_and_gradients(turning()[0], x))


def test_each_site_is_compared_by_itself():
    model, x, _ = turning()
    handle = ebbtide.offload(model, **MOVES, recipe=Recipe("selective", sites=(1,)))
    plain = losses_and_gradients(turning()[0], x)
    assert same(losses_and_gradients(model, x), plain)
    handle.set_recipe(Recipe("selective", sites=(0,)))  # the overwritten output
    for _ in range(2):
        assert same(losses_and_gradients(model, x), plain)


def test_checksums_are_taken_once(monkeypatch):
    model, x, _ = turning()
    ebbtide.offload(model, **MOVES, recipe="selective")
    sums = []
    monkeypatch.setattr(saved_outputs, "checksum_of", lambda s: sums.append(s.nbytes()) or checksum_of(s))
    counts = []
    for _ in range(35):
        losses_and_gradients(model, x)
        counts.append(len(sums))
    assert counts[0] > 0
    assert counts == [counts[0]] * 35


def test_a_planner_saves_no_overwritten_output():
    model, x, _ = turning()
    twin = turning()[0]
    handle = ebbtide.offload(model, **{**MOVES, "store": "disk"}, budget="1TiB")
    for _ in range(5):
        assert same(losses_and_gradients(model, x), losses_and_gradients(twin, x))
    indices = [[call.index for call in region.expensive_ops] for region in handle.profile.regions]
    assert indices == [[1]] * 3  # up; gate is overwritten, and recomputation stops before down
    regions = {region.name: RegionPlan(Recipe("selective", sites=tuple(k))) for region, k in
               zip(handle.profile.regions, indices, strict=True)}  # fmt: skip
    handle.set_plan(Plan(regions))
    assert same(losses_and_gradients(model, x), losses_and_gradients(twin, x))
