"""Masks as bits: booleans of a byte each to a bit each and back. Pure: knows tensors, no lanes.

Note [Masks as bits]
~~~~~~~~~~~~~~~~~~~~
1. torch stores a boolean in a byte. Packed, a mask takes an eighth of the room on the device, of the time on the link
   and of the store.
2. Exact for truth values. A byte that is neither 0 nor 1 (made by `view(torch.bool)`) counts as true, as in every
   operation, and comes back as 1.
3. Eight bytes are an integer of 64 bits, and a multiplication moves their lowest bits side by side into the top byte:
   elementwise and in place, hence fast on every device, deterministic, and without waiting for the host. The products
   overflow and wrap around, as torch's integers do.
"""

import torch

from ebbtide._utils.sizes import PACKING_BYTES
from ebbtide._utils.storage import as_bytes


def packed_nbytes(booleans: int) -> int:
    """Bytes of so many booleans as bits."""
    return (booleans + 7) // 8


def pack(booleans: torch.Tensor, chunk_bytes: int = PACKING_BYTES) -> torch.UntypedStorage:
    """New memory with a bit for each byte of `booleans` (uint8, one dense dimension): whether the byte is not 0.

    Runs on the current stream, which owns the result. Needs `chunk_bytes` (a multiple of 8) more memory meanwhile.
    """
    n = booleans.numel()
    packed = _memory(packed_nbytes(n), booleans.device)
    for start in range(0, n, chunk_bytes):
        chunk = booleans[start : start + chunk_bytes]
        ones = _normalised(chunk)
        # The lowest bit of byte i times the factor has bit 56 + i. No two products meet: nothing is carried.
        ones.view(torch.int64).mul_(0x0102040810204080)
        into = packed[start // 8 : start // 8 + ones.numel() // 8]
        into.copy_(ones[7::8])  # top bytes: all devices and hosts of torch are little-endian
        del ones  # before the next chunk is allocated
    return packed.untyped_storage()


def _normalised(chunk: torch.Tensor) -> torch.Tensor:
    """1 for every byte that is not 0, padded with zeros to a multiple of 8."""
    n = chunk.numel()
    ones = _memory(8 * packed_nbytes(n), chunk.device)
    if n % 8:
        ones[-8:].zero_()
    torch.ne(chunk, 0, out=ones[:n])
    return ones


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The booleans of `packed` (uint8, one dense dimension), eight for each byte, in new memory.

    Runs on the current stream and needs no further memory.
    """
    memory = _memory(8 * packed.numel(), packed.device)
    # Repeat the byte eight times, then keep bit i of byte i. (The mask is negative: it has the sign bit.)
    memory.view(torch.int64).copy_(packed).mul_(0x0101010101010101).bitwise_and_(0x8040201008040201 - 2**64)
    return memory.ne_(0).view(torch.bool)


def _memory(nbytes: int, device: torch.device) -> torch.Tensor:
    # Not torch.empty, which fills its result under deterministic algorithms.
    return as_bytes(torch.UntypedStorage(nbytes, device=device))
