"""The probe of recipes' host costs: figures for a plan, and no trace in the training it interrupts."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import ebbtide
from ebbtide._model.recipe_probe import probe_recipes


def probed(handle):
    attachment = handle._attachment
    return probe_recipes(attachment.engines, attachment.context.serves, attachment.engine())


@pytest.fixture
def handle():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    with ebbtide.offload(model, mode="all", min_bytes=1) as handle:
        model(torch.randn(2, 4)).sum().backward()
        yield handle


def test_every_recipe_has_a_cost(handle):
    costs = probed(handle)
    assert costs.prepare_s > 0  # by one clock within one step; all the rest are differences of noisy steps
    assert min(costs) >= 0


def test_a_probe_leaves_no_trace(handle):
    state, before = torch.get_rng_state(), handle.stats()
    seen = []
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t), torch.no_grad():
        probed(handle)
        assert not torch.is_grad_enabled()
    after = handle.stats()
    assert torch.equal(torch.get_rng_state(), state)
    assert (after.parcels, after.kept, after.recomputed) == (before.parcels, before.kept, before.recomputed)
    assert after.host_bytes == before.host_bytes
    assert not seen
