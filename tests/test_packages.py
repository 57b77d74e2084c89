"""What is said when a package that an integration needs is not there."""

import importlib

import pytest

from ebbtide import EbbtideError, MissingPackageError
from ebbtide._utils.packages import extra


def test_a_missing_package_gives_the_line_to_install_it():
    with (
        pytest.raises(
            MissingPackageError, match=r"nowhere is not installed. Write: pip install 'ebbtide\[diffusers\]'"
        ),
        extra("diffusers"),
    ):
        importlib.import_module("nowhere.at_all")
    assert issubclass(MissingPackageError, ImportError)
    assert issubclass(MissingPackageError, EbbtideError)


def test_a_version_without_what_is_imported_is_named():
    line = r"pytest [\d.]+ has no pytest.nothing. Write: pip install --upgrade"
    with pytest.raises(MissingPackageError, match=line), extra("transformers"):
        importlib.import_module("pytest.nothing")


def test_a_version_without_a_name_is_named():
    line = r"torch [\d.+a-z]+: cannot import name 'nothing' from 'torch'.*Write: pip install --upgrade"
    with pytest.raises(MissingPackageError, match=line), extra("titan"):
        from torch import nothing  # noqa: F401


def test_a_library_that_does_not_load_is_left_alone():
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
def test_what_says_itself_what_is_wrong_is_left_alone(error):
    with pytest.raises(ImportError) as caught, extra("transformers"):
        raise error
    assert caught.value is error


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="a driver"), extra("transformers"):
        raise RuntimeError("a driver")
