"""The documented behaviour of TRL's and torchtune's contexts against an un-offloaded twin, and more."""

import copy
import gc
import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trl.models import activation_offloading

import ebbtide
from ebbtide import Count, EbbtideWarning, ForeignAttributeError, ModifiedError
from ebbtide._types import Reason
from ebbtide._utils.torch_private import top_pack_hook
from ebbtide.compat import NoOpManager, OffloadActivations, get_act_offloading_ctx_manager, torchtune

WIDTH = 32


@pytest.fixture(autouse=True)
def moves_on_the_cpu(monkeypatch):
    """Without an accelerator the contexts move nothing by default."""
    monkeypatch.setattr(OffloadActivations, "settings", {"store": "mock"})


class Net(nn.Module):
    def __init__(self, checkpoints=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.output = nn.Linear(WIDTH, 100)
        self._checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self._checkpoints else layer(x)
        return self.output(x).float().log_softmax(-1).square().mean()


def batch(seed=0):
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed))


def grads(model):
    return [p.grad.clone() for p in model.parameters()]


def plain_grads(seeds=(0,), **settings):
    model = Net(**settings)
    for seed in seeds:
        model(batch(seed)).backward()
    return grads(model)


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("is_backward_inside", [False, True])
def test_entered_for_every_step_gradients_are_the_same(checkpoints, is_backward_inside):
    model = Net(checkpoints)
    context = get_act_offloading_ctx_manager(model)
    for seed in range(3):
        with context:
            loss = model(batch(seed))
            if is_backward_inside:
                loss.backward()
        if not is_backward_inside:
            loss.backward()
    assert same(grads(model), plain_grads((0, 1, 2), checkpoints=checkpoints))
    assert context.stats().parcels.count > 0


def test_two_forwards_before_a_backward_do_not_mix():
    """The originals number saved tensors anew at each entry, and mix up two forwards."""
    model = Net()
    context = OffloadActivations()
    with context:
        first = model(batch(0))
    with context:
        second = model(batch(1))
    first.backward()
    second.backward()
    assert same(grads(model), plain_grads((0, 1)))


def test_a_graph_that_is_kept_runs_backward_twice():
    model = Net()
    with OffloadActivations():
        loss = model(batch())
    loss.backward(retain_graph=True)
    loss.backward()
    assert same(grads(model), plain_grads((0, 0)))


def test_a_view_outlives_the_node_that_saved_it():
    """The backward of a square passes on a view of the saved tensor."""
    kept = []

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            kept.append(ctx.saved_tensors[0].view(-1))
            return grad * 2

    x = batch().requires_grad_()
    with OffloadActivations():
        y = Keeping.apply(x * 3)
    y.sum().backward()
    gc.collect()
    assert torch.equal(kept[0], (batch() * 3).view(-1))


def test_a_graph_that_is_dropped_leaves_nothing():
    model = Net()
    context = OffloadActivations()
    for seed in range(20):
        with context:
            loss = model(batch(seed))
    del loss
    gc.collect()
    assert context.stats().host_bytes == 0


def test_a_save_that_is_changed_in_place_raises():
    x = batch().requires_grad_()
    with OffloadActivations():
        y = (x * 3).exp()
        z = y * 2
    y.data.add_(0)  # unseen, as without hooks
    y.detach().add_(1)
    with pytest.raises(ModifiedError):
        z.sum().backward()


def test_smaller_tensors_stay():
    model = Net()
    context = OffloadActivations(min_offload_size=10**9)
    with pytest.warns(EbbtideWarning, match="moved nothing"), context:
        model(batch()).backward()
    assert context.stats().parcels.count == 0


def test_tensors_saved_inside_of_the_other_context_stay_and_are_checked():
    x = batch().requires_grad_()
    context = OffloadActivations()
    before = context.stats().parcels.count
    with context:
        with NoOpManager():
            y = (x * 3).exp()
        z = y.sin()
    assert context.stats().parcels.count == before + 1  # saved by sin
    (grad,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    twin = batch().requires_grad_()
    (expected,) = torch.autograd.grad((twin * 3).exp().sin().sum(), twin)
    assert torch.equal(grad, expected)
    with NoOpManager():
        y = (x * 3).exp()
    y.detach().add_(1)
    with pytest.raises(ModifiedError):
        y.sum().backward()


# -- attributes of the originals ---------------------------------------------------------------------------------------


@pytest.fixture
def trls(monkeypatch):
    """TRL's own context, which needs an accelerator."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    return activation_offloading.OffloadActivations(min_offload_size=77, max_fwd_stash_size=3)


CONTEXTS = [OffloadActivations, torchtune.OffloadActivations]


def test_every_attribute_of_trls_answers_or_names_the_replacement(trls):
    context = OffloadActivations(min_offload_size=77, max_fwd_stash_size=3)
    names = [name for name in vars(trls) if not name.startswith("_")]
    assert {"use_streams", "tracker", "pack_hook", "unpack_hook"} <= set(names)
    answered = [name for name in names if hasattr(context, name)]
    assert [getattr(context, name) for name in answered] == [getattr(trls, name) for name in answered]
    assert sorted(answered) == ["max_fwd_stash_size", "min_tensor_size_bytes", "use_pin_memory", "use_streams"]
    for name in set(names) - set(answered):
        with pytest.raises(ForeignAttributeError, match=rf"no attribute '{name}': \w+"):
            getattr(context, name)
    for name in names:
        with pytest.raises(ForeignAttributeError, match=rf"{name} of 'OffloadActivations' cannot be set: \w+"):
            setattr(context, name, getattr(trls, name))


@pytest.mark.parametrize("kind", CONTEXTS)
def test_attributes_of_the_originals(kind):
    context = kind(use_streams=False)
    assert context.use_streams is False
    assert kind().use_streams is True
    with pytest.raises(ForeignAttributeError, match=r"'tracker': .* no table .* Read stats\(\)"):
        len(context.tracker)
    for name in ("pack_hook", "unpack_hook"):
        with pytest.raises(ForeignAttributeError, match=r"Enter NoOpManager\(\).*compat.install\('axolotl'\)"):
            getattr(context, name)(torch.ones(3))
    assert not hasattr(context, "fwd_stash")
    assert getattr(context, "tracker", None) is None
    with pytest.raises(ForeignAttributeError, match=r"use_streams .* cannot be set: pass the argument"):
        context.use_streams = True
    assert context.use_streams is False
    with pytest.raises(ForeignAttributeError, match=r"s0 .* cannot be set: every device"):
        kind.s0 = property(lambda self: None)  # as Axolotl patches TRL's class
    assert not hasattr(context, "s0")
    with pytest.raises(AttributeError, match=r"no attribute 'elsewhere'$"):
        context.elsewhere  # noqa: B018
    context.elsewhere = 3
    assert context.elsewhere == 3


class Headed(nn.Module):
    """Only the head saves a tensor of its own."""

    def __init__(self, path):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        *parents, name = path.split(".")
        owner = self
        for parent in parents:
            owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(name, nn.GELU())
        self._path = path

    def forward(self, x):
        return self.get_submodule(self._path)(self.layer(x)).sum()


def moved_by(model, context):
    before = context.stats().parcels.count
    with context:
        loss = model(batch())
    loss.backward()
    return context.stats().parcels.count - before


@pytest.mark.parametrize(
    "path", ["output", "lm_head", "decoder.output", "decoder.lm_head", "final_layer_norm", "ln_f", "head", "score"]
)
def test_tensors_saved_by_the_head_stay(path):
    assert moved_by(Headed(path), OffloadActivations(min_offload_size=1)) == 2  # the layer's input, and its output
    model = Headed(path)
    assert moved_by(model, get_act_offloading_ctx_manager(model, min_offload_size=1)) == 1


def test_something_else_of_that_name_is_not_taken_for_the_head():
    """The originals end the search at such a head."""
    model = Headed("lm_head")
    model.output = "logits"
    assert moved_by(model, get_act_offloading_ctx_manager(model, min_offload_size=1)) == 1


def test_a_head_in_ddp_or_peft_is_found():
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    wrapped = Wrapped(Net())
    get_act_offloading_ctx_manager(wrapped)
    assert len(wrapped.module.output._forward_pre_hooks) == 1
    adapted = nn.Module()
    adapted.base_model, adapted.peft_config = Net(), {}
    get_act_offloading_ctx_manager(Wrapped(adapted))
    assert len(adapted.base_model.output._forward_pre_hooks) == 1


def test_a_model_without_a_head_warns():
    with pytest.warns(EbbtideWarning, match="no output head was found in Sequential"):
        get_act_offloading_ctx_manager(nn.Sequential(nn.Linear(2, 2)))
    get_act_offloading_ctx_manager(nn.Sequential(nn.Linear(2, 2)), warn_if_no_head=False)


def test_hooks_of_the_head_do_nothing_outside_of_the_context():
    model = Net()
    get_act_offloading_ctx_manager(model)
    context = ebbtide.offload_activations(store="mock", min_bytes=1, window="1MiB")
    before = context.stats().parcels.nbytes
    with context:
        model(batch())
    with_hooks = context.stats().parcels.nbytes - before
    before = context.stats().parcels.nbytes
    with context:
        Net()(batch())
    assert with_hooks == context.stats().parcels.nbytes - before


def test_hooks_are_not_piled_up_and_a_forward_that_fails_leaves_none_behind():
    model = Net()
    for _ in range(3):
        context = get_act_offloading_ctx_manager(model)
    assert len(model.output._forward_pre_hooks) == 1
    with pytest.raises(RuntimeError), context:
        model(torch.randn(2, WIDTH + 1))
    with pytest.raises(RuntimeError), context:
        model.output(torch.randn(2, WIDTH + 1))
    x = batch().requires_grad_()
    y = x.exp()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own: no hooks are left
        y.sum().backward()


def test_ligers_modules_stay_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.liger_mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
            self.output = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.output(self.liger_mlp(x)).sum()

    model = Model()
    context = get_act_offloading_ctx_manager(model, min_offload_size=1)
    before = context.stats().parcels.count
    with context:
        model(batch()).backward()
    assert context.stats().parcels.count == before


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("make", [OffloadActivations, torchtune.OffloadActivations])
def test_a_stash_below_one_is_an_error(make, size):
    with pytest.raises(ValueError, match=f"max_fwd_stash_size={size}: expected at least 1"):
        make(max_fwd_stash_size=size)


def test_pageable_memory_warns():
    with pytest.warns(EbbtideWarning, match="use_pin_memory=False is not followed"):
        OffloadActivations(use_pin_memory=False)


def test_keywords_are_in_the_orders_of_the_originals():
    ours = list(inspect.signature(OffloadActivations.__init__).parameters)[1:5]
    assert ours == ["use_pin_memory", "use_streams", "min_offload_size", "max_fwd_stash_size"]
    theirs = list(inspect.signature(torchtune.OffloadActivations.__init__).parameters)[1:]
    assert theirs == ["use_pin_memory", "use_streams", "max_fwd_stash_size", "min_offload_size"]
    made = torchtune.OffloadActivations(True, True, 2, 64)
    assert made._context._config.min_bytes == 64
    assert made._context._config.window_bytes == 512 * 2**20 * 2 // 5


def test_torchtunes_switch():
    model = Net()
    assert not isinstance(torchtune.get_act_offloading_ctx_manager(model, False), OffloadActivations)
    context = torchtune.get_act_offloading_ctx_manager(model, enable_activation_offloading=True)
    with context:
        model(batch()).backward()
    assert same(grads(model), plain_grads())
    assert context.stats().parcels.count > 0


def test_without_streams_nothing_is_ahead():
    model = Net()
    context = OffloadActivations(use_streams=False)
    with context:
        model(batch()).backward()
    assert same(grads(model), plain_grads())
    assert context._context._config.prefetch_bytes == 1


@pytest.mark.parametrize("is_known", [False, True])
def test_parameters_stay_with_and_without_update_model_params(is_known):
    model = Net()
    context = OffloadActivations(min_offload_size=1)
    if is_known:
        context.update_model_params(model)
    before = context.stats().kept.get(Reason.PARAMETER, Count()).count
    with context:
        model(batch()).backward()
    assert context.stats().kept[Reason.PARAMETER].count >= before + 3  # saved by the products of later layers
    assert same(grads(model), plain_grads())


def test_it_decorates_a_step():
    model = Net()

    @OffloadActivations()
    def step(seed):
        model(batch(seed)).backward()

    step(0)
    step(1)
    assert same(grads(model), plain_grads((0, 1)))


class Normed(nn.Module):
    """A layer with a module of Liger, by name."""

    def __init__(self):
        super().__init__()
        self.liger_norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.liger_norm(x)).sigmoid()


def net_of_normed():
    model = Net(checkpoints=True)
    model.layers = nn.ModuleList(Normed() for _ in range(3))
    return model


@pytest.mark.parametrize("where", ["in the context", "behind it", "in another thread"])
def test_a_module_that_keeps_tensors_inside_of_a_checkpoint_leaves_them_to_the_checkpoint(where):
    """The layer is recomputed in the thread of backward: on an accelerator, a thread of the device."""
    torch.manual_seed(1)
    model = net_of_normed()
    model(batch()).backward()
    plain = grads(model)
    model.zero_grad()
    context = get_act_offloading_ctx_manager(model, min_offload_size=1)
    with context:
        loss = model(batch())
        if where == "in the context":
            loss.backward()
        elif where == "in another thread":
            with ThreadPoolExecutor(1) as thread:
                thread.submit(loss.backward).result()
    if where == "behind it":
        loss.backward()
    assert same(grads(model), plain)
    assert context.stats().parcels.count > 0


def test_an_interrupt_inside_of_the_head_leaves_nothing_on():
    model = Net()
    context = get_act_offloading_ctx_manager(model, min_offload_size=1)
    handle = model.output.register_forward_pre_hook(lambda *_: _interrupt())
    with pytest.raises(KeyboardInterrupt), context:
        model(batch())
    handle.remove()
    before = context.stats().parcels.count
    assert top_pack_hook() is None
    model(batch()).backward()
    assert context.stats().parcels.count == before
    assert same(grads(model), plain_grads())
    with context:  # and the tensors saved by the head stay as before
        model(batch()).backward()
    assert top_pack_hook() is None


def _interrupt():
    raise KeyboardInterrupt


def test_on_a_machine_without_an_accelerator_nothing_happens(monkeypatch):
    monkeypatch.setattr(OffloadActivations, "settings", {})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    model = Net()
    context = get_act_offloading_ctx_manager(model)
    with pytest.warns(
        EbbtideWarning, match="OffloadActivations moves nothing: this machine has no accelerator"
    ) as caught:
        for _ in range(2):
            model.zero_grad()
            with context:
                model(batch()).backward()
    assert len(caught) == 1
    assert context.stats().parcels.count == 0
    assert same(grads(model), plain_grads())


def test_a_copy_of_a_model_has_a_head_of_its_own():
    model = Net()
    context = get_act_offloading_ctx_manager(model, min_offload_size=1)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        with context:
            loss = each(batch())
        loss.backward()
        assert all(torch.equal(a, b) for a, b in zip(grads(each), plain_grads(), strict=True))
