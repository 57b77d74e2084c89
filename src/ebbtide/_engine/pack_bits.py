"""Masks as bits: memory of booleans, one byte each, to one bit each and back. Pure: knows tensors, no lanes.

Note [Masks as bits]
~~~~~~~~~~~~~~~~~~~~
1. torch keeps a boolean in a byte, so seven eighths of a mask are nothing but the way it is stored: packed, it takes
   an eighth of the room on the device, of the time on the link and of the store.
2. Exact for truth values, which is all a boolean has. A byte that is neither 0 nor 1 (made by `view(torch.bool)`)
   counts as true, as it does for every operation, and comes back as 1.
3. Eight bytes are one integer of 64 bits, and one multiplication moves their lowest bits side by side into its top
   byte: all of it is elementwise and in place, so it is fast everywhere, deterministic, and never waits for the host.
   The products overflow, and wrap around as torch's integers do.
"""

import torch

from ebbtide._utils.sizes import MIB
from ebbtide._utils.storage import as_bytes

# Bit 8 i of the integer (a boolean each) times this has bit 56 + i: no two products meet, so nothing is carried.
_COLLECT = 0x0102040810204080
# A byte times this is the byte eight times; of the i-th one, this keeps bit i. (Negative: it has the sign bit.)
_REPEAT = 0x0101010101010101
_KEEP_ONE = 0x8040201008040201 - 2**64
_TOP = 7  # the byte with the highest bits: every device and host that torch runs on is little-endian

# Packing takes a copy of the mask, this much of it at a time: it must not raise the peak that it is there to lower.
CHUNK_BYTES = 32 * MIB


def packed_nbytes(booleans: int) -> int:
    """Bytes that so many booleans take as bits."""
    return (booleans + 7) // 8


def pack(booleans: torch.Tensor, chunk_bytes: int = CHUNK_BYTES) -> torch.UntypedStorage:
    """Memory of its own with one bit for each byte of `booleans` (uint8, one dense dimension): whether it is not 0.

    Runs on the current stream, which also owns the result. Takes `chunk_bytes` (a multiple of 8) more meanwhile.
    """
    n = booleans.numel()
    packed = _memory(packed_nbytes(n), booleans.device)
    for start in range(0, n, chunk_bytes):
        chunk = booleans[start : start + chunk_bytes]
        ones = _normalised(chunk)
        ones.view(torch.int64).mul_(_COLLECT)
        into = packed[start // 8 : start // 8 + ones.numel() // 8]
        into.copy_(ones[_TOP::8])
        del ones  # before the next one is allocated
    return packed.untyped_storage()


def _normalised(chunk: torch.Tensor) -> torch.Tensor:
    """1 for every byte that is not 0, then zeros up to a multiple of 8."""
    n = chunk.numel()
    ones = _memory(8 * packed_nbytes(n), chunk.device)
    if n % 8:
        ones[-8:].zero_()
    torch.ne(chunk, 0, out=ones[:n])
    return ones


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The booleans of `packed` (uint8, one dense dimension), eight for each byte, in memory of their own.

    Runs on the current stream and takes no memory besides.
    """
    memory = _memory(8 * packed.numel(), packed.device)
    memory.view(torch.int64).copy_(packed).mul_(_REPEAT).bitwise_and_(_KEEP_ONE)
    return memory.ne_(0).view(torch.bool)


def _memory(nbytes: int, device: torch.device) -> torch.Tensor:
    # Not torch.empty, which fills what it gives under deterministic algorithms.
    return as_bytes(torch.UntypedStorage(nbytes, device=device))
