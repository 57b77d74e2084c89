"""Copies and pickles of an offloaded module are plain modules, and the original goes on offloading."""

import copy
import functools
import io
import pickle

import pytest
import torch
from cases import Transformer, finish, gradients, make, tokens
from support import assert_equal
from test_offload import offload, three_steps

import ebbtide

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # from the compiler

CPU = torch.device("cpu")
SETTINGS = {
    "all": {},
    "include": {"include": "layers.*.mlp"},
    "recompute": {"recipe": "recompute"},
    "an operator class inside a module": {"recipe": ebbtide.Recipe("selective", ops="matmul@mlp")},
    "nested": {"recipe": {"layers.*": "recompute", "layers.*.mlp": "selective"}},
    "budget": {"window": None, "budget": "64GiB"},
}


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "of a model around it": lambda model: copy.deepcopy(torch.nn.Sequential(model))[0],
}


def attributes(model):
    """Per module: attributes beyond those of every module, and the number of hooks of each kind."""
    hooks = [name for name in vars(model) if name.endswith(("_hooks", "_always_called"))]
    return [(set(vars(module)), [len(getattr(module, name)) for name in hooks]) for module in model.modules()]


def trained_twin():
    """After three steps."""
    twin = make(Transformer, CPU)
    three_steps(twin)
    return twin


@pytest.mark.parametrize(
    ("way", "settings", "backend"),
    [
        *(("deepcopy", settings, None) for settings in SETTINGS),
        *((way, "recompute", None) for way in COPIES if way != "deepcopy"),
        *(("deepcopy", settings, "eager") for settings in ("all", "recompute")),
        ("pickle", "recompute", "eager"),
    ],
)
def test_a_copy_is_a_plain_model(way, settings, backend):
    """`backend`: of the compiler, for each block."""
    model = make(Transformer, CPU)
    if backend is not None:
        for layer in model.layers:
            layer.compile(backend=backend)
    handle = offload(model, **SETTINGS[settings])
    three_steps(model)
    before = attributes(model)

    made = COPIES[way](model)

    twin = trained_twin()
    assert attributes(made) == attributes(twin)
    assert b"ebbtide" not in pickle.dumps(made)
    count = handle.stats().saved_tensors
    assert_equal(three_steps(made), three_steps(twin))
    assert handle.stats().saved_tensors == count  # forwards of the copy do not count
    assert attributes(model) == before
    assert_equal(three_steps(model), three_steps(trained_twin()))
    assert handle.stats().saved_tensors > count
    handle.remove()
    if backend is None:
        assert attributes(model) == attributes(twin)


def test_a_copy_of_a_model_compiled_as_a_whole_is_compiled_for_itself():
    model = torch.compile(make(Transformer, CPU), backend="eager")
    handle = offload(model)
    with pytest.warns(ebbtide.EbbtideWarning, match="graphs larger than its blocks"):
        three_steps(model)
    made = copy.deepcopy(model)
    count = handle.stats().saved_tensors
    assert_equal(three_steps(made), three_steps(trained_twin()))
    assert handle.stats().saved_tensors == count
    handle.remove()
    offload(model)  # the first handle left nothing on the compiled module


def test_a_copy_gets_a_handle_of_its_own():
    model = make(Transformer, CPU)
    handle = offload(model, recipe="recompute")
    made = copy.deepcopy(model)
    other = offload(made, recipe="selective")
    assert_equal(three_steps(made), three_steps(make(Transformer, CPU)))
    assert other.stats().recomputed.count > 0
    assert handle.stats().saved_tensors == 0


def test_a_copy_of_a_part_is_plain():
    model = make(Transformer, CPU)
    handle = offload(model, recipe="recompute")
    made, twin = copy.deepcopy(model.layers[0]), make(Transformer, CPU).layers[0]
    assert attributes(made) == attributes(twin)
    x, y = (torch.ones(2, 8, 16, requires_grad=True) for _ in range(2))
    assert_equal(finish(made(x).sum(), made, x), finish(twin(y).sum(), twin, y))
    assert handle.stats().saved_tensors == 0


def test_hooks_of_others_are_copied_and_stay_removable():
    def double(module, args, output):
        return output * 2

    model, twin = make(Transformer, CPU), make(Transformer, CPU)
    hooks = [each.layers[1].register_forward_hook(double) for each in (model, twin)]
    offload(model, recipe="recompute")
    made = copy.deepcopy(model)
    assert_equal(three_steps(made), three_steps(copy.deepcopy(twin)))
    for hook in hooks:
        hook.remove()
    assert_equal(three_steps(model), three_steps(twin))
    assert len(made.layers[1]._forward_hooks) == 1


@pytest.mark.parametrize("settings", [{}, {"recipe": "recompute"}], ids=["all", "recompute"])
def test_an_averaged_model_equals_that_of_a_plain_training(settings):
    def averaged(model):
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            model(tokens(CPU, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        loss = average(tokens(CPU, 7))
        loss.backward()
        return [loss.detach(), *gradients(average), *(p.detach() for p in average.parameters())]

    model = make(Transformer, CPU)
    handle = offload(model, **settings)
    assert_equal(averaged(model), averaged(make(Transformer, CPU)))
    assert handle.stats().parcels.count > 0


def test_a_handle_cannot_be_copied():
    handle = offload(make(Transformer, CPU))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ebbtide.ModuleError, match=r"belongs to one module .* handle\.remove\(\) first"):
            copied(handle)


def test_a_wrapper_of_a_region_forward_sees_a_plain_function():
    """Libraries wrap the forward of blocks, with functools.wraps, and copy the model afterwards."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3)))
    handle = ebbtide.offload(model, recipe="recompute", store="mock", min_bytes=1)
    region = next(iter(handle.regions.values()))
    inner = region.forward

    @functools.wraps(inner)
    def outer(*args, **kwargs):
        return inner(*args, **kwargs)

    assert vars(outer).keys() == {"__wrapped__"}
    region.forward = outer
    handle.remove()
    copy.deepcopy(model)
