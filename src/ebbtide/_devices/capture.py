"""The number of the capture that a CUDA stream takes part in, from the driver: torch tells no number."""

import ctypes
import functools
from typing import Any

import torch

from ebbtide._utils.torch_private import is_called_from


def capture_of(stream: torch.Stream) -> int | None:
    """The driver's number of the capture that `stream` takes part in, unique in the process.

    None without a capture, and on systems without the driver function (ROCm, Windows).
    """
    ask = _stream_capture_info()
    if ask is None:
        return None
    status, capture = ctypes.c_int(0), ctypes.c_uint64(0)
    failed = ask(_handle(stream), ctypes.byref(status), ctypes.byref(capture))
    is_active = status.value == 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE: neither none nor invalidated
    return capture.value if is_active and not failed else None


def is_captured_in_parts() -> bool:
    """Whether the current capture of the thread contains only forward or only backward.

    A tensor saved in the graph of forward and needed in the graph of backward cannot move.
    """
    return is_called_from(torch.cuda.make_graphed_callables)


def _handle(stream: torch.Stream) -> int:
    own = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return own.cuda_stream


@functools.cache
def _stream_capture_info() -> Any:
    """cuStreamGetCaptureInfo(stream, &status, &number): every driver keeps the form without a suffix."""
    if torch.version.cuda is None:
        return None
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo
    except (OSError, AttributeError):
        return None
    ask.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64)]
    ask.restype = ctypes.c_int
    return ask
