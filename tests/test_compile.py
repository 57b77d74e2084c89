"""torch.compile with both entry points: the numbers of the compiled run, no graph break, no recompilation."""

import contextlib
import copy
import warnings

import pytest
import torch
from cases import Data, finish, gradients, make, tokens
from support import Rig, assert_equal
from torch import nn
from torch.nn import functional

import ebbtide
from ebbtide._types import Reason

CPU = torch.device("cpu")
BACKENDS = ["aot_eager", "inductor"]
STEPS = 4


# The compiler warns about its own work.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Tower(nn.Module):
    """A small model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(Layer(16) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    ebbtide.release_memory()


def offload(model, **settings):
    return ebbtide.offload(model, **{"store": "mock", "window": 1, "min_bytes": 1, **settings})


def compile_blocks(model, backend):
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)


def train(model, context=None, call=None):
    """Losses and gradients of some steps; only the first may compile."""
    results = []
    for step in range(STEPS):
        with torch._dynamo.config.patch(error_on_recompile=step > 0), context or contextlib.nullcontext():
            loss = (model if call is None else call)(tokens(CPU, step))
        results += [loss.detach(), *finish(loss, model)]
    return [result.clone() for result in results]


def check_no_graph_break():
    assert dict(torch._dynamo.utils.counters["graph_break"]) == {}


def check_moved(stats):
    assert stats.out.count > 0
    assert stats.inbound.count > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["compile first", "offload first"])
def test_blocks_compiled_one_by_one(backend, order):
    plain = make(Tower, CPU)
    compile_blocks(plain, backend)
    expected = train(plain)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    model = make(Tower, CPU)
    if order == "compile first":
        compile_blocks(model, backend)
    handle = offload(model)
    if order == "offload first":
        compile_blocks(model, backend)
    assert_equal(train(model), expected)
    check_no_graph_break()
    check_moved(handle.stats())
    # Each block still is a region: one compiled graph saved the tensors, under the name of the block.
    assert {"layers.0", "layers.1", "layers.2"} <= {region for *_, region in handle._attachment.context._numbers}


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_around_compiled_blocks(backend):
    plain = make(Tower, CPU)
    compile_blocks(plain, backend)
    expected = train(plain)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    rig = Rig()
    model = make(Tower, CPU)
    compile_blocks(model, backend)
    assert_equal(train(model, rig.context), expected)
    check_no_graph_break()
    check_moved(rig.stats)
    rig.check_at_rest()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_context_around_a_model_compiled_as_a_whole(backend, how):
    plain = make(Tower, CPU)
    expected = train(plain, call=_compiled(plain, backend, how))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    rig = Rig()
    model = make(Tower, CPU)
    call = _compiled(model, backend, how)
    assert_equal(train(model, rig.context, call), expected)
    check_no_graph_break()
    assert rig.stats.out.count > 0
    rig.check_at_rest()


def _compiled(model, backend, how):
    if how == "torch.compile":
        return torch.compile(model, backend=backend, fullgraph=True)
    model.compile(backend=backend, fullgraph=True)
    return model


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["compile first", "offload first"])
def test_the_hook_wraps_the_compiled_call_of_a_whole_model(backend, order):
    """`model.compile()` keeps the module, so the hook can wrap the compiled call, in either order."""
    plain = make(Tower, CPU)
    plain.compile(backend=backend, fullgraph=True)
    expected = train(plain)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    model = make(Tower, CPU)
    if order == "compile first":
        model.compile(backend=backend, fullgraph=True)
    handle = offload(model)
    if order == "offload first":
        model.compile(backend=backend, fullgraph=True)
    with pytest.warns(ebbtide.EbbtideWarning, match="graphs larger than its blocks.*one by one") as seen:
        results = train(model)
    assert sum(warning.category is ebbtide.EbbtideWarning for warning in seen) == 1
    assert_equal(results, expected)
    check_no_graph_break()
    assert handle.stats().out.count > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["compile first", "offload first"])
def test_the_model_inside_of_torch_compile_is_offloaded(backend, order):
    """Hooks of the model run around its one graph, and stay out of it."""
    plain = make(Tower, CPU)
    expected = train(plain, call=torch.compile(plain, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    model = make(Tower, CPU)
    if order == "compile first":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    handle = offload(model)
    if order == "offload first":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.warns(ebbtide.EbbtideWarning, match="graphs larger than its blocks"):
        results = train(model, call=compiled)
    assert_equal(results, expected)
    check_no_graph_break()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    check_moved(handle.stats())


def test_a_model_inside_of_a_larger_graph_warns_and_is_right():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, batch):
            return self.inner(batch)

    plain = make(Tower, CPU)
    expected = train(plain, call=torch.compile(Around(plain), backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()

    model = make(Tower, CPU)
    handle = offload(model)
    with pytest.warns(ebbtide.EbbtideWarning, match="compiled as a whole with offloading inside.*block.compile"):
        results = train(model, call=torch.compile(Around(model), backend="aot_eager", fullgraph=True))
    assert_equal(results, expected)
    assert handle.stats().out.count == 0


@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_an_interrupt_leaves_hooks_and_compiler_as_they_were(how):
    def interrupted(_graph, _inputs):
        def run(*_args):
            raise KeyboardInterrupt

        return run

    model = make(Tower, CPU)
    handle = ebbtide.offload(model, store="mock", min_bytes=1, max_slowdown=0.5)
    call = torch.compile(model, backend=interrupted)
    if how == "model.compile":
        model.compile(backend=interrupted)
        call = model
    with pytest.raises(KeyboardInterrupt):
        call(tokens(CPU))
    assert handle._attachment.session() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch._C._dynamo.eval_frame.set_eval_frame(None) is None


def test_offload_of_what_torch_compile_returned():
    plain = make(Tower, CPU)
    expected = train(plain, call=torch.compile(plain, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()

    model = torch.compile(make(Tower, CPU), backend="aot_eager", fullgraph=True)
    handle = offload(model)
    with pytest.warns(ebbtide.EbbtideWarning, match="graphs larger than its blocks"):
        results = train(model)
    assert_equal(results, expected)
    assert handle.stats().out.count > 0


class ByKeyword(Tower):
    def forward(self, *, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)


def test_batches_by_keyword_are_seen_outside_of_torch_compile():
    """Otherwise all batch sizes would share one plan."""
    model = torch.compile(make(ByKeyword, CPU), backend="aot_eager")
    handle = ebbtide.offload(model, store="mock", min_bytes=1)
    sizes = []
    for rows in (2, 3):
        model(tokens=tokens(CPU, rows=rows)).backward()
        sizes.append(handle._attachment.tokens)
    assert sizes == [2 * 8, 3 * 8]
    handle.remove()
    assert "_compiled_call_impl" not in {**model.__dict__, **model._orig_mod.__dict__}
    model(tokens=tokens(CPU, rows=4)).backward()
    assert handle._attachment.tokens == 3 * 8


def test_an_interrupt_inside_what_torch_compile_returned_leaves_no_hooks_behind():
    def interrupted(_graph, _inputs):
        def run(*_args):
            raise KeyboardInterrupt

        return run

    model = torch.compile(make(Tower, CPU), backend=interrupted)
    handle = offload(model)
    with pytest.warns(ebbtide.EbbtideWarning, match="graphs larger"), pytest.raises(KeyboardInterrupt):
        model(tokens(CPU))
    assert handle._attachment.session() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_compiled_backward_owns_what_it_unpacks():
    """Donated buffers: compiled backward may write into saved tensors; a second tensor of the bytes must not see it."""
    block = make(lambda: Layer(16), CPU)
    twin = copy.deepcopy(block)
    block.compile(backend="inductor", fullgraph=True)
    twin.compile(backend="inductor", fullgraph=True)
    rig = Rig()

    def run(module, context):
        batch = Data(CPU).leaf(2, 8, 16)
        with context:
            x = module(batch).sin()  # saved inside and outside of the compiled block
            loss = (module(x) * x).exp().mean()
        return finish(loss, batch, module)

    for _ in range(3):
        expected = run(twin, contextlib.nullcontext())
        assert_equal(run(block, rig.context), expected)
        block.zero_grad()
        twin.zero_grad()
    check_moved(rig.stats)
    rig.check_at_rest()


def test_tensors_read_by_a_compiled_backward_are_not_fetched_again():
    # A window larger than the step: the prefetch wraps around, and passes the saved tensors of the running node.
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    handle = offload(model, prefetch="1GiB")
    fetched = []
    handle.subscribe(lambda event: fetched.append(event.site) if event.kind is ebbtide.EventKind.FETCHED else None)
    for step in range(STEPS):
        fetched.clear()
        finish(model(tokens(CPU, step)), model)
    handle.remove()
    assert fetched
    assert len(fetched) == len(set(fetched))


def test_include_and_keep_last_reach_compiled_blocks():
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    handle = offload(model, include="layers.*", keep_last=1)
    expected = make(Tower, CPU)
    compile_blocks(expected, "aot_eager")
    assert_equal(train(model), train(expected))
    kept = handle.stats().kept
    assert kept[Reason.KEEP_LAST].count > 0
    assert kept[Reason.OUTSIDE].count > 0
    check_moved(handle.stats())


def test_remove_gives_the_compiled_call_back():
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    calls = [layer._compiled_call_impl for layer in model.layers]
    handle = offload(model)
    loss = model(tokens(CPU))
    assert [layer._compiled_call_impl for layer in model.layers] != calls
    handle.remove()
    assert [layer._compiled_call_impl for layer in model.layers] == calls
    finish(loss, model)
    assert gradients(model)


def test_a_context_inside_a_compiled_function_breaks_the_graph():
    rig = Rig()

    def step(x):
        with rig.context:
            return x.exp().sin().sum()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(step, backend="aot_eager", fullgraph=True)(Data(CPU).leaf(6, 8))


# -- compiled into CUDA graphs, where the compiler can -----------------------------------------------------------------


def in_cuda_graphs(how):
    """A model in blocks, or as a whole, with the mode for CUDA graphs: a CPU has none, and everything else is alike."""
    model = make(Tower, CPU)
    if how == "blocks":
        for layer in model.layers:
            layer.compile(mode="reduce-overhead")
    elif how == "wrapped blocks":
        model.layers = nn.ModuleList(torch.compile(layer, mode="reduce-overhead") for layer in model.layers)
    elif how == "model.compile":
        model.compile(mode="reduce-overhead")
    return model, torch.compile(model, mode="reduce-overhead") if how == "torch.compile" else model


@pytest.mark.parametrize("how", ["blocks", "wrapped blocks", "model.compile", "torch.compile"])
def test_tensors_in_cuda_graphs_stay(how):
    plain, call = in_cuda_graphs(how)
    expected = train(plain, call=call)
    torch._dynamo.reset()
    model, call = in_cuda_graphs(how)
    handle = offload(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ebbtide.EbbtideWarning)
        assert_equal(train(model, call=call), expected)
    is_whole = "compile" in how
    said = "moved nothing in its first forward: 11 saved tensors (16.12 KiB) its region is compiled into CUDA graphs"
    assert any(said in str(warning.message) for warning in seen) is is_whole
    stats = handle.stats()
    assert stats.kept[Reason.COMPILED_CAPTURE].count > 0
    assert (stats.out.count > 0) is not is_whole  # of blocks, what is saved outside


@pytest.mark.parametrize("how", ["blocks", "torch.compile"])
@pytest.mark.parametrize("settings", [{"recipe": "recompute"}, {"budget": "64GiB"}])
def test_regions_in_cuda_graphs_are_never_recomputed(how, settings):
    plain, call = in_cuda_graphs(how)
    expected = train(plain, call=call)
    torch._dynamo.reset()
    if how == "torch.compile" and "recipe" in settings:
        settings = {"recipe": {"(the model)": "recompute"}}
    model, call = in_cuda_graphs(how)
    handle = ebbtide.offload(model, store="mock", min_bytes=1, **settings)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ebbtide.EbbtideWarning)
        assert_equal(train(model, call=call), expected)
    said = "was not prepared for recomputation although its recipe says 'recompute': it is compiled into CUDA graphs"
    assert [said in str(warning.message) for warning in seen].count(True) == 1
    assert handle.stats().recomputed.count == 0
    for number in range(STEPS, 12):
        finish(call(tokens(CPU, number)), model)
    assert not handle.plan.status
    if "budget" in settings:
        assert {recipe.action for recipe in handle.recipes.values()} == {"keep"}
