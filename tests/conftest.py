"""For every test."""

import importlib.util
import warnings

import pytest
import torch

from ebbtide._utils.torch_private import has_compiled_code

if importlib.util.find_spec("hypothesis") is not None:  # tests/gpu run without it
    from hypothesis import HealthCheck, settings

    # A property holds on a busy machine too: whatever looks at a clock is off.
    settings.register_profile("no clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no clocks")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """The tensors here are tiny, and more threads than cores only get in each other's way."""
    torch.set_num_threads(1)
    # The first square root of a process, shared by two threads, was seen to differ: let it be this one, on one thread.
    torch.ones(1).sqrt()


@pytest.fixture(autouse=True)
def _plans_without_a_budget_may_move_nothing():
    """Whether one moves anything is a matter of this host's rates. Tests of the warning catch it all the same."""
    warnings.filterwarnings("ignore", message="offload.* moved nothing in its first planned forward")


@pytest.fixture
def process_group(tmp_path):
    """torch.distributed with this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    """Nothing is left out of second runs in a process with compiled code."""
    yield
    if has_compiled_code():
        torch._dynamo.reset()
