"""Fixtures and options of every test; how much of each matrix runs (see README.md)."""

import gc
import importlib.util
import os
import warnings

import pytest
import torch

import ebbtide
from ebbtide._engine import context
from ebbtide._utils.torch_private import has_compiled_code

if importlib.util.find_spec("hypothesis") is not None:  # tests/gpu run without hypothesis
    from hypothesis import HealthCheck, settings

    # Properties hold on a busy machine too: whatever reads a clock is off.
    clockless = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("edges", max_examples=25, **clockless)
    settings.register_profile("all", **clockless)
else:
    settings = None

os.environ.setdefault("EBBTIDE_WAIT", "1")  # plans come in the same step of every run, here and in subprocesses


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every case of every matrix, and 100 examples per property")


def pytest_configure(config):
    if settings is not None:
        settings.load_profile("all" if config.getoption("--all") else "edges")


def pytest_sessionstart(session):
    # Most models of tests fit into the default window. A mark of the session comes before those of modules and tests.
    session.add_marker(pytest.mark.filterwarnings("ignore:.* moves nothing from its second step on"))


def pytest_collection_modifyitems(config, items):
    """Without --all, keep the cases of a matrix with a new parameter value, and the last; of long tests one or none.

    A matrix is a test with two or more parameters: each value of each parameter still runs at least once. Long tests
    start first, so that no worker is left with one of them alone.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if config.getoption("--all") or any("::" in arg for arg in config.args):
        return  # a test named on the command line runs
    seen: dict[object, set[tuple[str, int]]] = {}
    last = {item.function: item for item in items}
    kept, left_out = [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        values = {(name, id(value)) for name, value in params.items()}
        is_first, before = item.function not in seen, seen.setdefault(item.function, set())
        is_edge = len(values) < 2 or not values <= before or item is last[item.function]
        before |= values
        long = item.get_closest_marker("long")
        is_kept = is_edge if long is None else is_first and long.kwargs.get("cases", 1) > 0
        (kept if is_kept else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tensors of tests are tiny: more threads than cores only get in each other's way."""
    torch.set_num_threads(1)
    # The first square root of a process, shared by two threads, was seen to differ: compute that one on one thread.
    torch.ones(1).sqrt()


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_earlier_files():
    """Graphs in reference cycles of an earlier file hold host memory, which stats of the process count."""
    gc.collect()
    ebbtide.release_memory()


@pytest.fixture(autouse=True)
def _collections_between_tests_alone():
    """A timed step with a full collection would be repeated, and a test counts the steps until a plan."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _no_forward_of_earlier_tests_waits():
    """A graph that an earlier test has left in a reference cycle makes calls count on, for 64 forwards at most."""
    context._in_flight.waiting.clear()


@pytest.fixture(autouse=True)
def _plans_without_a_budget_may_move_nothing():
    """Whether such a plan moves anything depends on this host's rates. Tests of the warning catch it all the same."""
    warnings.filterwarnings("ignore", message="offload.* moved nothing in its first planned forward")
    warnings.filterwarnings("ignore", message=r"offload\(\) moves nothing from now on")


@pytest.fixture
def process_group(tmp_path):
    """torch.distributed with this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    """Recomputation prunes nothing in a process with compiled code."""
    yield
    if has_compiled_code():
        torch._dynamo.reset()
