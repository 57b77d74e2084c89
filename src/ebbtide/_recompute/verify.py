"""Verification: recomputation must save the bytes of forward, and forward's own tensors stand by in the store.

Note [Verification]
~~~~~~~~~~~~~~~~~~~
1. A planner chooses recomputation unasked, and a region may depend on anything: globals, objects, private generators.
   The first measured forward, and every N-th forward under `verify=N`, therefore takes a checksum of each saved tensor
   on the device and moves the tensor to the store.
2. Recomputation compares its saved tensors with the checksums before backward reads any of them. Equal checksums of
   tensors laid out alike drop the moved tensors; no byte comes back. A checksum is of bytes in memory order: the
   strides, and lazy conjugation and negation, say what the bytes mean.
3. After a difference or an error, backward reads the tensors of forward from the store. The handle never recomputes the
   region again, counts the reason, and warns once with the region's name.
4. Recomputation stops at the last saved tensor. If verification then finds side effects, it puts them back and
   recomputes once more, to the end of the region: code there may take back what the region has changed for the length
   of a forward (an object in an attribute). If so, recomputation of the region never stops early again, and never
   prunes: a pruned recipe recomputes all. Effects out of sight behind the last saved tensor then happen twice, too.
5. Kernels with unordered additions (atomics of an accelerator) differ by rounding in plain training too. Verification
   demands every bit of them only under torch.use_deterministic_algorithms.
6. A store without room for all saved tensors of a forward leaves the forward unverified, and the log says so. So does
   a collective inside the region: a verdict of one rank would have the ranks recompute different collectives.
"""

from typing import NamedTuple

import torch

from ebbtide._engine.hooks import Packed, SavedTensorHooks
from ebbtide._utils.storage import checksum_of_tensor
from ebbtide._utils.torch_private import is_pending, plain_tensors, without_dispatch


class Schedule:
    """Chooses the forwards to verify, besides a planner's first one.

    Args:
        every: N verifies each N-th forward, and the first of each batch size and training mode. 0 switches all
            verification off, None leaves the planner's first forward.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._forwards = 0
        self._kinds: set[object] = set()

    @property
    def is_off(self) -> bool:
        """Whether no forward is verified, a planner's first one included."""
        return self._every == 0

    def is_due(self, kind: object) -> bool:
        """Whether to verify the forward about to begin, of a hashable `kind`: batch size and training mode."""
        if not self._every:
            return False
        is_due = kind not in self._kinds or self._forwards % self._every == 0
        self._forwards += 1
        self._kinds.add(kind)
        return is_due


class _Seen(NamedTuple):
    """The plain tensors inside a saved tensor: checksums, and of each strides, lazy conjugation and negation."""

    sums: torch.Tensor
    layouts: tuple[tuple[tuple[int, ...], bool, bool], ...]


class Evidence:
    """The saved tensors of one forward of a region: checksums by number, and the tensors in the store.

    Args:
        hooks: pack the tensors, under a region call of the evidence alone.
    """

    def __init__(self, hooks: SavedTensorHooks) -> None:
        self._hooks = hooks
        # Saved tensors leave one by one, or a region's worth of them would add to the peak.
        hooks.region_call.keep_window(0)
        hooks.region_call.stands_by = True
        self._seen: dict[int, _Seen] = {}
        self._seen_again: dict[int, _Seen] = {}  # of the recomputation

    def take(self, number: int, t: torch.Tensor) -> Packed:
        """Move `t`, saved tensor `number` of the forward, and note the checksum."""
        seen = _seen_of(t)
        if seen is not None:
            self._seen[number] = seen
        return self._hooks.pack(t)

    @property
    def is_whole(self) -> bool:
        """Whether the store had room for every tensor."""
        return not self._hooks.lacks_room

    def read(self, packed: Packed) -> torch.Tensor:
        """The tensor behind `packed`, bit for bit."""
        return self._hooks.unpack(packed)

    def note_recomputed(self, number: int, t: torch.Tensor) -> None:
        """Note the checksum of `t`, saved tensor `number` of the recomputation. Does not wait for the device."""
        seen = _seen_of(t) if number in self._seen else None
        if seen is not None:
            self._seen_again[number] = seen

    def differing(self) -> list[int]:
        """Numbers of the saved tensors that differ. Waits for the device."""
        found: list[int] = []
        alike: dict[torch.device, list[int]] = {}
        for number, seen in self._seen_again.items():
            if seen.sums.shape == self._seen[number].sums.shape and seen.layouts == self._seen[number].layouts:
                alike.setdefault(seen.sums.device, []).append(number)
            else:
                found.append(number)
        with torch.no_grad(), without_dispatch():
            for numbers in alike.values():  # at once: kernels for each number would take most of a verification
                forward, again = (torch.cat([of[n].sums for n in numbers]) for of in (self._seen, self._seen_again))
                if not torch.equal(forward, again):
                    lengths = [self._seen[n].sums.numel() for n in numbers]
                    differ = torch.split((forward != again).cpu(), lengths)
                    found += [n for n, part in zip(numbers, differ, strict=True) if part.any()]
        self._seen_again.clear()
        return sorted(found)


def is_rounding(forward: torch.Tensor, recomputed: torch.Tensor) -> bool:
    """Whether reordered additions explain the difference of two saved tensors. Waits for the device."""
    if _is_exact(forward) or not forward.is_floating_point():
        return False
    with torch.no_grad(), without_dispatch():
        differ = forward != recomputed
        differ &= ~(forward.isnan() & recomputed.isnan())
        largest = forward.nan_to_num(0.0, 0.0, 0.0).abs().max()
        difference = (forward[differ].double() - recomputed[differ].double()).abs()
        # 16 units in the last place of the largest element: room for a few reordered additions, and not for inf or nan.
        return bool((difference <= 16 * torch.finfo(forward.dtype).eps * largest).all())


def _is_exact(t: torch.Tensor) -> bool:
    """Whether kernels of the device of `t` add in a fixed order."""
    return t.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def _seen_of(t: torch.Tensor) -> _Seen | None:
    """The plain tensors inside `t`; None without a comparable one, and before a collective has written `t`."""
    if is_pending(t):
        return None
    with torch.no_grad(), without_dispatch():
        parts = [part for part in plain_tensors(t) if _has_meaning(part)]
        layouts = tuple((_strides_of(part), part.is_conj(), part.is_neg()) for part in parts)
        return _Seen(torch.cat([checksum_of_tensor(part) for part in parts]), layouts) if parts else None


def _strides_of(t: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions with several elements: that of any other says nothing."""
    return tuple(step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1)


def _has_meaning(t: torch.Tensor) -> bool:
    is_strided = t.layout is torch.strided and not (t.is_quantized or t.is_nested or t._is_zerotensor())
    is_integer = not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
    # Kernels save workspaces as bytes, partly unwritten (RNNs of cuDNN and oneDNN), and attention saves seed and offset
    # of a generator, unwritten without dropout.
    is_opaque = t.dtype in (torch.uint8, torch.uint64) or (is_integer and t.dim() == 0)
    return is_strided and not is_opaque
