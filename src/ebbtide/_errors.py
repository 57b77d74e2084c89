"""Every error ebbtide raises.

EbbtideError
|- ConfigError            (also ValueError)    a setting that cannot be: found, and what to write instead
|  `- ForeignAttributeError (also AttributeError) an attribute of another package that means nothing here
|- ModuleError            (also ValueError)    a module that cannot be offloaded, or not like this
|- PlanError              (also ValueError)    no plan fits, or one that was made for something else
|- StoreError             (also RuntimeError)  a store could not write or read a parcel
|  `- StoreFullError                           there is no room where parcels wait
|- RecomputeError         (also RuntimeError)  a region's second run was not the first one over again
|- ModifiedError          (also RuntimeError)  a saved tensor was changed in place before backward
|- CaptureError           (also RuntimeError)  forward and backward are not in one captured graph
|- DeviceError            (also RuntimeError)  a device that ebbtide has no streams for
`- MissingPackageError    (also ImportError)   a package that an integration needs and that is not there
"""

import sys
import warnings


class EbbtideError(Exception):
    """Root of the tree: catch this to catch everything that is ours."""


class ConfigError(EbbtideError, ValueError):
    """A setting that cannot be."""


class ForeignAttributeError(ConfigError, AttributeError):
    """An attribute of another package's class means nothing in the class that stands in for it."""


class ModuleError(EbbtideError, ValueError):
    """A module that cannot be offloaded, or not like this."""


class PlanError(EbbtideError, ValueError):
    """No plan fits, or a plan or profile was made for something else."""


class StoreError(EbbtideError, RuntimeError):
    """A store could not write or read a parcel. Nothing is handed out in its place."""


class StoreFullError(StoreError):
    """There is no room where parcels wait."""


class RecomputeError(EbbtideError, RuntimeError):
    """A region's second run was not the first one over again. Nothing is handed out in its place."""


class ModifiedError(EbbtideError, RuntimeError):
    """A saved tensor was changed in place before backward, as stock autograd reports it too."""


class CaptureError(EbbtideError, RuntimeError):
    """What was saved while a graph was captured is needed outside of that capture, or the other way round."""


class DeviceError(EbbtideError, RuntimeError):
    """A device that ebbtide has no streams for."""


class MissingPackageError(EbbtideError, ImportError):
    """A package that an integration needs is not installed, or not in a version that is known."""


class EbbtideWarning(UserWarning):
    """Something a user should know: nothing moved, a store failed and tensors stayed on the device."""


def add_note(error: BaseException, text: str) -> None:
    """With the error, wherever it is shown; before Python 3.11, which has no notes, as a warning."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        warnings.warn(text, EbbtideWarning, stacklevel=2)
