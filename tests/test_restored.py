"""What runs inside `restored` leaves no trace, whatever kind of tensor a buffer is."""

import pytest
import torch
from support import bits
from torch import nn

import ebbtide
from ebbtide import ModuleError
from ebbtide._restored import restored
from ebbtide.rehearsal import measure


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
    """One that cannot be copied."""

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
    """In one of the elements that all others are."""
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
def test_a_buffer_is_the_same_tensor_with_the_same_bytes(make_buffer, change):
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
    """The bytes of what it is made of."""
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
    """Blocks, and buffers of which one moment is seen by every row."""

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


def test_a_buffer_without_memory_is_said_at_the_door():
    model = Shifted()
    model.register_buffer("missing", torch.ones(3, device="meta"))
    with pytest.raises(ModuleError, match="meta device"):
        measure(model, torch.randn(4, 8), **SETTINGS)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(8), nn.LazyBatchNorm1d(affine=False)], ids=["parameter", "buffer"])
def test_what_the_first_forward_makes_has_to_be_there(lazy):
    model = Shifted()
    model.lazy = lazy
    with pytest.raises(ModuleError, match="run one forward"):
        measure(model, torch.randn(4, 8), **SETTINGS)
