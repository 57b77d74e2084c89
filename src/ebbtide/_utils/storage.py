"""Storages as bytes, and checksums of bytes."""

import torch

from ebbtide._utils.torch_private import neg_view, storage_offset


def as_bytes(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """Return a uint8 tensor of shape (nbytes,) on the memory of `storage` from byte `start` on."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    if start == 0 and nbytes is None:
        return empty.set_(storage)
    length = storage.nbytes() - start if nbytes is None else nbytes
    return empty.set_(storage, start, (length,), (1,))


# Words in a row of a checksum's two sums. Exchanged rows of a tensor change one of the sums, unless they are whole rows
# of both widths apart: primes, because rows of tensors are seldom multiples of either.
_WIDTHS = 79, 83


def checksum_of(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """Return column sums of the 8-byte words of `storage` as a checksum, and the words that fill no row.

    A single changed byte always changes the checksum; several go unseen only if they cancel in the columns of both
    widths. Temporary memory is negligible.

    Args:
        storage: holds the bytes.
        start: the first byte, a multiple of 8.
        nbytes: number of bytes; None: all behind `start`.

    Returns:
        int64 of shape (n,), n below 256, on the device of the storage.

    Raises:
        ValueError: the storage is smaller, as where FSDP has freed it.
    """
    nbytes = storage.nbytes() - start if nbytes is None else nbytes
    if start + nbytes > storage.nbytes():  # torch would make the storage larger
        raise ValueError(f"a tensor of {nbytes} bytes from byte {start} on in freed memory of {storage.nbytes()} bytes")
    words = torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage, start // 8, (nbytes // 8,), (1,))
    parts = [words.as_strided((nbytes // 8 // width, width), (width, 1)).sum(0) for width in _WIDTHS]
    parts.append(words[min(nbytes // 8 // width * width for width in _WIDTHS) :])
    if nbytes % 8:
        parts.append(as_bytes(storage, start + nbytes // 8 * 8, nbytes % 8).long())
    return torch.cat(parts)


def checksum_of_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return `checksum_of` the elements of strided `t` in memory order. A view with gaps is copied first."""
    raw = t.detach()
    raw = raw.conj() if raw.is_conj() else raw
    raw = neg_view(raw) if raw.is_neg() else raw
    if not raw.is_contiguous():
        for dim, step in enumerate(raw.stride()):
            if step == 0 and raw.shape[dim] > 1:
                raw = raw.narrow(dim, 0, 1)  # all elements of an expanded dimension are one
        raw = raw.permute(sorted(range(raw.dim()), key=lambda dim: -raw.stride(dim))).contiguous()
    item = raw.element_size()
    raw = raw if storage_offset(raw) * item % 8 == 0 else raw.clone()
    return checksum_of(raw.untyped_storage(), storage_offset(raw) * item, raw.numel() * item)


def mark_discarded(storage: torch.UntypedStorage) -> None:
    """Note that the owner is about to free `storage`, and fills the same storage before backward reads."""
    storage._ebbtide_is_discarded = True  # pyright: ignore[reportAttributeAccessIssue] (ends with the storage)


def is_discarded(storage: torch.UntypedStorage) -> bool:
    return getattr(storage, "_ebbtide_is_discarded", False)
