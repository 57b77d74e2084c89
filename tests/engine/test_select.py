"""Tensors that may travel, and the reasons of all that may not."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ebbtide._engine.context import HookContext, Limits
from ebbtide._engine.select import select, select_subclass
from ebbtide._types import Reason
from ebbtide._utils.storage import mark_discarded


@pytest.fixture
def context():
    return HookContext(Limits(1, 1, 16), lambda device: device.type == "cpu")


WEIGHT = nn.Parameter(torch.ones(4, 4))
LEAF = torch.ones(4, 4, requires_grad=True)


def parameter_views():
    return [WEIGHT, WEIGHT.t(), WEIGHT[1:], WEIGHT.view(-1)[2:9].view(7, 1), LEAF, LEAF.t(), LEAF.expand(2, 4, 4)]


@pytest.mark.parametrize("at", range(7))
def test_parameters_other_leaves_and_their_views_stay(context, at):
    assert select(parameter_views()[at], context) is Reason.PARAMETER


def test_activations_and_their_views_travel(context):
    x = LEAF * 2.0
    for t in (x, x.t(), x[1:], x.detach(), torch.ones(4, 4), WEIGHT.detach().clone(), WEIGHT * 1.0, x.bool()):
        assert select(t, context) is None


def test_casts_of_parameters_stay_and_other_casts_travel(context):
    cast = WEIGHT.to(torch.bfloat16)
    assert select(cast, context) is Reason.AUTOCAST_WEIGHT
    assert select(cast.t(), context) is Reason.AUTOCAST_WEIGHT
    assert select((WEIGHT * 1.0).to(torch.bfloat16), context) is None
    assert select(LEAF.to(torch.bfloat16), context) is None  # of an input, not kept for the whole forward


def test_small_and_empty_ones_stay(context):
    assert select(torch.ones(3), context) is Reason.SMALL
    assert select(torch.ones(4), context) is None
    assert select(torch.ones(4, 4)[2:2], context) is Reason.EMPTY
    assert select(torch.ones(100)[:1], context) is None  # the storage is large


def test_freed_storages_stay():
    gathered = torch.ones(4, 4)
    gathered.untyped_storage().resize_(0)  # as FSDP does after forward
    assert select(gathered, HookContext(Limits(1, 1, 0), lambda _: True)) is Reason.EMPTY


def test_storages_marked_as_discarded_stay(context):
    output = torch.ones(4, 4)
    mark_discarded(output.untyped_storage())
    saved = output[1:]
    del output  # the mark is the storage's, with or without an object of Python for the storage
    assert select(saved, context) is Reason.EMPTY
    del saved
    assert all(select(torch.ones(4, 4), context) is None for _ in range(3))  # in the same memory


def test_buffers_stay(context):
    buffer = torch.ones(4, 4)
    context.buffers.add(buffer.untyped_storage()._cdata)
    assert select(buffer, context) is Reason.BUFFER
    assert select(buffer[1:], context) is Reason.BUFFER


def test_known_weights_stay_however_they_are_saved(context):
    inside = torch.ones(4, 4)
    two = nn.Parameter(TwoTensor(inside, torch.ones(4, 4)))
    saves = [WEIGHT.detach(), WEIGHT.data.t(), inside, inside[1:]]
    assert [select(t, context) for t in saves] == [None] * 4
    context.register_weights(
        [WEIGHT, two, nn.parameter.UninitializedParameter(), nn.Parameter(torch.eye(4).to_sparse())]
    )
    assert [select(t, context) for t in saves] == [Reason.PARAMETER] * 4
    assert select(WEIGHT.detach().clone(), context) is None


def test_what_has_the_place_of_a_weight_that_is_gone_is_none(context):
    weight = nn.Parameter(torch.ones(4, 4))
    context.register_weights([weight])
    place = weight.untyped_storage()._cdata
    del weight
    activation = torch.ones(4, 4)
    context._weights[activation.untyped_storage()._cdata] = context._weights.pop(place)
    assert select(activation, context) is None


def test_weights_that_are_gone_are_forgotten(context):
    """Some owners change the memory of weights in every step."""
    for _ in range(5):
        weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
        context.register_weights(weights)
        assert len(context._weights) <= 2 * len(weights)
    del weights
    context.register_weights([])
    assert not context._weights


def test_layouts_without_one_dense_storage_stay(context):
    assert select(torch.eye(4).to_sparse(), context) is Reason.LAYOUT
    assert select(torch.eye(4).to_sparse_coo(), context) is Reason.LAYOUT


def test_zeros_of_forward_mode_differentiation_stay(context):
    """Zero tensors have a size and no memory: a copy would end the process."""
    assert select(torch._efficientzerotensor(4, 4), context) is Reason.EMPTY


def test_other_devices_stay(context):
    assert select(torch.ones(4, 4, device="meta"), context) is Reason.OTHER_DEVICE


def test_saved_tensors_of_a_running_backward_stay(context):
    seen = []
    x = torch.ones(4, 4, requires_grad=True)
    y = x * 2.0
    y.register_hook(lambda grad: seen.append((select(y.detach(), context), select_subclass(TwoTensor(grad, grad)))))
    y.sum().backward()
    assert seen == [(Reason.IN_BACKWARD, Reason.IN_BACKWARD)]


def test_subclasses_that_can_be_taken_apart_travel():
    two = TwoTensor(torch.ones(4), torch.ones(4))
    assert select_subclass(two) is None
    assert select_subclass(nn.Parameter(two)) is Reason.PARAMETER
    assert select_subclass(two.clone().requires_grad_()) is Reason.PARAMETER


def test_subclasses_that_cannot_stay():
    class Tagged(torch.Tensor):
        pass

    assert select_subclass(torch.ones(4).as_subclass(Tagged)) is Reason.SUBCLASS
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert select_subclass(nested) is Reason.LAYOUT


def test_every_reason_says_why():
    assert len({reason.value for reason in Reason}) == len(Reason)
