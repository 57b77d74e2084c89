"""Which capture a CUDA stream takes part in: torch says whether, only the driver says which."""

import ctypes
import functools
from typing import Any

import torch

from ebbtide._utils.torch_private import is_called_from

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE: neither none nor invalidated


def capture_of(stream: torch.Stream) -> int | None:
    """The driver's number of the capture that `stream` takes part in, unique in this process; None if in none.

    None also where the driver cannot be asked (ROCm, Windows).
    """
    ask = _stream_capture_info()
    if ask is None:
        return None
    status, capture = ctypes.c_int(0), ctypes.c_uint64(0)
    failed = ask(_handle(stream), ctypes.byref(status), ctypes.byref(capture))
    return None if failed or status.value != _ACTIVE else capture.value


def is_captured_in_parts() -> bool:
    """Whether the capture under way in this thread gets forward or backward alone, as this function of torch does.

    What is saved in the one and needed in the other graph cannot move.
    """
    return is_called_from(torch.cuda.make_graphed_callables)


def _handle(stream: torch.Stream) -> int:
    own = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return own.cuda_stream


@functools.cache
def _stream_capture_info() -> Any:
    """cuStreamGetCaptureInfo(stream, &status, &number): the form without a suffix is kept by every driver."""
    if torch.version.cuda is None:
        return None
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo
    except (OSError, AttributeError):
        return None
    ask.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64)]
    ask.restype = ctypes.c_int
    return ask
