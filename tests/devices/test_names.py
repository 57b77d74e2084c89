"""What devices are called, and that only devices/ names a back end."""

import ast
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide._devices import name_of

SOURCE = Path(ebbtide.__file__).parent


def test_a_device_has_the_name_of_its_product_or_else_of_its_kind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H200 number {device.index}")
    assert name_of(torch.device("cuda", 1)) == "NVIDIA H200 number 1"
    assert name_of(torch.device("xpu", 0)) == "xpu"
    assert name_of(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_devices_name_a_back_end(path):
    """Besides torch_private.py, where everything is that torch does not offer otherwise."""
    named = [
        f"line {node.lineno}: torch.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "xpu", "mps", "hip")
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    assert path.parent.name == "_devices" or path.name == "torch_private.py" or named == []
