"""A budget on the memory that a process has resident, held by a plan that moves to disk: the planner at work."""

import json
import os
import subprocess
import sys

import pytest

MIB = 2**20
SPARED = 90 * MIB  # of some 280 that are saved

SCRIPT = """
import json, sys
import psutil, torch
from torch import nn
import ebbtide

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            note()
            x.register_hook(lambda grad: note())
        return x.square().mean()

process, seen = psutil.Process(), []

def note():
    seen[-1] = max(seen[-1], process.memory_info().rss)

torch.manual_seed(0)
torch.set_num_threads(1)
model, x = Net(), torch.randn(8192, 128)
if sys.argv[1:]:
    ebbtide.offload(model, budget=int(sys.argv[1]), store="disk:" + sys.argv[2])
for _ in range(14):
    seen.append(0)
    loss = model(x)
    loss.backward()
grads = sum(p.grad.double().sum().item() for p in model.parameters())
print(json.dumps({"peaks": seen, "loss": loss.item(), "grads": grads}))
"""


def run(*arguments):
    """In a process of its own, whose C library gives back each large tensor at once (see docs/limits/plans.md)."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.long(cases=0)
@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_a_budget_on_resident_memory_is_held(tmp_path):
    """As measured where blocks end, to some percent and behind the steps in which the peak is looked at."""
    plain = run()
    budget = max(plain["peaks"]) - SPARED
    planned = run(budget, tmp_path)
    assert max(planned["peaks"][-4:]) <= budget + SPARED // 6
    assert (planned["loss"], planned["grads"]) == (plain["loss"], plain["grads"])
