"""The benchmark of compiled blocks, on a tiny model: each rival has a plan, and all have the loss of plain steps."""

import pytest
import torch

from benchmarks import compiled

# torch and transformers warn about their own work.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")]


def test_each_rival_has_a_plan_beside_it(monkeypatch):
    monkeypatch.setattr(compiled, "MOST", 8)
    rivals = compiled.Rivals("ViT-L", torch.device("cpu"), "aot_eager", 2, tiny=True)
    found = compiled.measure_model(rivals, [0.2], [12])
    assert list(found) == ["plain", "no budget", "at most 5 % slower", "checkpointing", "budget 0.2", "within 12 GiB"]
    losses = [each["loss"] for each in found.values()] + [found[name]["plan"]["loss"] for name in list(found)[3:5]]
    assert losses == [losses[0]] * 8
    assert found["no budget"]["variants"] == 0
    assert found["budget 0.2"]["plan"]["variants"] == 4
    assert torch._functorch.config.activation_memory_budget == 1.0
