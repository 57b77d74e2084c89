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


# Words in a row of checksums. A prime, as rows of tensors are no multiples of it: swapped rows change column sums.
_WIDTH = 127


def checksum_of(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """Return column sums of the 8-byte words of `storage` as a checksum.

    A changed byte almost always changes the checksum: uint8 of shape (n,), n below 2040, on the storage's device. The
    first byte, `start`, is a multiple of 8. Temporary memory is negligible.
    """
    nbytes = storage.nbytes() - start if nbytes is None else nbytes
    rows = nbytes // (8 * _WIDTH)
    whole = 8 * _WIDTH * rows
    rest = as_bytes(storage, start + whole, nbytes - whole)
    words = torch.empty(0, dtype=torch.int64, device=storage.device)
    words.set_(storage, start // 8, (rows, _WIDTH), (_WIDTH, 1))
    return torch.cat([words.sum(0).view(torch.uint8), rest])


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
