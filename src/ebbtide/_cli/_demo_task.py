"""What the demo's processes tell each other: a task goes to a worker, an outcome comes back. JSON both ways."""

import json
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from ebbtide._utils.sizes import KIB, MIB


class Mode(str, Enum):
    """How a worker trains."""

    PLAIN = "plain"
    """As anybody would, without ebbtide."""
    OFFLOADED = "offloaded"
    """Forward inside `ebbtide.offload_activations`."""


@dataclass(frozen=True)
class Size:
    """The model, its batch, and how much of what it saves may be on the device because of us.

    Attributes:
        width, layers, heads: of the transformer.
        context, batch: tokens in a sequence, sequences in a batch.
        window_bytes: window and prefetch of the offloaded run.
        min_bytes: saves below it stay.
        sample_s: time between two samples of the memory curve.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    window_bytes: int
    min_bytes: int
    sample_s: float


# Narrow and long: a block saves about 64 bytes per token and unit of width for 72 * width operations, so a narrow
# model saves most per second of computing, and its parameters and their optimizer state stay far below what it saves.
FOR_RAM = Size(
    width=192, layers=16, heads=6, context=512, batch=20, window_bytes=64 * MIB, min_bytes=MIB, sample_s=0.05
)
FOR_ACCELERATOR = Size(
    width=512, layers=16, heads=8, context=1024, batch=8, window_bytes=256 * MIB, min_bytes=MIB, sample_s=0.002
)
SMALL = Size(
    width=128, layers=6, heads=4, context=128, batch=16, window_bytes=4 * MIB, min_bytes=64 * KIB, sample_s=0.005
)


@dataclass(frozen=True)
class Task:
    """One run of one worker.

    Attributes:
        mode: with or without offloading.
        device: "cpu", or the type of the accelerator.
        store: where parcels wait, as `offload_activations` takes it.
        steps, seed: the same in both modes, or there would be nothing to compare.
        threads: of the CPU. Their number decides the order of sums, and so the bits.
        size: of the model and its batch.
    """

    mode: Mode
    device: str
    store: str
    steps: int
    seed: int
    threads: int
    size: Size

    def in_mode(self, mode: Mode) -> "Task":
        return replace(self, mode=mode)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Task":
        raw: dict[str, Any] = json.loads(text)
        raw["mode"] = Mode(raw["mode"])
        raw["size"] = Size(**raw["size"])
        return Task(**raw)


@dataclass(frozen=True)
class Moved:
    """What the offloaded run counted, in bytes and seconds over all steps; zeros where nothing was offloaded.

    Attributes:
        activation_bytes: what autograd saved that is no parameter and no buffer: parcels, and the saves that stayed.
        out_bytes, in_bytes: moved to the store, and fetched back.
        stall_forward_s, stall_backward_s: time compute waited for it.
    """

    activation_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    stall_forward_s: float = 0.0
    stall_backward_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What one run came to.

    Attributes:
        losses, loss_bits: of every step; the bits as the hexadecimal of the float32.
        parameters_sha256: of the bytes of all parameters after the last step.
        step_s: time of every step.
        base_bytes: memory before the first step, with parameters, gradients and optimizer state in place.
        peak_bytes: the most since then, as the system (or the accelerator's allocator) counted it.
        curve_s, curve_bytes: memory over time, sampled.
        moved: what travelled.
    """

    losses: list[float]
    loss_bits: list[str]
    parameters_sha256: str
    step_s: list[float]
    base_bytes: int
    peak_bytes: int
    curve_s: list[float]
    curve_bytes: list[int]
    moved: Moved

    @property
    def above_base_bytes(self) -> int:
        return self.peak_bytes - self.base_bytes

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> "Outcome":
        fields: dict[str, Any] = {**raw, "moved": Moved(**raw["moved"])}
        return Outcome(**fields)
