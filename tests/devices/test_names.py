"""What devices are called, and that only devices/ names a back end."""

import ast
from pathlib import Path

import torch

import ebbtide
from ebbtide._devices import name_of

SOURCE = Path(ebbtide.__file__).parent


def test_a_device_has_the_name_of_its_product_or_else_of_its_kind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H200 number {device.index}")
    assert name_of(torch.device("cuda", 1)) == "NVIDIA H200 number 1"
    assert name_of(torch.device("xpu", 0)) == "xpu"
    assert name_of(torch.device("cpu")) == "cpu"


def test_only_the_devices_name_a_back_end():
    """Besides torch_private.py, the one file that may lean on parts of torch without a public name."""
    named = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: torch.{node.attr}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent.name != "_devices" and path.name != "torch_private.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "xpu", "mps", "hip")
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    assert named == []
