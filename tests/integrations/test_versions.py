"""Trainers in versions without a name that an integration imports."""

import importlib
import sys
from types import ModuleType

import pytest

from ebbtide import MissingPackageError
from ebbtide._utils.packages import extra


def stand_in(monkeypatch, path):
    """Empty modules, one for each part of `path`."""
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:count]))
        module.__version__ = "0.1"
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(
    ("name", "path", "missing"),
    [
        ("fastvideo", "fastvideo.train.callbacks.callback", "Callback"),
        ("axolotl", "axolotl.integrations.base", "BasePlugin"),
    ],
)
def test_a_version_without_a_name_is_named(monkeypatch, name, path, missing):
    stand_in(monkeypatch, path)
    monkeypatch.delitem(sys.modules, f"ebbtide.integrations.{name}", raising=False)
    line = rf"{name} 0.1: .*{missing}.* Write: pip install --upgrade 'ebbtide\[{name}\]'"
    with pytest.raises(MissingPackageError, match=line):
        importlib.import_module(f"ebbtide.integrations.{name}")


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute 'group'", name="group", obj=None),
        AttributeError("partially initialized module 'sys' has no attribute 'nothing'", name="nothing", obj=sys),
    ],
)
def test_other_attributes_that_lack_are_left_alone(error):
    with pytest.raises(AttributeError) as caught, extra("fastvideo"):
        raise error
    assert caught.value is error
