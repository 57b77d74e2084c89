"""EBBTIDE_SYNCS=1 counts the lines in which the host waits for the device, by module; without, nothing runs."""

import json
import linecache
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from routing import Routed, maps_by_masks, sync_free_maps
from support import assert_equal
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide._engine.stats import Sync
from ebbtide._utils.torch_private import RUN_BACKWARD, dispatch_mode_stack

HERE = "/".join(Path(__file__).parts[-2:])


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    monkeypatch.setenv("EBBTIDE_SYNCS", "1")
    yield
    ebbtide.release_memory()
    assert dispatch_mode_stack() == []


def offload(model, **settings):
    return ebbtide.offload(model, **{"store": "mock", "window": 1, "min_bytes": 1, **settings})


class Tanh(torch.autograd.Function):
    """Waits in backward."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        if bool(grad.abs().max() < 0):
            raise AssertionError
        return grad * (1 - y * y)


class Experts(nn.Module):
    """Lines that wait: NONZERO, MASK and ITEM."""

    def __init__(self, width=8, count=2):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = scores.argmax(-1)
        y = x * 0
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]))
        likely = scores.max(-1).values > 0.5
        y = y.masked_fill(~likely[:, None], 0)
        parts = x[likely]
        scale = parts.numel() / x.numel() + scores.detach().max().item()
        return (y * scale + parts.sum()).tanh()


class Model(nn.Module):
    def __init__(self, depth=2, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), Experts(width)) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return Tanh.apply(x).square().mean()


def make(kind=Model):
    torch.manual_seed(0)
    return kind()


def step(model, seed=0):
    """Loss and gradients."""
    loss = model(torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))).sum()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [loss.detach(), *grads]


def counts(stats):
    """Waits of the forward that they are counted in, by kind, module and code of the line."""
    found = {}
    for (kind, module, line), wait in stats.syncs.items():
        path, _, number = line.rpartition(":")
        code = linecache.getline(__file__, int(number)).strip() if path == HERE else line
        assert (kind, module, code) not in found
        found[kind, module, code] = wait.count / stats.watched_forwards
        assert wait.seconds > 0
    return found


NONZERO = "rows = (chosen == number).nonzero()[:, 0]"
MASK = "parts = x[likely]"
ITEM = "scale = parts.numel() / x.numel() + scores.detach().max().item()"
BOOL = "if bool(grad.abs().max() < 0):"


def of_layers(*rows):
    return {(kind, f"layers.{n}.1", code): count for n in range(2) for kind, code, count in rows}


FORWARD = of_layers(("nonzero", NONZERO, 2), ("boolean mask", MASK, 1), (".item()", ITEM, 1))
BACKWARD = {**of_layers(("boolean mask in backward", MASK, 1)), (".item() in backward", "", BOOL): 1}
AGAIN = of_layers(
    ("nonzero in backward", NONZERO, 2), ("boolean mask in backward", MASK, 2), (".item() in backward", ITEM, 1)
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mode": "all"}, FORWARD | BACKWARD),
        ({"recipe": "keep"}, FORWARD | BACKWARD),
        ({"recipe": "selective"}, FORWARD | BACKWARD | AGAIN),
        ({"recipe": "recompute", "verify": 1}, FORWARD | BACKWARD | AGAIN),
    ],
    ids=["all", "keep", "selective", "verified"],
)
def test_each_line_is_counted_by_its_module(settings, expected):
    plain, model = make(), make()
    with offload(model, **settings) as handle:
        for seed in range(3):
            assert_equal(step(model, seed), step(plain, seed))
        assert counts(handle.stats()) == expected
        assert handle.stats().watched_forwards == 3
        assert json.loads(json.dumps(handle.stats().to_dict()["syncs"]))[0].keys() == {
            *Sync._fields,
            "count",
            "seconds",
        }


def test_the_report_sums_up_equal_layers():
    model = make()
    with offload(model) as handle:
        for seed in range(2):
            step(model, seed)
        report = " ".join(handle.report().split())
        (line,) = {sync.line for sync in handle.stats().syncs if sync.kind == "nonzero"}
        assert f"synchronisations of the host, per forward nonzero, layers.*.*, {line} 4.0" in report


def test_a_report_without_synchronisations_says_so():
    model = nn.Linear(8, 8)
    with offload(model) as handle:
        model(torch.randn(2, 8)).sum().backward()
        assert "synchronisations of the host, per forward none 0" in " ".join(handle.report().split())


def test_maps_without_waits_are_equal():
    results, lines = [], []
    for maps in (maps_by_masks, sync_free_maps()):
        model = make(lambda maps=maps: Routed(maps, 8))
        with offload(model) as handle:
            results.append(step(model))
            lines.append(Counter(sync.kind for sync in handle.stats().syncs))
    assert_equal(*results)
    assert lines == [{"boolean mask": 2, "repeat_interleave": 1, "boolean mask in backward": 1}, {}]


def test_a_context_counts_what_runs_inside_by_the_class_of_the_module():
    plain, model = make(), make()
    context = ebbtide.offload_activations(store="mock", window=1, min_bytes=1)
    before = context.stats()
    for seed in range(2):
        with context:
            ours = step(model, seed)
        assert_equal(ours, step(plain, seed))
    found = counts(context.stats())
    assert context.stats().watched_forwards - before.watched_forwards == 2
    assert found["nonzero", "Experts", NONZERO] == 4
    assert found["boolean mask in backward", "Experts", MASK] == 2
    assert found[".item() in backward", "", BOOL] == 1


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Experts(), Experts()

    def forward(self, x):
        return checkpoint(self.first, self.last(x), use_reentrant=False).sum()


def test_a_checkpoint_of_the_user_waits_again_in_backward():
    plain, model = make(Checkpointed), make(Checkpointed)
    with offload(model) as handle:
        assert_equal(step(model), step(plain))
        found = counts(handle.stats())
    assert found["nonzero", "last", NONZERO] == found["nonzero", "first", NONZERO] == 2
    assert found["nonzero in backward", "first", NONZERO] == 2
    assert ("nonzero in backward", "last", NONZERO) not in found


def test_each_handle_counts_its_own_model():
    """Also in backward: of the model whose forward was earlier, and in recomputed code."""
    first, second = make(Checkpointed), make()
    with offload(first) as one, offload(second, recipe="recompute") as other:
        x = torch.randn(32, 8)
        loss = second(x)
        (first(x) + loss).backward()
        own, others = counts(one.stats()), counts(other.stats())
    assert {module for _, module, _ in own} <= {"first", "last", ""}
    assert others == FORWARD | BACKWARD | AGAIN


class Reads(nn.Module):
    """Calls `read` in forward."""

    def __init__(self, read):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.read = read

    def forward(self, x):
        self.read(x)
        return self.linear(x)


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


def test_a_mode_of_the_user_between_hides_no_line():
    def read(x):
        with PassThrough():
            x.sum().item()

    model = Reads(read)
    with offload(model) as handle:
        step(model)
        assert [code for _, _, code in counts(handle.stats())] == ["x.sum().item()"]


WAITS = [
    (torch.accelerator, "torch.accelerator.synchronize"),
    (torch.cuda, "torch.cuda.synchronize"),
    (torch.cuda.Stream, "Stream.synchronize"),
    (torch.cuda.Event, "Event.synchronize"),
]


@pytest.mark.parametrize(("owner", "name"), WAITS, ids=lambda each: each if isinstance(each, str) else "")
def test_calls_that_synchronise_are_counted(owner, name, monkeypatch):
    waited = []
    monkeypatch.setattr(owner, "synchronize", waited.append)  # there is no GPU
    model = Reads(lambda _: owner.synchronize(5))
    with offload(model) as handle:
        step(model)
        owner.synchronize(6)  # outside of the model
        assert waited == [5, 6]
        ((kind, module, _),) = counts(handle.stats())
        assert (kind, module) == (name, "Reads")
    assert owner.synchronize == waited.append


def test_a_forward_in_another_thread():
    model = make()
    with offload(model) as handle:
        thread = threading.Thread(target=step, args=(model,))
        thread.start()
        thread.join()
        assert counts(handle.stats()) == FORWARD | BACKWARD


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_leaves_no_mode_and_no_module_behind(error):
    def fail(*_):
        raise error

    model = make()
    with offload(model, recipe="recompute") as handle:
        hook = model.layers[1][1].router.register_forward_pre_hook(fail)
        with pytest.raises(error):
            step(model)
        assert dispatch_mode_stack() == []
        hook.remove()
        step(model)
        assert {sync.module for sync in handle.stats().syncs} == {"layers.0.1", "layers.1.1", ""}


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, calls=1):
        x.sum().item()
        return self(self.linear(x), calls - 1) if calls else x


def test_a_model_that_calls_itself_counts_once():
    model = CallsItself()
    with offload(model) as handle:
        step(model)
        assert counts(handle.stats()) == {(".item()", "CallsItself", "x.sum().item()"): 2}


@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")  # the compiler warns about its own work
def test_a_compiled_block_is_left_alone():
    plain, model = make(), make()
    for each in (plain, model):
        for layer in each.layers:
            layer[0].compile(backend="aot_eager", fullgraph=True)
    with offload(model) as handle:
        for seed in range(2):
            assert_equal(step(model, seed), step(plain, seed))
        assert counts(handle.stats()) == FORWARD | BACKWARD
    torch._dynamo.reset()


def installed():
    """Hooks on all modules, and functions that the detector replaces."""
    module = torch.nn.modules.module
    hooks = [*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values()]
    return hooks, [
        getattr(owner, name) for owner, name in (RUN_BACKWARD, *((owner, "synchronize") for owner, _ in WAITS))
    ]


def test_nothing_is_installed_but_while_a_handle_needs_it(monkeypatch):
    before = installed()
    model = make()
    first, second = offload(model), offload(make())
    assert all(ours != plain for ours, plain in zip(installed()[1], before[1], strict=True))
    second.remove()
    first.remove()
    first.remove()
    assert installed() == before
    step(model)
    assert first.stats().syncs == {}
    for variables in ({"EBBTIDE_SYNCS": "0"}, {"EBBTIDE_DISABLE": "1"}):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with offload(model) as handle:
                assert installed() == before
                step(model)
                assert (handle.stats().syncs, handle.stats().watched_forwards) == ({}, 0)
                assert "synchronisations" not in handle.report()
    monkeypatch.setenv("EBBTIDE_SYNCS", "perhaps")
    with pytest.raises(ebbtide.ConfigError, match="EBBTIDE_SYNCS='perhaps': write 1"):
        offload(model)
    assert installed() == before
