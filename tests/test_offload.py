"""`offload` on models: moved tensors, unchanged properties of the module, refused settings."""

import contextlib
import copy
import functools
import threading
import warnings

import pytest
import torch
from cases import Block, Data, Transformer, finish, gradients, make, tokens
from support import HandleRig, assert_equal
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide._config import OffloadConfig
from ebbtide._devices.sim import SimDevice
from ebbtide._dry_run import measure
from ebbtide._engine.context import HookContext
from ebbtide._offload import OffloadHandle, handle_of
from ebbtide._types import Reason

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


def offload(model, **settings):
    return ebbtide.offload(model, **{"store": "mock", "window": 1, "min_bytes": 1, **settings})


def three_steps(model, call=None):
    """Losses, gradients and final weights of three steps with SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = []
    for step in range(3):
        loss = (call or model)(tokens(CPU, step))
        loss.backward()
        results += [loss.detach(), *(grad.clone() for grad in gradients(model))]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(p.detach().clone() for p in model.parameters())]


def check_three_steps(handle, model, call=None):
    assert_equal(three_steps(model, call), three_steps(make(Transformer, CPU)))
    assert handle.stats().out.count > 0
    assert handle.stats().inbound.count > 0


WALKS = [
    "buffers", "parameters", "modules", "children",
    "named_buffers", "named_parameters", "named_modules", "named_children",
]  # fmt: skip


class Wrapper(nn.Module):
    """Has lists under the names of methods, like `buffers` of Megatron's DistributedDataParallel."""

    def __init__(self, module, names):
        super().__init__()
        self.module = module
        for name in names:
            setattr(self, name, [])

    def forward(self, *args):
        return self.module(*args)


@pytest.mark.parametrize("names", [["buffers"], WALKS], ids=["buffers", "all"])
@pytest.mark.parametrize(
    "settings",
    [
        {"store": "mock", "mode": "all", "exclude": ["layers.0"], "window": 1},
        {"store": "mock", "include": nn.Linear, "window": 1},
        {"store": "mock", "recipe": {"layers.*": "recompute", "mlp": "keep"}, "window": 1},
        {"store": "disk", "budget": "64GiB"},
        {"store": "disk"},
    ],
    ids=str,
)
def test_lists_of_a_wrapper_under_names_of_methods_are_not_called(names, settings):
    inner, twin = make(Transformer, CPU), make(Transformer, CPU)
    wrapper = Wrapper(inner, names)
    handle = ebbtide.offload(wrapper, min_bytes=1, **settings)
    for seed in range(5):
        results = []
        for called, owner in ((wrapper, inner), (twin, twin)):
            owner.zero_grad()
            loss = called(tokens(CPU, seed))
            loss.backward()
            results.append([loss.detach(), *gradients(owner)])
        assert_equal(*results)
    assert {f"layers.{k}" for k in range(3)} <= handle.regions.keys()
    assert handle.stats().out.count > 0 or settings == {"store": "disk"}
    assert handle.stats().kept[Reason.PARAMETER].count > 0


def test_a_wrapper_with_lists_is_measured_and_its_weights_are_known():
    wrapper = Wrapper(make(Transformer, CPU), WALKS)
    profile = measure(wrapper, tokens(CPU, 0), store="disk", min_bytes=1)
    assert len(profile.regions) >= 3
    context = ebbtide.offload_activations(store="mock", min_bytes=1, window=1)
    context.register_weights(wrapper)
    with context:
        wrapper(tokens(CPU, 0)).backward()


def test_three_steps_equal_the_plain_run_and_report_says_what_moved():
    model = make(Transformer, CPU)
    handle = offload(model)
    check_three_steps(handle, model)
    stats = handle.stats()
    assert str(stats.saved_tensors) in handle.report()
    assert Reason.PARAMETER.value in handle.report()
    assert Reason.BUFFER.value in handle.report()
    assert stats.kept[Reason.BUFFER].count == 3  # the scale, once a step
    assert list(handle.regions) == ["layers.0", "layers.1", "layers.2"]
    assert stats.host_bytes == 0


# -- include, exclude, keep_last ---------------------------------------------------------------------------------------


def saved_tensors_of(**settings):
    """Counts of moved tensors, and of tensors kept by `include` or `exclude` and by `keep_last`, in one forward."""
    model = make(Transformer, CPU)
    handle = offload(model, **settings)
    loss = model(tokens(CPU))
    twin = make(Transformer, CPU)
    assert_equal(finish(loss, model), finish(twin(tokens(CPU)), twin))
    stats = handle.stats()
    kept = {reason: tally.count for reason, tally in stats.kept.items()}
    unnamed = kept.get(Reason.OUTSIDE, 0) + kept.get(Reason.EXCLUDED, 0)
    return stats.parcels.count + stats.shared.count, unnamed, kept.get(Reason.KEEP_LAST, 0)


@pytest.mark.parametrize("names", ["layers.*.mlp", ["layers.0.mlp", "layers.[12].mlp"], "mlp", ["mlp", "*.mlp.1"]])
def test_include_moves_matches_and_exclude_the_rest(names):
    total, none, _ = saved_tensors_of()
    inside, outside, _ = saved_tensors_of(include=names)
    assert none == 0
    assert 0 < inside < total
    assert outside == total - inside
    assert saved_tensors_of(exclude=names)[:2] == (total - inside, inside)


def test_classes_are_names():
    total, _, _ = saved_tensors_of()
    linear, _, _ = saved_tensors_of(include=nn.Linear)
    gelu, _, _ = saved_tensors_of(include=[nn.GELU])
    assert 0 < gelu < linear < total
    assert saved_tensors_of(include=(nn.GELU, nn.Linear))[0] == gelu + linear
    assert saved_tensors_of(exclude=Block)[0] < total


def test_of_nested_choices_the_innermost_decides():
    total, _, _ = saved_tensors_of()
    blocks, _, _ = saved_tensors_of(include="layers.*")  # the blocks, not the modules inside
    mlp, _, _ = saved_tensors_of(include="layers.*.mlp")
    gelu, _, _ = saved_tensors_of(include="layers.*.mlp.2")
    assert saved_tensors_of(include="layers.*", exclude="layers.*.mlp")[0] == blocks - mlp
    assert saved_tensors_of(exclude="layers.*.mlp", include=["layers.*.mlp.2"])[0] == gelu
    assert saved_tensors_of(include=["layers.*", "layers.*.mlp.2"], exclude="layers.*.mlp")[0] == blocks - mlp + gelu
    assert blocks < total


class Gate(nn.Module):
    """Sigmoid saves its output, and the linear layer behind saves the same as its input."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Sigmoid(), nn.Linear(64, 64)

    def forward(self, x):
        return self.out(self.gate(x)).square().sum()


@pytest.mark.parametrize(
    ("names", "shared", "excluded"),
    [({"include": "gate"}, 1, 0), ({"exclude": "out"}, 0, 1), ({"exclude": "gate"}, 0, 1)],
)
def test_what_an_included_module_moves_is_held_by_no_other(names, shared, excluded):
    """Memory is free once nobody holds it. What an excluded module saves stays all the same."""
    model, twin = make(Gate, CPU), make(Gate, CPU)
    x = torch.randn(256, 64, requires_grad=True)
    handle = offload(model, **names)
    for _ in range(4):
        assert_equal(finish(model(x), model), finish(twin(x), twin))
    stats = handle.stats()
    assert stats.shared.count == 4 * shared
    assert (Reason.EXCLUDED in stats.kept) == bool(excluded)
    assert shared == 0 or stats.freed_nothing.count == 0


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


class Aside(nn.Module):
    """Sigmoid saves its output, and the sine behind saves the same as its input, perhaps on another stream."""

    def __init__(self, stream):
        super().__init__()
        self.gate, self.sine, self.stream = nn.Sigmoid(), Sine(), stream

    def forward(self, x):
        y = self.gate(x + 1.0)
        with self.stream():
            return self.sine(y)


@pytest.mark.parametrize("is_aside", [False, True])
def test_what_leaves_is_shared_with_another_stream(is_aside):
    rig = HandleRig(SimDevice(0, "late"))
    model = Aside(functools.partial(rig.device.compute_on, "side") if is_aside else contextlib.nullcontext)
    context = HookContext(rig.hook_context.limits, lambda _: True)
    handle = OffloadHandle(model, OffloadConfig(include=("gate",)), rig.engines, context)
    handle._install()
    x = torch.randn(64, 64, requires_grad=True)
    model(x).sum().backward()
    twin = x.detach().clone().requires_grad_()
    (twin + 1.0).sigmoid().sin().sum().backward()
    assert (handle.stats().parcels.count, handle.stats().shared.count) == (1, 1)
    assert torch.equal(x.grad, twin.grad)
    assert rig.device.faults == []


def test_keep_last_keeps_the_last_blocks():
    moved = [saved_tensors_of(keep_last=count) for count in range(4)]
    total = moved[0][0]
    assert moved[0][2] == 0
    assert [travelled + stayed for travelled, _, stayed in moved] == [total] * 4
    assert total > moved[1][0] > moved[2][0] > moved[3][0] > 0


def test_include_does_not_reach_into_the_last_blocks():
    two, _, _ = saved_tensors_of(include="layers.[01].mlp")
    assert saved_tensors_of(include="layers.*.mlp", keep_last=1)[0] == two


def test_names_without_a_match_list_near_names():
    model = make(Transformer, CPU)
    with pytest.raises(
        ebbtide.ModuleError, match=r"include='layer\.\*\.mpl' matches no module of T.*'layers\.\*\.mlp'"
    ):
        offload(model, include="layer.*.mpl")
    with pytest.raises(
        ebbtide.ModuleError, match=r"exclude=Conv2d: Transformer has no module of this class\. It has 'B"
    ):
        offload(model, exclude=["layers.0", nn.Conv2d])
    with pytest.raises(ebbtide.ModuleError, match="keep_last=4, but only 3 repeated blocks"):
        offload(model, keep_last=4)
    with pytest.raises(ebbtide.ModuleError, match="means Transformer itself"):
        offload(model, include=Transformer)
    check_three_steps(offload(model), model)  # nothing stays half applied


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "auto!"}, "mode='auto!'"),
        ({"keep_last": -1}, "keep_last=-1"),
        ({"keep_last": True}, "keep_last=True"),
        ({"store": "host"}, "frees nothing for Transformer on.*store='disk'"),
        ({"store": "s3"}, "store='s3' is not a store"),
        ({"window": "0"}, "window='0'"),
        ({"host_limit": -1}, "host_limit=-1"),
        ({"min_bytes": None}, "min_bytes=None"),
        ({"keep_last": "2"}, "keep_last='2'"),
        ({"include": 3}, "include=3: expected names or patterns of modules"),
        ({"exclude": ["layers.0", nn.Linear(1, 1)]}, "exclude=Linear.*expected names or patterns of modules"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises((ebbtide.ConfigError, ebbtide.ModuleError), match=message):
        offload(make(Transformer, CPU), **settings)


def test_a_function_is_refused():
    with pytest.raises(ebbtide.ModuleError, match=r"offload\(function\): expected a torch.nn.Module"):
        ebbtide.offload(lambda x: x)


def test_none_names_no_module():
    model = make(Transformer, CPU)
    check_three_steps(offload(model, include=None, exclude=None, regions=None), model)


# -- the module stays unchanged ---------------------------------------------------------------------------------------


def test_names_and_state_dict_are_unchanged():
    model = make(Transformer, CPU)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()]
    handle = offload(model)
    assert list(model.state_dict()) == list(before)
    assert ([name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()]) == names
    assert type(model) is Transformer
    three_steps(model)
    model.load_state_dict(before)
    assert_equal(list(model.state_dict().values()), list(before.values()))
    handle.remove()


def test_a_second_application_is_refused():
    model = make(Transformer, CPU)
    handle = offload(model)
    with pytest.raises(ebbtide.ModuleError, match="already applied to 'Transformer': keep the first handle"):
        offload(model)
    with pytest.raises(ebbtide.ModuleError, match="already applied to '0'"):
        offload(nn.Sequential(model, nn.ReLU()))
    handle.remove()
    check_three_steps(offload(model), model)


def test_remove_undoes_everything():
    model = make(Transformer, CPU)
    hooks = lambda: [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]  # noqa: E731
    before = hooks(), set(model.__dict__)
    handle = offload(model, include="layers.*.mlp")
    assert hooks() != before[0]
    loss = model(tokens(CPU))
    handle.remove()
    handle.remove()
    assert (hooks(), set(model.__dict__)) == before
    twin = make(Transformer, CPU)
    assert_equal(finish(loss, model), finish(twin(tokens(CPU)), twin))  # the graph in flight still runs
    count = handle.stats().saved_tensors
    model(tokens(CPU))
    assert handle.stats().saved_tensors == count


def materialised(model):
    """With the weights of `make`."""
    model.to_empty(device=CPU)
    model.load_state_dict(make(Transformer, CPU).state_dict())
    return model


@pytest.mark.parametrize(
    "settings", [{}, {"recipe": "recompute"}, {"window": None, "budget": "64GiB"}], ids=["all", "recipe", "budget"]
)
def test_a_model_on_the_meta_device_is_planned_for_after_loading(settings):
    model = Transformer().to("meta")
    handle = offload(model, **settings)
    assert list(handle.regions) == ["layers.0", "layers.1", "layers.2"]
    with torch.no_grad():
        model(tokens("meta"))
    assert handle._planning is None or handle._planning.controller is None  # the device is unknown so far
    materialised(model)
    assert_equal(three_steps(model), three_steps(make(Transformer, CPU)))
    assert handle.stats().out.count > 0
    assert (handle._planning is not None and handle._planning.controller is not None) == ("budget" in settings)


def test_a_recipe_for_a_model_on_the_meta_device_holds_after_loading():
    model = Transformer().to("meta")
    handle = offload(model, window=None, budget="64GiB")
    handle.set_recipe("recompute")
    assert_equal(three_steps(materialised(model)), three_steps(make(Transformer, CPU)))
    assert set(handle.recipes.values()) == {ebbtide.Recipe("recompute")}
    assert handle._planning is None


def test_a_model_from_the_meta_device_is_checked_after_loading():
    model = Transformer().to("meta")
    offload(model, store="host")
    with pytest.raises(ebbtide.ModuleError, match="store='host' frees nothing for Transformer"):
        materialised(model)(tokens(CPU))


def test_a_part_on_the_meta_device_is_refused():
    model = make(Transformer, CPU)
    model.layers[1].to("meta")
    with pytest.raises(ebbtide.ModuleError, match="a part of Transformer is on the meta device: materialise it first"):
        offload(model)


def test_mode_off_leaves_the_module_alone():
    model = make(Transformer, CPU)
    handle = offload(model, mode="off")
    assert_equal(three_steps(model), three_steps(make(Transformer, CPU)))
    assert handle.stats().saved_tensors == 0
    assert not model._forward_hooks


def test_disabled_by_the_environment(monkeypatch):
    model = make(Transformer, CPU)
    handle = offload(model)
    monkeypatch.setenv("EBBTIDE_DISABLE", "1")
    model(tokens(CPU))
    assert handle.stats().saved_tensors == 0
    monkeypatch.delenv("EBBTIDE_DISABLE")
    check_three_steps(handle, model)


@pytest.mark.parametrize(("window", "warned"), [("512MiB", 1), (1, 0)])
@pytest.mark.parametrize("entry_point", ["offload", "offload_activations"])
def test_warning_once_if_all_that_should_move_fits_into_the_window(entry_point, window, warned):
    model = make(Transformer, CPU)
    settings, context = {"store": "mock", "min_bytes": 1, "window": window}, contextlib.nullcontext()
    if entry_point == "offload":
        ebbtide.offload(model, **settings)
    else:
        context = ebbtide.offload_activations(**settings)

    def call(batch):
        with context:
            return model(batch)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            three_steps(model, call)
    texts = [str(each.message) for each in seen]
    found = [text for text in texts if "moves nothing from its second step on: all of it" in text]
    assert [text.partition("(")[0] for text in found] == [entry_point] * warned


def test_warning_when_nothing_moved_names_the_reasons_once():
    model = make(Transformer, CPU)
    handle = offload(model, min_bytes="1GiB")
    with torch.no_grad():
        model(tokens(CPU))
    with pytest.warns(
        ebbtide.EbbtideWarning, match=r"offload\(Transformer\) moved nothing in its first forward: .*smaller than"
    ) as seen:
        three_steps(model)
    assert len(seen) == 1
    assert handle.stats().out.count == 0


# -- the handle --------------------------------------------------------------------------------------------------------


def test_a_handle_has_few_public_names():
    names = {name for name in dir(offload(make(Transformer, CPU))) if not name.startswith("_")}
    others = {"stats", "report", "plan", "set_plan", "profile", "recipes", "set_recipe", "regions", "subscribe"}
    assert names == {*others, "is_plan_frozen", "replan", "remove", "save"}


def test_a_handle_is_a_context_manager():
    model = make(Transformer, CPU)
    with pytest.raises(ZeroDivisionError), offload(model) as handle:
        assert handle_of(model) is handle
        1 / 0  # noqa: B018
    assert handle_of(model) is None
    assert not model._forward_hooks


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "mode all, installed"),
        ({"mode": "off"}, "mode off, off"),
        ({"recipe": "recompute"}, "recipe recompute, installed"),
        ({"recipe": {"layers.0": "keep", "layers.1": "recompute"}}, "recipes of 2 regions, installed"),
        ({"mode": "auto", "window": None}, "mode auto, measuring step 1 of 3"),
        ({"budget": "64GiB", "window": None}, "budget 64GiB, measuring step 1 of 3"),
    ],
)
def test_a_handle_prints_goal_and_state(settings, text):
    handle = offload(make(Transformer, CPU), **settings)
    assert repr(handle) == f"<OffloadHandle of Transformer, {text}>"
    handle.remove()
    assert repr(handle).endswith(", off>" if "off" in settings.values() else ", removed>")


def test_a_planned_handle_prints_so():
    model = make(Transformer, CPU)
    handle = offload(model, budget="64GiB", window=None)
    three_steps(model)
    model(tokens(CPU)).backward()
    assert repr(handle) == "<OffloadHandle of Transformer, budget 64GiB, planned>"


def test_the_plan_of_a_handle_is_a_table_in_notebooks():
    plan = ebbtide.Plan({"layers.0": ebbtide.RegionPlan("keep", reason="a < b")})
    html = offload(make(Transformer, CPU), plan=plan)._repr_html_()
    assert '<th scope="row">layers.0</th><td class="text">keep</td>' in html
    assert "a &lt; b" in html


# -- ways to run a model -----------------------------------------------------------------------------------------------


def test_exception_in_forward_leaves_no_hook_behind():
    model = make(Transformer, CPU)
    handle = offload(model, include="layers.*.mlp")
    hook = model.layers[1].mlp[2].register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        model(tokens(CPU))
    hook.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert handle._attachment.session() is None
    check_three_steps(handle, model)


def _fail(module, args, output):
    raise ZeroDivisionError


def test_no_grad_and_eval_between_steps():
    model = make(Transformer, CPU)
    handle = offload(model)

    def call(batch):
        with torch.no_grad():
            model.eval()(batch)
        with torch.inference_mode():
            model(batch)
        return model.train()(batch)

    check_three_steps(handle, model, call)


def test_checkpointed_blocks_are_left_to_their_checkpoint():
    class Checkpointed(Transformer):
        def forward(self, batch):
            x = self.embedding(batch) * self.scale
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x).square().mean()

    plain = make(Checkpointed, CPU)
    model = make(Checkpointed, CPU)
    handle = offload(model)
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        assert_equal(finish(model(tokens(CPU)), model), finish(plain(tokens(CPU)), plain))
    assert handle.stats().inbound.count > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_model_inside_a_checkpoint_stays_checkpointed(use_reentrant):
    def run(model):
        torch.manual_seed(0)
        loss = checkpoint(model, tokens(CPU).float().requires_grad_(), use_reentrant=use_reentrant)
        return finish(loss, model)

    class FromFloats(Transformer):
        def forward(self, floats):
            return super().forward(floats.long()) + floats.sum() * 0.0

    model = make(FromFloats, CPU)
    handle = offload(model)
    with _nothing_may_move():
        assert_equal(run(model), run(make(FromFloats, CPU)))
    if not use_reentrant:
        assert handle.stats().out.count == 0


@contextlib.contextmanager
def _nothing_may_move():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ebbtide.EbbtideWarning)
        yield


def test_inside_a_context_the_handle_is_the_innermost():
    model = make(Transformer, CPU)
    handle = offload(model)
    context = ebbtide.offload_activations(store="mock", window=1, min_bytes=1, prefetch=12345)

    def call(batch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ebbtide.EbbtideWarning)
            with context:
                return model(batch)

    check_three_steps(handle, model, call)
    assert context.stats().saved_tensors == 0


def test_two_models_and_a_model_within_a_model():
    whole = nn.Sequential(make(lambda: Block(16), CPU, 1), make(lambda: Block(16), CPU, 2))
    twin = copy.deepcopy(whole)
    handles = [offload(block) for block in whole]
    batch = Data(CPU).tensor(2, 8, 16)
    for _ in range(3):
        whole.zero_grad()
        twin.zero_grad()
        assert_equal(finish(whole(batch).exp().mean(), whole), finish(twin(batch).exp().mean(), twin))
    for handle in handles:
        assert handle.stats().inbound.count > 0


def test_a_region_entered_twice_in_one_forward():
    class Twice(Transformer):
        def forward(self, batch):
            x = self.embedding(batch)
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x)
            return self.head(x).square().mean()

    model, plain = make(Twice, CPU), make(Twice, CPU)
    handle = offload(model)
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        assert_equal(finish(model(tokens(CPU)), model), finish(plain(tokens(CPU)), plain))
    assert len(handle._attachment.context._numbers[0, -1, "layers.0"]._sites) == 2
    assert handle.stats().inbound.count > 0


def test_two_threads_run_one_model_each_through_one_store():
    plain = three_steps(make(Transformer, CPU))
    models = [make(Transformer, CPU), make(Transformer, CPU)]
    handles = [offload(model) for model in models]
    results = {}
    barrier = threading.Barrier(2)

    def work(rank):
        barrier.wait()
        results[rank] = three_steps(models[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, handle in enumerate(handles):
        assert_equal(results[rank], plain)
        assert handle.stats().inbound.count > 0


def test_default_store_is_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("EBBTIDE_DISK_FOLDER", str(tmp_path))
    model = make(Transformer, CPU)
    check_three_steps(offload(model, store=None), model)


@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
@pytest.mark.parametrize("order", ["offload outside", "offload inside"])
def test_data_parallel(process_group, order):
    model = make(Transformer, CPU)
    if order == "offload inside":
        handle = offload(model, include="layers.*")
    parallel = nn.parallel.DistributedDataParallel(model)
    if order == "offload outside":
        handle = offload(parallel, include="layers.*")
    assert list(handle.regions) == ["layers.0", "layers.1", "layers.2"]
    check_three_steps(handle, model, parallel)
    assert handle.stats().kept[Reason.OUTSIDE].count > 0


@pytest.mark.filterwarnings("ignore:offload.Detached. moved nothing")
def test_moved_weights_are_known_again():
    """A tensor detached from a weight is no activation."""

    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x):
            return (x * self.weight.detach()).sum()

    model = Detached()
    handle = offload(model, store="mock", mode="all", min_bytes=1, window=1)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        model(torch.ones(64, 64, dtype=dtype, requires_grad=True)).backward()
        assert handle.stats().kept[Reason.PARAMETER].count > 0
        assert handle.stats().out.nbytes == 0
    handle.remove()


def test_parameters_that_the_first_forward_makes():
    def train(prepare):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4))
        handle = prepare(model)
        results = []
        for seed in range(2):
            loss = model(torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))).square().sum()
            loss.backward()
            results.append(loss.detach())
        return [*results, *(p.grad for p in model.parameters())], handle

    ours, handle = train(offload)
    assert handle.stats().out.nbytes > 0
    assert_equal(ours, train(lambda model: None)[0])
