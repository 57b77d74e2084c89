"""Streams, events and allocation, one file per kind of device."""

import torch

from ebbtide._devices.accelerator import AcceleratorDevice, name_of
from ebbtide._devices.cpu import CpuDevice
from ebbtide._errors import DeviceError
from ebbtide._types import Device

__all__ = ["device_for", "name_of"]


def device_for(device: torch.device) -> Device:
    """The Device of a torch device. Raises DeviceError for a device without streams (meta, lazy back ends)."""
    if device.type == "cpu":
        return CpuDevice()
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != device.type:
        found = "no accelerator" if current is None else f"the accelerator {current.type!r}"
        raise DeviceError(
            f"cannot offload from {str(device)!r}: this process has {found}. "
            "Move the model to 'cpu' or to an available accelerator first"
        )
    return AcceleratorDevice(device)
