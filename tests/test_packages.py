"""Errors for missing packages of an integration."""

import importlib
import re

import pytest
from scripts import ROOT

from ebbtide import EbbtideError, MissingPackageError
from ebbtide._utils.packages import TORCH_RELEASES, extra, installed_version


def test_a_missing_package_gives_the_pip_line():
    with (
        pytest.raises(
            MissingPackageError, match=r"nowhere is not installed. Write: pip install 'ebbtide\[diffusers\]'"
        ),
        extra("diffusers"),
    ):
        importlib.import_module("nowhere.at_all")
    assert issubclass(MissingPackageError, ImportError)
    assert issubclass(MissingPackageError, EbbtideError)


def test_a_version_without_the_module_is_named():
    line = r"pytest [\d.]+ has no pytest.nothing. Write: pip install --upgrade"
    with pytest.raises(MissingPackageError, match=line), extra("transformers"):
        importlib.import_module("pytest.nothing")


def test_a_version_without_the_attribute_is_named():
    line = r"torch [\d.+a-z]+: cannot import name 'nothing' from 'torch'.*Write: pip install --upgrade"
    with pytest.raises(MissingPackageError, match=line), extra("titan"):
        from torch import nothing  # noqa: F401


def test_a_library_that_does_not_load_raises_its_own_error():
    with pytest.raises(ImportError, match="libnothing") as caught, extra("torchtitan"):
        raise ImportError("libnothing.so: cannot open shared object file")
    assert not isinstance(caught.value, MissingPackageError)


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("Could not import module 'Trainer'. Are its requirements defined correctly?"),
        ImportError("cannot import name 'pytorch' from partially initialized module 'lightning'"),
    ],
)
def test_an_error_with_an_explanation_stays_unchanged(error):
    with pytest.raises(ImportError) as caught, extra("transformers"):
        raise error
    assert caught.value is error


def test_unrelated_errors_pass():
    with pytest.raises(RuntimeError, match="a driver"), extra("transformers"):
        raise RuntimeError("a driver")


def test_the_version_of_a_distribution():
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("nowhere-at-all") is None


def test_supported_releases_of_torch_are_those_of_pip_and_of_nox():
    first, last = TORCH_RELEASES
    assert f'"torch>={first}"' in (ROOT / "pyproject.toml").read_text()
    releases = re.search(r"^TORCHES = \((.*)\)$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)[1].split(", ")
    assert [release.strip('"').rpartition(".")[0] for release in (releases[0], releases[-1])] == [first, last]
