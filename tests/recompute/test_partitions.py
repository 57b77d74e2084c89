"""Compiled regions at activation memory budgets: gradients of the same partition, one compilation for each class."""

import logging
import threading

import pytest
import torch
from cases import finish, make, tokens
from support import assert_equal
from test_compile import CPU, Layer, check_no_graph_break, compile_blocks, offload, train
from test_compile import Tower as SmallTower
from torch import nn
from torch._functorch import config

import ebbtide
from ebbtide import ConfigError, ModuleError, Plan, Recipe, RegionPlan
from ebbtide._types import Reason

# The compiler warns about its own work.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

SETTING = "activation_memory_budget"


class Block(Layer):
    """Saves other tensors at each of the budgets 0, 0.5 and 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x.sin()).exp().sin().tanh())


class Tower(SmallTower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(3))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert config.activation_memory_budget == 1.0
    torch._dynamo.reset()
    ebbtide.release_memory()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def at(budget, action="keep", **changes):
    return Recipe(action, activation_memory_budget=budget, **changes)


def twin(backend, budget):
    """Results of the blocks compiled by the user at `budget`, and the bytes they save."""
    model = make(Tower, CPU)
    compile_blocks(model, backend)
    saved = []

    def pack(t):
        saved.append(t.nbytes)
        return t

    with config.patch(SETTING, budget), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = train(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return results, sum(saved)


@pytest.mark.parametrize(
    ("backend", "budget"), [("aot_eager", 0.0), ("aot_eager", 0.5), ("aot_eager", 1.0), ("inductor", 0.5)]
)
def test_results_and_saved_tensors_are_of_the_partition(backend, budget):
    expected, saved_bytes = twin(backend, budget)
    for action in ("keep", "offload", "recompute"):
        model = make(Tower, CPU)
        compile_blocks(model, backend)
        handle = offload(model, recipe=at(budget, action))
        assert_equal(train(model), expected)
        check_no_graph_break()
        assert graphs() == 1  # for three blocks, and each forward that is recomputed
        if action != "recompute":
            stats = handle.stats()
            counts = [*stats.kept.values(), stats.parcels, stats.shared]
            assert sum(count.nbytes for count in counts) == saved_bytes
        assert handle.stats().unable == {}
        handle.remove()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def test_less_is_saved_at_a_smaller_budget():
    saved = [twin("aot_eager", budget)[1] for budget in (0.0, 0.5, 1.0)]
    assert saved == sorted(set(saved))


@pytest.mark.parametrize("how", ["compile", "torch.compile"])
def test_blocks_of_one_class_share_a_compilation_for_each_budget(how):
    def compiled():
        model = make(Tower, CPU)
        if how == "compile":
            compile_blocks(model, "aot_eager")
        else:
            layers = [torch.compile(layer, backend="aot_eager", fullgraph=True) for layer in model.layers]
            model.layers = nn.ModuleList(layers)
        return model

    expected = train(compiled())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = compiled()
    recipes = {"layers.0": at(0.5), "layers.1": at(0.5, "offload"), "layers.2": at(0)}
    handle = offload(model, recipe=recipes)
    assert_equal(train(model), expected)
    assert graphs() == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for other in (at(0.5, "recompute"), at(0, "offload"), recipes, at(0.5)):
            handle.set_recipe(other)
            model.zero_grad()
            assert_equal(train(model), expected)
    assert graphs() == 2
    handle.set_recipe("keep")
    model.zero_grad()
    assert_equal(train(model), expected)
    assert graphs() == 3  # as the user compiled them


class Counting:
    """The user's backend: notes the budget in force, and the settings of the compiler."""

    def __init__(self):
        self.budgets = []

    def __call__(self, graph, inputs):
        self.budgets.append(config.activation_memory_budget)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def test_the_user_s_backend_compiles_with_the_budget_in_force():
    model, backend = make(Tower, CPU), Counting()
    compile_blocks(model, backend)
    handle = offload(model, recipe={"layers.0": at(0.5), "layers.1": at(0), "layers.2": "keep"})
    train(model)
    assert backend.budgets == [0.5, 0.0, 1.0]
    handle.remove()
    train(model)
    assert backend.budgets == [0.5, 0.0, 1.0, 1.0]


def test_no_budget_uses_up_the_recompilations_of_another():
    model, backend = make(Tower, CPU), Counting()
    compile_blocks(model, backend)
    offload(model, recipe={"layers.0": at(0.5), "layers.1": at(0), "layers.2": at(1)})
    with torch._dynamo.config.patch(recompile_limit=1):
        train(model)
    assert backend.budgets == [0.5, 0.0, 1.0]


def test_the_user_s_own_budget_comes_back():
    model, backend = make(Tower, CPU), Counting()
    compile_blocks(model, backend)
    offload(model, recipe={"layers.0": at(0.5)})
    with config.patch(SETTING, 0.7):
        train(model)
        assert config.activation_memory_budget == 0.7
    assert backend.budgets == [0.5, 0.7]


def test_a_failing_compilation_leaves_the_setting_alone():
    def backend(_graph, _inputs):
        raise KeyboardInterrupt

    model = make(Tower, CPU)
    compile_blocks(model, backend)
    offload(model, recipe=at(0.5))
    with pytest.raises(KeyboardInterrupt):
        model(tokens(CPU))
    assert config.activation_memory_budget == 1.0


def test_dynamic_shapes_stay_the_user_s_choice():
    for dynamic, count in ((True, 1), (False, 3)):
        model, backend = make(Tower, CPU), Counting()
        for layer in model.layers:
            layer.compile(backend=backend, dynamic=dynamic)
        offload(model, recipe=at(0.5))
        for rows in (2, 3, 5):
            model(tokens(CPU, rows=rows)).backward()
        assert backend.budgets == [0.5] * count
        torch._dynamo.reset()


class Breaks(Block):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


class BreakingTower(SmallTower):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Breaks(16) for _ in range(3))


def test_fullgraph_refuses_a_graph_break_as_before():
    model = make(BreakingTower, CPU)
    compile_blocks(model, "aot_eager")
    offload(model, recipe=at(0.5))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(tokens(CPU))


def test_a_block_in_several_graphs_is_right_and_noticed():
    expected = make(BreakingTower, CPU)
    model = make(BreakingTower, CPU)
    for layer in (*expected.layers, *model.layers):
        layer.compile(backend="aot_eager")
    handle = offload(model, recipe=at(0.5))
    assert_equal(train(model), train(expected))
    assert handle._attachment.partitions.broken == {Breaks}
    assert handle._attachment.partitionable() == {}


def test_hooks_of_the_block_run_in_python():
    seen = []

    def hook(_module, _args, _output):
        seen.append(torch.compiler.is_compiling())

    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    for layer in model.layers:
        layer.register_forward_hook(hook)
    offload(model, recipe=at(0.5))
    train(model)
    assert seen == [False] * 12
    assert graphs() == 1


def test_without_grad_the_user_s_call_runs():
    model, backend = make(Tower, CPU), Counting()
    compile_blocks(model, backend)
    offload(model, recipe=at(0.5))
    with torch.no_grad():
        model(tokens(CPU))
    assert backend.budgets == [1.0]


def test_a_block_compiled_anew_is_compiled_with_the_new_settings():
    model, first, second = make(Tower, CPU), Counting(), Counting()
    compile_blocks(model, first)
    offload(model, recipe=at(0.5))
    train(model)
    compile_blocks(model, second)
    model(tokens(CPU)).backward()
    assert (first.budgets, second.budgets) == ([0.5], [0.5])


@pytest.mark.parametrize("are_by_thread", [True, False])
def test_threads_compile_models_of_their_own(monkeypatch, are_by_thread):
    """While one thread compiles, hooks of the other run, and each compiles at the budget of its recipe. Also if
    settings belong to the process, as in torch 2.11."""
    if not are_by_thread:
        monkeypatch.setattr("ebbtide._utils.torch_private._has_settings_by_thread", lambda _: False)
    expected, _ = twin("aot_eager", 1.0)
    models, backends, results = {}, {}, {}
    for budget in (0.0, 0.5):
        models[budget], backends[budget] = make(Tower, CPU), Counting()
        compile_blocks(models[budget], backends[budget])
        offload(models[budget], recipe=at(budget))
    batch = tokens(CPU, 0)

    def run(budget):
        results[budget] = models[budget](batch).detach()

    threads = [threading.Thread(target=run, args=(budget,)) for budget in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_equal([results[0.0], results[0.5]], [expected[0]] * 2)
    assert {budget: backend.budgets for budget, backend in backends.items()} == {0.0: [0.0], 0.5: [0.5]}


def test_a_graph_in_flight_recomputes_at_its_budget_after_remove():
    plain, model = make(Tower, CPU), make(Tower, CPU)
    compile_blocks(plain, "aot_eager")
    with config.patch(SETTING, 0.5):
        expected = finish(plain(tokens(CPU, 0)), plain)
    compile_blocks(model, "aot_eager")
    handle = offload(model, recipe=at(0.5, "recompute"))
    loss = model(tokens(CPU, 0))
    handle.remove()
    assert_equal(finish(loss, model), expected)
    assert graphs() == 2  # one of each model


def test_compilations_are_logged(caplog):
    model = make(Tower, CPU)
    for layer in model.layers:
        layer.compile(backend="aot_eager", dynamic=False)
    offload(model, recipe=at(0.5))
    with caplog.at_level(logging.INFO, "ebbtide"):
        for rows in (2, 3):
            model(tokens(CPU, rows=rows)).backward()
    messages = [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()]
    assert [message.partition(":")[0] for message in messages] == [
        "compiled Block at an activation memory budget of 0.5",
        "compiled Block again at an activation memory budget of 0.5",
    ]


# -- a model compiled as a whole ---------------------------------------------------------------------------------------

WHOLE = "(the model)"
SPELLINGS = [
    "offload(torch.compile)",
    "torch.compile, offload",
    "offload, torch.compile",
    "model.compile",
    "offload, model.compile",
]


def compiled_as_a_whole(how, backend, prepare=lambda module: None):
    """A model compiled as a whole, in the order of `how`: what to call, the model inside, what `prepare` returned."""
    model = make(Tower, CPU)
    if how == "offload(torch.compile)":
        call = torch.compile(model, backend=backend, fullgraph=True)
        return call, model, prepare(call)
    handle = prepare(model) if how.startswith("offload, ") else None
    call = model
    if how.endswith("model.compile"):
        model.compile(backend=backend, fullgraph=True)
    else:
        call = torch.compile(model, backend=backend, fullgraph=True)
    return call, model, handle or prepare(model)


def train_whole(call, model, steps=3):
    results = []
    for number in range(steps):
        loss = call(tokens(CPU, number))
        results += [loss.detach(), *finish(loss, model)]
    return [result.clone() for result in results]


@pytest.mark.parametrize("action", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("how", SPELLINGS)
def test_a_model_compiled_as_a_whole_is_one_region_with_a_partition(how, action):
    backend = Counting()
    with config.patch(SETTING, 0.5):
        expected = train_whole(*compiled_as_a_whole("model.compile", backend)[:2])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend.budgets.clear()
    recipe = {WHOLE: at(0.5, action)}
    call, model, handle = compiled_as_a_whole(how, backend, lambda module: offload(module, recipe=recipe))
    if how == "offload, model.compile":
        call(tokens(CPU))  # finds the compiler
        model.zero_grad()
        backend.budgets.clear()
    assert_equal(train_whole(call, model), expected)
    check_no_graph_break()
    assert backend.budgets == [0.5]
    stats = handle.stats()
    assert (stats.parcels.count > 0) is (action != "keep")
    with torch._dynamo.config.patch(error_on_recompile=True):
        model.zero_grad()
        assert_equal(train_whole(call, model), expected)
    handle.remove()
    assert "forward" not in vars(model)
    model.zero_grad()
    train_whole(call, model)
    assert backend.budgets == [0.5, 1.0] or how == "offload, model.compile"


def test_some_saved_tensors_of_the_one_graph_move():
    def run(**recipe):
        call, model, handle = compiled_as_a_whole(
            "offload(torch.compile)", "aot_eager", lambda module: offload(module, recipe={WHOLE: Recipe(**recipe)})
        )
        results = train_whole(call, model)
        stats = handle.stats()
        torch._dynamo.reset()
        return results, stats.parcels.nbytes, stats

    expected, everything, _ = run(action="offload", activation_memory_budget=0.5)
    results, some, stats = run(action="offload", activation_memory_budget=0.5, sites=(0, 1, 2))
    assert_equal(results, expected)
    assert 0 < some < everything
    assert stats.kept[Reason.RECIPE].nbytes > 0


def test_a_graph_of_the_whole_model_in_flight_recomputes_after_remove():
    expected = train_whole(*compiled_as_a_whole("model.compile", "aot_eager")[:2], steps=1)
    torch._dynamo.reset()
    for how in SPELLINGS[:4]:
        recipe = {WHOLE: Recipe("recompute")}
        call, model, handle = compiled_as_a_whole(how, "aot_eager", lambda m, r=recipe: offload(m, recipe=r))
        loss = call(tokens(CPU, 0))
        handle.remove()
        assert_equal([loss.detach(), *finish(loss, model)], expected)
        torch._dynamo.reset()


@pytest.mark.parametrize("how", SPELLINGS[:4])
def test_a_partition_for_blocks_in_a_larger_graph_is_refused(how):
    call, _, _ = compiled_as_a_whole(how, "aot_eager", lambda module: offload(module, recipe={"layers.1": at(0.2)}))
    message = r"recipe of layers.1 has activation_memory_budget=0.2, and Tower is compiled as a whole.*\(the model\)"
    with pytest.raises(ModuleError, match=message):
        call(tokens(CPU))


def test_a_partition_for_a_model_that_is_not_compiled_is_refused():
    model = make(Tower, CPU)
    offload(model, recipe={WHOLE: at(0.2)})
    with pytest.raises(ModuleError, match=r"recipe of \(the model\) has .*, and the region is not compiled"):
        model(tokens(CPU))


@pytest.mark.parametrize("how", SPELLINGS[:4])
def test_a_model_in_cuda_graphs_has_no_partition(how):
    model = make(Tower, CPU)
    recipe = {WHOLE: at(0.2)}
    handle = offload(model, recipe=recipe) if how.startswith("offload, ") else None
    call = model
    if how == "model.compile":
        model.compile(mode="reduce-overhead")
    else:
        call = torch.compile(model, mode="reduce-overhead")
    handle = handle or offload(call if how == "offload(torch.compile)" else model, recipe=recipe)
    with pytest.raises(ModuleError, match="compiled into CUDA graphs"):
        call(tokens(CPU))
    assert handle._attachment.partitionable() == {}


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_a_plan_with_budgets_is_printed_saved_and_loaded(tmp_path):
    recipes = at(0.2), at(0, "offload", sites=(1, 2)), at(0.5, "recompute", inputs="keep")
    plan = Plan({f"layers.{k}": RegionPlan(recipe) for k, recipe in enumerate(recipes)})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    shown = [line.split("  ")[1].strip() for line in str(plan).splitlines()[2:] if not line.startswith(" ")]
    assert shown == ["keep at 0.2", "offload at 0, 2 tensors", "recompute at 0.5"]
    assert str(recipes[0]) == "keep at 0.2"
    assert str(recipes[2]) == "recompute at 0.5, inputs kept"


@pytest.mark.parametrize(
    ("action", "budget", "message"),
    [
        ("keep", 1.5, "activation_memory_budget=1.5: expected a number from 0 to 1, or None"),
        ("keep", -0.1, "activation_memory_budget=-0.1: expected a number from 0 to 1"),
        ("offload", "0.2", "activation_memory_budget='0.2': expected a number from 0 to 1"),
        ("offload", True, "activation_memory_budget=True: expected a number from 0 to 1"),
        ("selective", 0.2, "means nothing to the recipe 'selective'"),
    ],
)
def test_bad_budgets_are_refused(action, budget, message):
    with pytest.raises(ConfigError, match=message):
        at(budget, action)


def test_a_region_that_is_not_compiled_is_refused():
    model = make(Tower, CPU)
    offload(model, recipe={"layers.1": at(0.2)})
    message = (
        r"recipe of layers.1 has activation_memory_budget=0.2, and the region is not compiled: call its compile\(\)"
    )
    with pytest.raises(ModuleError, match=message):
        model(tokens(CPU))


def test_a_release_of_torch_that_hides_the_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("ebbtide._model.hooks.compiler_of", lambda _: None)
    model = make(Tower, CPU)
    compile_blocks(model, "aot_eager")
    handle = offload(model, recipe=at(0.2))
    with pytest.raises(ModuleError, match=r"torch 2\.\S+ does not tell how the region was compiled: omit it, or set"):
        model(tokens(CPU))
    assert handle._attachment.partitionable() == {}


def test_a_region_in_cuda_graphs_is_refused_and_not_planned():
    model = make(Tower, CPU)
    for layer in model.layers:
        layer.compile(mode="reduce-overhead")
    handle = offload(model, recipe=at(0.2))
    with pytest.raises(ModuleError, match=r"compiled into CUDA graphs .*: compile it with mode='max-autotune-no-"):
        model(tokens(CPU))
    assert handle._attachment.partitionable() == {}
    handle.remove()
    for layer in model.layers:
        layer.compile(mode="max-autotune-no-cudagraphs")
    assert len(offload(model)._attachment.partitionable()) == 3
