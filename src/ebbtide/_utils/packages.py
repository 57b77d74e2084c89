"""Optional packages: import errors that say the pip line."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

from ebbtide._errors import MissingPackageError

TORCH_RELEASES = ("2.11", "2.15")
"""The first release of torch that ebbtide runs on, and the last that the tests have run on."""


@contextmanager
def extra(name: str) -> Generator[None]:
    """Context around the imports of an integration with the packages of `pip install 'ebbtide[name]'`.

    Raises:
        MissingPackageError: a package is not installed, or its version has no module or attribute of the name imported.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name:
            raise  # the package's own message is better
        package = error.name.partition(".")[0]
        if is_installed(package):
            raise _other_version(package, f" has no {error.name}", name) from error
        raise MissingPackageError(f"{package} is not installed. Write: pip install 'ebbtide[{name}]'") from error
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if "cannot import name" not in str(error) or "partially initialized" in str(error):
            raise  # a shared library that does not load, or a circular import
        raise _other_version(package, f": {error.msg}", name) from error
    except AttributeError as error:
        module: object = error.obj
        if not isinstance(module, ModuleType) or "partially initialized" in str(error):
            raise
        raise _other_version(module.__name__.partition(".")[0], f": {error}", name) from error


def _other_version(package: str, says: str, name: str) -> MissingPackageError:
    return MissingPackageError(f"{package} {version_of(package)}{says}. Write: pip install --upgrade 'ebbtide[{name}]'")


def is_installed(package: str) -> bool:
    return package in sys.modules or bool(package and importlib.util.find_spec(package))


def installed_version(distribution: str) -> str | None:
    """The version that pip knows, without an import; None: not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_of(package: str) -> str:
    """`__version__` of an imported package."""
    return getattr(sys.modules.get(package), "__version__", "of an unknown version")
