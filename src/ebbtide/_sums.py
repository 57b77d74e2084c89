"""Whether bytes are what they were, for the price of reading them."""

import torch

from ebbtide._bytes import as_bytes

_WORD = 8
_WIDTHS = (64, 61)  # what moves whole rows of the one changes columns of the other


def sums_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Sums of the words of `storage` by columns, int64 of shape (some hundreds,), on its device. What changes its bytes
    changes these, but for rare cases. Takes no memory to speak of."""
    whole = storage.nbytes() // _WORD * _WORD
    words = as_bytes(storage, 0, whole).view(torch.int64)
    parts = [as_bytes(storage, whole, storage.nbytes() - whole).long()]
    for width in _WIDTHS:
        rows = words.numel() // width
        parts += [words[: rows * width].view(rows, width).sum(0), words[rows * width :]]
    return torch.cat(parts)
