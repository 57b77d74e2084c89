"""Every error and warning of ebbtide.

EbbtideError
|- ConfigError            (also ValueError)    a wrong setting: the value found, and a value to write instead
|  `- ForeignAttributeError (also AttributeError) an attribute of another package's class without a meaning in ebbtide
|- ModuleError            (also ValueError)    a module that cannot be offloaded with the settings
|- PlanError              (also ValueError)    no plan fits, or the plan was made for another model
|- StoreError             (also RuntimeError)  a store could not write or read a parcel
|  `- StoreFullError                           a store has no room for a parcel
|- RecomputeError         (also RuntimeError)  the recomputation of a region differs from the region's forward
|- ModifiedError          (also RuntimeError)  a saved tensor was changed in place before backward
|- CaptureError           (also RuntimeError)  forward and backward are not in one captured graph
|- DeviceError            (also RuntimeError)  a device without support in ebbtide
`- MissingPackageError    (also ImportError)   a package is missing, or too old for an integration
"""

import sys
import warnings


class EbbtideError(Exception):
    """Base class of all errors of ebbtide."""


class ConfigError(EbbtideError, ValueError):
    """A setting has a wrong value. The message names the value and a correct one."""


class ForeignAttributeError(ConfigError, AttributeError):
    """An attribute of another package's class has no meaning in the ebbtide class that replaces the class."""


class ModuleError(EbbtideError, ValueError):
    """A module cannot be offloaded, or not with the settings."""


class PlanError(EbbtideError, ValueError):
    """No plan fits the budget, or a plan or profile was made for another model."""


class StoreError(EbbtideError, RuntimeError):
    """A store could not write or read a parcel. Backward gets no tensor instead of a wrong one."""


class StoreFullError(StoreError):
    """A store has no room for a parcel."""


class RecomputeError(EbbtideError, RuntimeError):
    """The recomputation of a region differs from forward. Backward gets no tensor instead of a wrong one."""


class ModifiedError(EbbtideError, RuntimeError):
    """A saved tensor was changed in place before backward. Autograd without ebbtide raises a RuntimeError as well."""


class CaptureError(EbbtideError, RuntimeError):
    """A tensor saved inside of a captured graph is needed outside of the capture, or the reverse."""


class DeviceError(EbbtideError, RuntimeError):
    """A device is not supported: ebbtide has no streams for the device."""


class MissingPackageError(EbbtideError, ImportError):
    """A package of an integration is missing, or of an unknown version. The message has the pip line."""


class EbbtideWarning(UserWarning):
    """A fact that a user should know: no tensor moved, or a store failed and tensors stayed on the device."""


def add_note(error: BaseException, text: str) -> None:
    """Attach `text` to `error`, to be shown with the traceback. Python 3.10 has no notes: warn instead."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        warnings.warn(text, EbbtideWarning, stacklevel=2)
