"""Every way to train recomputed regions, under every recipe: bit for bit the plain run, and no memory left over."""

import random

import pytest
import torch
from recipe_cases import CASES, RECIPES
from support import HandleRig, assert_equal

from ebbtide._devices.cpu import CpuDevice
from ebbtide._devices.sim import SimDevice

CPU = torch.device("cpu")
DEVICES = {
    "cpu": CpuDevice,
    "sim late": lambda: SimDevice(1, "late"),
    "sim early": lambda: SimDevice(2, "early"),
    "sim shuffled": lambda: SimDevice(3, "shuffled"),
}

# Reentrant checkpoints run backward inside backward, which torch warns about.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.fixture(scope="module")
def plain():
    runs = {}

    def run(case):
        if case not in runs:
            runs[case] = case(lambda model: None, CPU)
        return runs[case]

    return run


def _devices_of(case, recipe):
    """One device per case and recipe, all devices over all cases and all recipes."""
    chosen = random.Random(f"{case.__name__} {recipe}").choice(list(DEVICES))
    return pytest.param(case, recipe, chosen, id=f"{case.__name__}-{recipe}-{chosen}")


@pytest.mark.parametrize(
    ("case", "recipe", "device"), [_devices_of(case, recipe) for case in CASES for recipe in RECIPES]
)
def test_case_equals_its_plain_twin(case, recipe, device, plain):
    rig = HandleRig(DEVICES[device]())
    expected = plain(case)
    assert_equal(case(lambda model: rig.offload(model, RECIPES[recipe]), CPU), expected)
    rig.check_at_rest()
    rig.check_no_races()
    assert all(handle.stats().recomputed.count > 0 for handle in rig.handles)
