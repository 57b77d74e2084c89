"""Recomputed tensors belong to the node that reads them, as under torch's checkpoint."""

import weakref

import torch
from torch import nn

import ebbtide

STORAGES = []
RUNS = []


class Exp(nn.Module):
    def forward(self, x):
        RUNS.append(None)
        grown = x.exp()
        STORAGES.append(weakref.ref(grown.untyped_storage()))
        return grown.sin()


class Thrice(torch.autograd.Function):
    """Reads all saved tensors each time."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.sin())
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        first, second = (ctx.saved_tensors[k] for k in (0, 0))
        return grad * (first + second)


class Custom(nn.Module):
    def forward(self, x):
        RUNS.append(None)
        return Thrice.apply(x.sin())


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList([make()])

    def forward(self, x):
        return self.layers[0](x)


def test_memory_is_free_before_the_gradients_of_the_node_are_summed():
    STORAGES.clear()
    model, x = Model(Exp), torch.randn(64, 64, requires_grad=True)
    handle = ebbtide.offload(model, recipe={"layers.0": "recompute"}, store="mock", min_bytes=1)
    out = model(x)
    alive = []
    node = out.grad_fn.next_functions[0][0]
    assert node.name() == "ExpBackward0"
    node.register_hook(lambda *_: alive.append(STORAGES[-1]() is not None))
    out.sum().backward()
    handle.remove()
    assert len(STORAGES) == 2
    assert alive == [False]


def test_a_custom_function_that_reads_repeatedly_recomputes_once():
    RUNS.clear()
    model, x = Model(Custom), torch.randn(64, 64, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    handle = ebbtide.offload(model, recipe={"layers.0": "recompute"}, store="mock", min_bytes=1)
    model(x).sum().backward()
    handle.remove()
    assert torch.equal(x.grad, expected)
    assert len(RUNS) == 3


def test_a_second_read_of_a_node_recomputes_again():
    """A hook may read a saved tensor before the node does."""
    RUNS.clear()
    model, x = Model(Exp), torch.randn(64, 64, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    handle = ebbtide.offload(model, recipe={"layers.0": "recompute"}, store="mock", min_bytes=1)
    out = model(x)
    node, read = out.grad_fn.next_functions[0][0], []
    node.register_prehook(lambda _: read.append(node._saved_result))
    out.sum().backward()
    handle.remove()
    assert torch.equal(x.grad, expected)
    assert torch.equal(read[0], x.detach().exp())


class Exps(nn.Module):
    def forward(self, x):
        RUNS.append(None)
        for _ in range(4):
            x = x.exp().neg()
        return x


def test_hooks_that_read_what_every_node_has_saved_do_not_recompute_for_each():
    RUNS.clear()
    model, x = Model(Exps), torch.zeros(64, 64, requires_grad=True)
    handle = ebbtide.offload(model, recipe={"layers.0": "recompute"}, store="mock", min_bytes=1)
    out = model(x)
    node = out.grad_fn
    while node is not None:
        if node.name() == "ExpBackward0":
            node.register_prehook(lambda _, node=node: node._saved_result.sum() and None)
        node = node.next_functions[0][0] if node.next_functions else None
    out.sum().backward()
    handle.remove()
    assert len(RUNS) == 3  # forward, the first hook's, and the first node's
