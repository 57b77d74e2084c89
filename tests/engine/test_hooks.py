"""The saved-tensor hooks: subclasses, modes of the user, and reads of saved tensors."""

import contextlib

import pytest
import torch
from cases import Data, SaveAll, finish
from support import Rig, assert_equal, bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ebbtide import ModifiedError
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._types import Reason

CPU = torch.device("cpu")


class Scaled(torch.Tensor):
    """A toy wrapper: an inner tensor times a number."""

    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner, scale):
        self.inner = inner
        self.scale = scale

    def __tensor_flatten__(self):
        return ["inner"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner, scale, size, stride):
        assert inner["inner"].shape == size
        return Scaled(inner["inner"], scale)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].inner.detach(), args[0].scale)
        unwrap = lambda a: a.inner * a.scale if isinstance(a, Scaled) else a  # noqa: E731
        return Scaled(func(*map(unwrap, args), **(kwargs or {})), 1.0)


class Opaque(torch.Tensor):
    """A subclass that cannot be flattened."""


@pytest.fixture
def rig():
    return Rig()


def saved(context, make):
    """The tensor that backward reads for the saved result of `make`."""
    seen = []
    x = Data(CPU, 1).leaf(8)
    with context:
        y = SaveAll.apply(x, seen, make())
        loss = y.exp().sin().sum()
        del y
    loss.backward()
    return seen[0]


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t(),
    "column": lambda t: t[:, 2:3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_tensors_in_one_come_back_as_one(layout, rig):

    def make():
        return TwoTensor(LAYOUTS[layout](Data(CPU).tensor(6, 8)), LAYOUTS[layout](Data(CPU, 1).tensor(6, 8)))

    got = saved(rig.context, make)
    wanted = make()
    assert type(got) is TwoTensor
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    assert_equal([got.a, got.b], [wanted.a, wanted.b])
    assert rig.stats.inbound.count >= 2
    rig.check_at_rest()


def test_a_wrapper_with_something_that_is_no_tensor(rig):
    got = saved(rig.context, lambda: Scaled(Data(CPU).tensor(6, 8), 3.0))
    assert type(got) is Scaled
    assert got.scale == 3.0
    assert bits(got.inner) == bits(Data(CPU).tensor(6, 8))
    assert rig.stats.inbound.count >= 1
    rig.check_at_rest()


def test_wrappers_nest(rig):
    one, other = Data(CPU).tensor(6, 8), Data(CPU, 1).tensor(6, 8)
    got = saved(
        rig.context, lambda: TwoTensor(TwoTensor(one.clone(), other.clone()), TwoTensor(other.clone(), one.clone()))
    )
    assert_equal([got.a.a, got.a.b, got.b.a, got.b.b], [one, other, other, one])
    assert rig.stats.inbound.count >= 4
    rig.check_at_rest()


def test_a_wrapper_trains_as_it_does_without_us(rig):

    def run(context):
        two = TwoTensor(Data(CPU).tensor(6, 8), Data(CPU, 1).tensor(6, 8)).requires_grad_()
        with context:
            loss = (two * 2.0).sin().exp().sin().sum()
        loss.backward()
        return [loss.detach().a, loss.detach().b, two.grad.a, two.grad.b]

    plain = run(contextlib.nullcontext())
    for _ in range(3):
        assert_equal(run(rig.context), plain)
    assert rig.stats.inbound.count > 0
    rig.check_at_rest()


def test_an_unknown_subclass_passes_through(rig):
    got = saved(rig.context, lambda: Data(CPU).tensor(6, 8).as_subclass(Opaque))
    assert type(got) is Opaque
    assert bits(got.as_subclass(torch.Tensor)) == bits(Data(CPU).tensor(6, 8))
    assert rig.stats.kept[Reason.SUBCLASS].count == 1


def test_a_parameter_of_a_subclass_passes_through(rig):
    weight = torch.nn.Parameter(TwoTensor(Data(CPU).tensor(6, 8), Data(CPU, 1).tensor(6, 8)))
    with rig.context:
        Data(CPU).leaf(6, 8).exp()
        loss = (weight * weight).sum()
    assert rig.stats.kept[Reason.PARAMETER].count == 2
    assert rig.stats.parcels.count == 1  # of exp
    loss.backward()
    assert_equal([weight.grad.a], [2 * weight.detach().a])


def test_jagged_tensors_pass_through(rig):
    values = Data(CPU).leaf(10, 8)
    offsets = torch.tensor([0, 3, 4, 10])
    with rig.context:
        Data(CPU).leaf(6, 8).exp()
        nested = torch.nested.nested_tensor_from_jagged(values * 2.0, offsets)
        loss = nested.sin().exp().values().sum()
    assert rig.stats.kept[Reason.LAYOUT].count >= 2  # of sin and of exp
    assert rig.stats.parcels.count == 1
    loss.backward()
    twin = values.detach().clone().requires_grad_()
    assert_equal([values.grad], finish((twin * 2.0).sin().exp().sum(), twin)[1:])


def test_what_rrelu_writes_late_is_an_error(rig):
    """Autograd saves the random slopes before they are drawn: a copy has undefined bytes."""
    x = Data(CPU).leaf(6, 8)
    with rig.context:
        loss = torch.nn.functional.rrelu(x * 2.0, training=True).sum()
    with pytest.raises(ModifiedError, match=r"rrelu in <root> writes its random slopes.*leaky_relu"):
        loss.backward()
    del loss


@pytest.mark.parametrize("inplace", [False, True])
def test_slopes_of_rrelu_that_nobody_draws_move(inplace, rig):
    """Backward computes with the middle of the bounds, not with the saved memory."""

    def run(context):
        x = Data(CPU).leaf(6, 8)
        with context:
            loss = torch.nn.functional.rrelu(x * 2.0, 0.1, 0.3, training=False, inplace=inplace).exp().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return [loss.detach(), grad.detach(), *torch.autograd.grad(grad.sum(), x)]

    assert_equal(run(rig.context), run(contextlib.nullcontext()))
    assert rig.stats.inbound.count > 0
    rig.check_at_rest()


def test_sparse_tensors_pass_through(rig):
    sparse = torch.eye(6).to_sparse()
    x = Data(CPU).leaf(6, 8)
    with rig.context:
        loss = torch.sparse.mm(sparse, x * 2.0).exp().sum()
    assert rig.stats.kept[Reason.LAYOUT].count == 1
    loss.backward()
    twin = x.detach().clone().requires_grad_()
    assert_equal([x.grad], finish((twin * 2.0).exp().sum(), twin)[1:])


@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_distributed_tensors_are_taken_apart(process_group, placement, rig):
    mesh = init_device_mesh("cpu", (1,))

    def run(context):
        x = distribute_tensor(Data(CPU).tensor(6, 8), mesh, [placement]).requires_grad_()
        w = torch.nn.Parameter(distribute_tensor(Data(CPU, 1).tensor(8, 8), mesh, [Replicate()]))
        with context:
            loss = ((x @ w).tanh() @ w.t()).exp().sum()
        loss.backward()
        return [loss.full_tensor().detach(), x.grad.full_tensor(), w.grad.full_tensor()]

    plain = run(contextlib.nullcontext())
    for _ in range(3):
        assert_equal(run(rig.context), plain)
    assert rig.stats.inbound.count > 0
    assert rig.stats.kept[Reason.PARAMETER].count > 0
    rig.check_at_rest()


@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
def test_a_distributed_tensor_keeps_mesh_and_placements(process_group, rig):
    mesh = init_device_mesh("cpu", (1,))
    got = saved(rig.context, lambda: distribute_tensor(Data(CPU).tensor(6, 8), mesh, [Shard(1)]))
    assert type(got) is DTensor
    assert (got.device_mesh, got.placements) == (mesh, (Shard(1),))
    assert bits(got.to_local()) == bits(Data(CPU).tensor(6, 8))
    assert rig.stats.inbound.count >= 1


def test_a_save_that_is_skipped_has_a_number_also_where_counting_begins_again(rig):
    """After a backward within one context. Otherwise all later sites would differ from a step that skips nothing."""
    hooks = SavedTensorHooks(rig.engines, rig.hook_context.new_call("layers.0"))
    t = Data(CPU).tensor(6, 8)

    def sites(first):
        first(t)
        ticket = hooks.pack(t.exp())
        hooks.unpack(ticket)
        return ticket.parcel.site.index

    assert [sites(hooks.pack), sites(hooks.skip), sites(hooks.pack), sites(hooks.skip)] == [1, 1, 1, 1]


# -- modes of the user -------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_do_not_see_our_copies(rig):

    def run(context):
        x = Data(CPU).leaf(6, 8)
        with Seen() as seen:
            with context:
                loss = ((x * 2.0).sin()[:, :1].expand(6, 64).exp()).sum()
            loss.backward()
        return seen.operations

    plain = run(contextlib.nullcontext())
    for _ in range(3):
        assert [op for op in run(rig.context) if "detach" not in op] == [op for op in plain if "detach" not in op]
    assert rig.stats.inbound.count > 0


def test_flops_are_those_of_the_plain_run(rig):

    def run(context):
        data = Data(CPU)
        x, w = data.leaf(6, 8), data.leaf(8, 8)
        with FlopCounterMode(display=False) as counter:
            with context:
                loss = ((x @ w).tanh() @ w).exp().sum()
            loss.backward()
        return counter.get_total_flops()

    plain = run(contextlib.nullcontext())
    for _ in range(2):
        assert run(rig.context) == plain
    assert rig.stats.inbound.count > 0
