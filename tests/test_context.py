"""`offload_activations`."""

import contextlib
import re
import threading
import warnings

import pytest
import torch
from cases import Data, Transformer, finish, make, tokens
from support import Rig, assert_equal

import ebbtide
from ebbtide._engine.hooks import SavedTensorHooks
from ebbtide._stores.mock import MockStore
from ebbtide._types import Reason
from ebbtide._utils.torch_private import top_pack_hook

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


def offloading(**settings):
    return ebbtide.offload_activations(**{"store": "mock", "window": 1, "min_bytes": 1, **settings})


def plain_step():
    model = make(Transformer, CPU)
    return finish(model(tokens(CPU)), model)


def test_a_new_context_each_step_equals_the_plain_run():
    plain = plain_step()
    for _ in range(3):
        model = make(Transformer, CPU)
        with offloading():
            loss = model(tokens(CPU))
        assert_equal(finish(loss, model), plain)
    stats = offloading().stats()  # one more context with these settings: the same totals
    assert stats.out.count > 10
    assert stats.inbound.count > 10
    assert stats.saved_tensors == stats.parcels.count + stats.shared.count + sum(t.count for t in stats.kept.values())
    assert stats.host_bytes == 0


def test_other_settings_are_other_totals():
    x = Data(CPU).leaf(6, 8)
    with offloading():
        x.exp().sin().sum().backward()
    assert offloading().stats().parcels.count == 1
    assert offloading(window=2).stats().parcels.count == 0


@pytest.mark.parametrize("store", ["disk", "mock", MockStore])
def test_stores_of_a_model_on_the_cpu(store, tmp_path):
    plain = plain_step()
    store = f"disk:{tmp_path}" if store == "disk" else store
    for _ in range(2):
        model = make(Transformer, CPU)
        with offloading(store=store):
            loss = model(tokens(CPU))
        assert_equal(finish(loss, model), plain)
    assert offloading(store=store).stats().inbound.count > 0


def test_default_store_of_a_model_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("EBBTIDE_DISK_FOLDER", str(tmp_path))
    plain = plain_step()
    model = make(Transformer, CPU)
    with offloading(store=None):
        loss = model(tokens(CPU))
    assert_equal(finish(loss, model), plain)
    assert offloading(store=None).stats().inbound.count > 0


def test_host_memory_frees_nothing_for_a_model_on_the_cpu():
    model = make(Transformer, CPU)
    with (
        pytest.warns(ebbtide.EbbtideWarning, match="moved nothing in its first forward.*not offloaded"),
        offloading(store="host"),
    ):
        loss = model(tokens(CPU))
    assert_equal(finish(loss, model), plain_step())


def test_warning_when_nothing_moved_comes_once_and_says_why():
    model = make(Transformer, CPU)
    small = offloading(min_bytes="1GiB")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            with small:
                model(tokens(CPU))
    assert re.search(r"\d+ saved tensors \(.*KiB\) smaller than min_bytes; .*parameter", str(seen[0].message))
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_nothing_saved_is_said_too_but_not_without_gradients():
    with torch.no_grad(), offloading():
        torch.ones(3).exp()
    with pytest.warns(ebbtide.EbbtideWarning, match="autograd saved nothing"), offloading():
        torch.ones(3).exp()


def test_an_exception_inside_leaves_the_context_and_says_nothing_more():
    context = offloading()
    with pytest.raises(ZeroDivisionError), context:
        _ = 1 / 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with context:
        Data(CPU).leaf(6, 8).exp().sum().backward()
    assert context.stats().parcels.count == 1


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_disabled_by_the_environment(value, monkeypatch):
    monkeypatch.setenv("EBBTIDE_DISABLE", value)
    model = make(Transformer, CPU)
    context = offloading()
    with warnings.catch_warnings(), context:
        loss = model(tokens(CPU))
    assert_equal(finish(loss, model), plain_step())
    assert context.stats().saved_tensors == 0
    monkeypatch.setenv("EBBTIDE_DISABLE", "0")
    with context:
        loss = model(tokens(CPU))
    assert context.stats().parcels.count > 0


def test_disable_must_be_readable(monkeypatch):
    monkeypatch.setenv("EBBTIDE_DISABLE", "perhaps")
    with pytest.raises(ebbtide.ConfigError, match="EBBTIDE_DISABLE='perhaps': write 1"), offloading():
        pass


class Refusing(contextlib.nullcontext):
    def __enter__(self):
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize("watches", ["0", "1"])
def test_a_context_that_cannot_be_entered_leaves_the_outer_one_as_it_is(watches, monkeypatch):
    monkeypatch.setenv("EBBTIDE_SYNCS", watches)
    context, model = offloading(), make(Transformer, CPU)
    with context:
        loss = model(tokens(CPU))
        outer = top_pack_hook()
        assert outer is not None
        with monkeypatch.context() as patch:
            patch.setattr(SavedTensorHooks, "hooks", lambda self: Refusing())
            with pytest.raises(RuntimeError, match="no hooks here"), context:
                pass
        assert top_pack_hook() == outer
    assert top_pack_hook() is None
    assert_equal(finish(loss, model), plain_step())


def test_mode_off_does_nothing():
    context = offloading(mode="off")
    model = make(Transformer, CPU)
    with context:
        loss = model(tokens(CPU))
    assert_equal(finish(loss, model), plain_step())
    assert context.stats().saved_tensors == 0


def test_the_innermost_of_nested_contexts_applies():
    outer, inner = Rig(), Rig()
    x = Data(CPU).leaf(6, 8)
    with outer.context:
        y = x.exp()
        with inner.context:
            z = y.sin().exp()
        with outer.context:
            loss = z.sin().sum()
    loss.backward()
    assert inner.stats.saved_tensors == 2
    assert outer.stats.saved_tensors == 2


def test_threads_enter_for_themselves():
    context = offloading()
    x = Data(CPU).leaf(6, 8)
    seen = []

    def work():
        seen.append(torch._C._autograd._top_saved_tensors_default_hooks(False))
        with context:
            x.exp().sum().backward()

    with context:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        x.exp().sum().backward()
    assert seen == [None]
    assert context.stats().saved_tensors == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "some"}, "mode='some' is not a mode: write one of 'all'"),
        ({"mode": "auto"}, "a context knows none: write ebbtide.offload"),
        ({"store": "tape"}, "store='tape' is not a store: write one of 'host'"),
        ({"store": "host:/here"}, "store='host:/here' is not a store"),
        ({"window": 0}, "window=0: expected more than zero bytes"),
        ({"window": -5}, "window=-5"),
        ({"window": "12 parsecs"}, "window='12 parsecs' is not a size"),
        ({"prefetch": 1.5}, "prefetch=1.5: expected bytes as an int"),
        ({"prefetch": "0GiB"}, "prefetch='0GiB'"),
        ({"min_bytes": True}, "min_bytes=True"),
        ({"host_limit": 0}, "host_limit=0"),
        ({"host_limit": "-1GiB"}, "host_limit='-1GiB' is not a size"),
    ],
)
def test_bad_settings_say_what_was_found_and_what_to_write(settings, message):
    with pytest.raises(ebbtide.ConfigError, match=message):
        offloading(**settings)


def test_a_missing_folder_is_refused_at_once(tmp_path):
    with pytest.raises((ebbtide.ConfigError, ebbtide.StoreError), match="nowhere"):
        offloading(store=f"disk:{tmp_path}/nowhere")


def test_release_memory_between_two_trainings():
    model = make(Transformer, CPU)
    context = offloading()
    with context:
        loss = model(tokens(CPU))
    assert context.stats().host_bytes > 0
    finish(loss, model)
    ebbtide.release_memory()
    model.zero_grad()
    with offloading():
        loss = model(tokens(CPU))
    assert_equal(finish(loss, model), plain_step())
    model.zero_grad()
    with context:  # made before
        loss = model(tokens(CPU))
    assert_equal(finish(loss, model), plain_step())


def test_graphs_under_way_when_memory_is_released_fail_clearly(tmp_path):
    model = make(Transformer, CPU)
    with offloading(store=f"disk:{tmp_path}"):
        loss = model(tokens(CPU))
    ebbtide.release_memory()
    with pytest.raises(ebbtide.StoreError):
        loss.backward()


def test_kept_reasons_are_counted():
    model = make(Transformer, CPU)
    context = offloading(min_bytes=600)
    with context:
        loss = model(tokens(CPU))
    kept = context.stats().kept
    assert kept[Reason.PARAMETER].count > 0
    assert kept[Reason.SMALL].count > 0
    assert context.stats().parcels.count > 0
    loss.backward()
