"""The public names."""

import inspect
from pathlib import Path

import pytest
from public_api import public_api

import ebbtide


def test_public_names_are_sorted_and_there():
    assert ebbtide.__all__ == sorted(ebbtide.__all__)
    assert len(set(ebbtide.__all__)) == len(ebbtide.__all__)
    assert all(hasattr(ebbtide, name) for name in ebbtide.__all__)


def test_signatures_are_those_that_were_agreed_on():
    """After a wanted change: python tests/public_api.py > tests/public_api.txt."""
    agreed = (Path(__file__).parent / "public_api.txt").read_text().splitlines()
    assert public_api() == agreed


def test_no_other_name_is_public():
    """Besides submodules, left behind by imports, and underscored names."""
    others = {name for name in vars(ebbtide) if not name.startswith("_")} - set(ebbtide.__all__)
    assert {name for name in others if not inspect.ismodule(getattr(ebbtide, name))} == set()


@pytest.mark.parametrize("name", ebbtide.__all__)
def test_public_names_are_documented(name):
    thing = getattr(ebbtide, name)
    assert inspect.getdoc(thing)
    assert "__doc__" in vars(thing) or inspect.isfunction(thing)


def test_public_methods_are_documented():
    for function in (
        ebbtide.OffloadHandle.stats,
        ebbtide.OffloadHandle.report,
        ebbtide.OffloadHandle.remove,
        ebbtide.OffloadActivations.stats,
    ):
        assert inspect.getdoc(function), function


ENTRY_POINTS = (ebbtide.offload, ebbtide.offload_activations, ebbtide.plan, ebbtide.measure, ebbtide.max_batch)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_entry_points_explain_every_argument(entry_point):
    documentation = inspect.getdoc(entry_point)
    for name in inspect.signature(entry_point).parameters:
        assert f"{name}:" in documentation or f"{name}, " in documentation or f", {name}" in documentation, name


def test_all_but_what_is_worked_on_are_keywords():
    positional = [
        (entry_point.__name__, name)
        for entry_point in ENTRY_POINTS
        for name, parameter in inspect.signature(entry_point).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    batch = [(name, argument) for name in ("plan", "measure") for argument in ("model", "example_batch")]
    assert positional == [("offload", "module"), *batch, ("max_batch", "profiles")]


def test_errors_are_one_tree():
    errors = [thing for name in ebbtide.__all__ if inspect.isclass(thing := getattr(ebbtide, name))]
    errors = [error for error in errors if issubclass(error, Exception) and not issubclass(error, Warning)]
    assert all(issubclass(error, ebbtide.EbbtideError) for error in errors)
    assert issubclass(ebbtide.EbbtideWarning, UserWarning)


def test_the_package_is_marked_as_typed():
    assert (Path(ebbtide.__file__).parent / "py.typed").is_file()
