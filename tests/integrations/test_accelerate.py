"""accelerate's own loop on one process; for several processes see test_sharded.py."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from cases import Transformer, make, tokens
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

from ebbtide import ConfigError, EbbtideWarning, ModuleError
from ebbtide.integrations.accelerate import offload

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

CPU = torch.device("cpu")
ALL = {"store": "mock", "min_bytes": 1, "mode": "all", "window": "1KiB"}


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(order=None, settings=ALL, batches=8, **about):
    """Losses and weights of a loop that accumulates two batches; `order`: offload() before or after prepare()."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **about)
    model = make(Transformer, CPU)
    handle = offload(accelerator, model, **settings) if order == "before" else None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if order == "after":
        handle = offload(accelerator, model, **settings)
    losses = []
    for step in range(batches):
        with accelerator.accumulate(model):
            loss = model(tokens(CPU, step))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(accelerator.unwrap_model(model).parameters()), handle


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("about", [{}, {"mixed_precision": "bf16"}], ids=str)
def test_a_loop_computes_the_same(order, about):
    expected, weights, _ = trained(**about)
    losses, ours, handle = trained(order, **about)
    assert losses == expected
    assert len(set(losses)) > 1
    assert all(torch.equal(p, q) for p, q in zip(ours, weights, strict=True))
    assert handle.stats().out.nbytes > 0


def test_with_a_budget():
    expected, weights, _ = trained()
    losses, ours, handle = trained("after", {"store": "mock", "min_bytes": 1, "budget": "64GiB"})
    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(ours, weights, strict=True))
    assert handle.plan.predicted is not None


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_loop_in_which_nothing_moves_warns(order):
    with pytest.warns(EbbtideWarning, match=r"offload\(Transformer\) moved nothing .* smaller than min_bytes"):
        trained(order, {"store": "mock", "mode": "all"}, batches=1)


@pytest.mark.parametrize(
    ("plugin", "settings", "message"),
    [
        ({"activation_checkpointing_offload": True}, {}, "activation_checkpointing_offload=True .* move the same"),
        ({"activation_checkpointing": True}, {"budget": "8GiB"}, "activation_checkpointing=True of the FSDP plugin"),
    ],
)
def test_plugins_that_do_the_same_are_refused(plugin, settings, message):
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(**plugin)))
    with pytest.raises(ConfigError, match=message):
        offload(accelerator, make(Transformer, CPU), **settings)


def test_deepspeeds_offload_is_refused():
    plugin = SimpleNamespace(deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True}})
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    with pytest.raises(ConfigError, match=r'"cpu_checkpointing": true .* move the same'):
        offload(accelerator, make(Transformer, CPU))


def test_blocks_that_offload_and_a_second_time_are_refused():
    accelerator = Accelerator(cpu=True)
    model = make(Transformer, CPU)
    offload(accelerator, model, **ALL)
    with pytest.raises(ModuleError, match="already applied"):
        offload(accelerator, model, **ALL)
    model = make(Transformer, CPU)
    model.layers[0] = offload_wrapper(model.layers[0])
    with pytest.raises(ConfigError, match="in offload_wrapper"):
        offload(accelerator, model, **ALL)


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("is_regional", [False, True])
def test_a_model_compiled_by_prepare_is_offloaded(is_regional):
    about = {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=is_regional)}
    trained("before", {"mode": "off"}, **about)
    expected, weights, _ = trained(**about)
    if is_regional:  # a copy
        with pytest.raises(ConfigError, match=r"call offload\(\) after prepare\(\)"):
            trained("before", **about)
    for order in ("after",) if is_regional else ("before", "after"):
        torch._dynamo.reset()
        with pytest.warns(EbbtideWarning, match="larger than its blocks") if not is_regional else nullcontext():
            losses, ours, handle = trained(order, **about)
        assert losses == expected
        assert all(torch.equal(p, q) for p, q in zip(ours, weights, strict=True))
        assert handle.stats().out.nbytes > 0


@pytest.mark.usefixtures("_fresh_compiler")
def test_regions_that_prepare_compiles_are_planned():
    about = {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)}
    expected, _, _ = trained(batches=14, **about)
    losses, _, handle = trained("after", {"store": "mock", "min_bytes": 1, "budget": "64GiB"}, 14, **about)
    assert losses == expected
    assert handle.plan.predicted is not None


@pytest.mark.parametrize(
    ("distributed_type", "is_regional", "is_in_place"),
    [
        ("DEEPSPEED", False, True), ("DEEPSPEED", True, True), ("FSDP", True, True), ("FSDP", False, False),
        ("MULTI_GPU", False, False),
    ],
)  # fmt: skip
def test_a_model_compiled_in_place_is_offloaded_before_prepare_too(distributed_type, is_regional, is_in_place):
    plugin = SimpleNamespace(backend="INDUCTOR", use_regional_compilation=is_regional)
    state = SimpleNamespace(dynamo_plugin=plugin, distributed_type=distributed_type)
    accelerator = SimpleNamespace(state=state, unwrap_model=lambda model: model)
    with nullcontext() if is_in_place else pytest.raises(ConfigError, match="after prepare"):
        assert offload(accelerator, make(Transformer, CPU), **ALL).regions
