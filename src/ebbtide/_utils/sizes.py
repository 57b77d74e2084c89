"""Sizes in bytes: text to number, number to text."""

import math
import re
from numbers import Integral

from ebbtide._errors import ConfigError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

PACKING_BYTES = 32 * MIB
"""Booleans are packed into bits in chunks of this size: packing must not raise the peak that it lowers."""

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, name: str) -> int:
    """Convert a positive int, or text such as "40GiB", "1.5 GB", "4096", to bytes.

    Raises:
        ConfigError: `value` of the setting `name` is not a size.
    """
    if isinstance(value, str):
        nbytes = _parse_text(value, name)
    elif type(value) is not bool and isinstance(value, Integral):  # also integers of numpy
        nbytes = int(value)
    else:
        raise ConfigError(f"{name}={value!r}: expected bytes as an int, or text like '512MiB'")
    if nbytes <= 0:
        raise ConfigError(f"{name}={value!r}: expected more than zero bytes, like '512MiB'")
    return nbytes


def _parse_text(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"{name}={text!r} is not a size: write a number and a unit of KiB, MiB, GiB, KB, MB, GB")
    nbytes = float(match[1]) * _UNITS[match[2].upper()]
    if not math.isfinite(nbytes):
        raise ConfigError(f"{name}={text!r} is more than any device has: write a number and a unit, like '40GiB'")
    return int(nbytes)


def format_bytes(nbytes: float) -> str:
    """Write a size with a binary unit: 1536 -> "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
