"""Storages as bytes, and checksums of them."""

import torch

from ebbtide._utils.torch_private import neg_view, storage_offset

_WORD = 8
_WIDTHS = (64, 61)  # what moves whole rows of the one changes columns of the other


def as_bytes(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """uint8 tensor of shape (nbytes,) over `storage` from byte `start` on; shares the memory."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    if start == 0 and nbytes is None:
        return empty.set_(storage)
    length = storage.nbytes() - start if nbytes is None else nbytes
    return empty.set_(storage, start, (length,), (1,))


def sums_of(storage: torch.UntypedStorage, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """Sums by columns of the words in `nbytes` of `storage` from byte `start`, a multiple of 8, on.

    int64 of shape (some hundreds,), on the storage's device. A change of the bytes changes the sums, but for rare
    cases. Takes no memory to speak of.
    """
    nbytes = storage.nbytes() - start if nbytes is None else nbytes
    whole = nbytes // _WORD * _WORD
    words = as_bytes(storage, start, whole).view(torch.int64)
    parts = [as_bytes(storage, start + whole, nbytes - whole).long()]
    for width in _WIDTHS:
        rows = words.numel() // width
        parts += [words[: rows * width].view(rows, width).sum(0), words[rows * width :]]
    return torch.cat(parts)


def sums_of_tensor(t: torch.Tensor) -> torch.Tensor:
    """The same of the elements of `t`, strided, in the order in which memory has them. A view with gaps is gathered."""
    raw = t.detach()
    raw = raw.conj() if raw.is_conj() else raw
    raw = neg_view(raw) if raw.is_neg() else raw
    for dim, step in enumerate(raw.stride()):
        if step == 0 and raw.shape[dim] > 1:
            raw = raw.narrow(dim, 0, 1)  # expanded: one element stands for all
    raw = raw.permute(sorted(range(raw.dim()), key=lambda dim: -raw.stride(dim))).contiguous()
    item = raw.element_size()
    raw = raw if storage_offset(raw) * item % _WORD == 0 else raw.clone()
    return sums_of(raw.untyped_storage(), storage_offset(raw) * item, raw.numel() * item)
