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


def checksum_of(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """Return column sums of the 8-byte words of `storage` as a checksum.

    A changed byte almost always changes the checksum: int64 of shape (n,), n at most 255, on the storage's device. The
    first byte, `start`, is a multiple of 8. Temporary memory is negligible.
    """
    nbytes = storage.nbytes() - start if nbytes is None else nbytes
    whole = nbytes // 8 * 8
    words = as_bytes(storage, start, whole).view(torch.int64)
    parts = [as_bytes(storage, start + whole, nbytes - whole).long()]
    for width in (64, 61):  # a swap of whole rows at width 64 changes columns at width 61
        rows = words.numel() // width
        parts += [words[: rows * width].view(rows, width).sum(0), words[rows * width :]]
    return torch.cat(parts)


def checksum_of_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return `checksum_of` the elements of strided `t` in memory order. A view with gaps is copied first."""
    raw = t.detach()
    raw = raw.conj() if raw.is_conj() else raw
    raw = neg_view(raw) if raw.is_neg() else raw
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
