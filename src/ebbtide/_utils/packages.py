"""Packages that only one integration needs: what is said when one is not there."""

import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

from ebbtide._errors import MissingPackageError


@contextmanager
def extra(name: str) -> Generator[None]:
    """Around the imports of an integration, of what `pip install 'ebbtide[name]'` brings.

    Raises MissingPackageError for a package that is not installed, or that has no such module or name in this version.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name:
            raise  # a package's own words for what it could not import
        package = error.name.partition(".")[0]
        if is_installed(package):
            raise _other_version(package, f" has no {error.name}", name) from error
        raise MissingPackageError(f"{package} is not installed. Write: pip install 'ebbtide[{name}]'") from error
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if "cannot import name" not in str(error) or "partially initialized" in str(error):
            raise  # a library that does not load, or a module that imports itself
        raise _other_version(package, f": {error.msg}", name) from error
    except AttributeError as error:
        module: object = error.obj
        if not isinstance(module, ModuleType) or "partially initialized" in str(error):
            raise
        raise _other_version(module.__name__.partition(".")[0], f": {error}", name) from error


def _other_version(package: str, says: str, name: str) -> MissingPackageError:
    """It is there, and lacks what the extra `name` needs of it."""
    return MissingPackageError(f"{package} {version_of(package)}{says}. Write: pip install --upgrade 'ebbtide[{name}]'")


def is_installed(package: str) -> bool:
    """Whether it could be imported."""
    return package in sys.modules or bool(package and importlib.util.find_spec(package))


def version_of(package: str) -> str:
    """Of one that has been imported, as it says itself."""
    return getattr(sys.modules.get(package), "__version__", "of an unknown version")
