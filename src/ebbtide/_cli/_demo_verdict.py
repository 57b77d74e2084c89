"""The two runs side by side: what was saved, whether a single bit differs, and the table that says so. Pure."""

from dataclasses import dataclass
from statistics import median

from rich.table import Table

from ebbtide._cli._demo_task import Moved, Outcome
from ebbtide._utils.sizes import format_bytes

_LEAST_SHARE = 0.5
_HASH_DIGITS = 10


@dataclass(frozen=True)
class Verdict:
    """What the demo claims, and whether it held.

    Attributes:
        activation_bytes: of one step, as the offloaded run counted them.
        saved_bytes: by how much the peak above the base dropped.
        faults: what did not hold, in words; empty when all did.
    """

    activation_bytes: int
    saved_bytes: int
    faults: tuple[str, ...]

    @property
    def saved_share(self) -> float:
        return self.saved_bytes / self.activation_bytes if self.activation_bytes else 0.0

    @property
    def exit_status(self) -> int:
        return 1 if self.faults else 0

    def __str__(self) -> str:
        if self.faults:
            return f"FAILED: {'; '.join(self.faults)}"
        return (
            f"Losses and parameters are equal to the bit, and the peak above the base is "
            f"{format_bytes(self.saved_bytes)} lower: {self.saved_share:.0%} of the "
            f"{format_bytes(self.activation_bytes)} of activations of a step."
        )


def judge(plain: Outcome, offloaded: Outcome) -> Verdict:
    """Compare bits and peaks of the two runs."""
    activation_bytes = offloaded.moved.activation_bytes // len(offloaded.losses)
    saved_bytes = plain.above_base_bytes - offloaded.above_base_bytes
    faults = [*_faults_of_bits(plain, offloaded), *_faults_of_memory(offloaded.moved, activation_bytes, saved_bytes)]
    return Verdict(activation_bytes, saved_bytes, tuple(faults))


def _faults_of_bits(plain: Outcome, offloaded: Outcome) -> list[str]:
    pairs = zip(plain.loss_bits, offloaded.loss_bits, strict=True)
    differing = [number for number, (one, other) in enumerate(pairs, 1) if one != other]
    if differing:
        return [f"the losses differ from step {differing[0]} on"]
    if plain.parameters_sha256 != offloaded.parameters_sha256:
        return ["the losses are equal, but the parameters after the last step differ"]
    return []


def _faults_of_memory(moved: Moved, activation_bytes: int, saved_bytes: int) -> list[str]:
    if moved.out_bytes == 0:
        return ["nothing was moved"]
    if saved_bytes < _LEAST_SHARE * activation_bytes:
        return [
            f"the peak dropped by {format_bytes(saved_bytes)}, less than half of the "
            f"{format_bytes(activation_bytes)} of activations"
        ]
    return []


def verdict_table(plain: Outcome, offloaded: Outcome, verdict: Verdict, *, title: str, check: str) -> Table:
    """One row per measure, one column per run, and what the comparison says. `check` marks what is equal."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("", "plain", "offloaded", ""):
        table.add_column(heading, justify="right" if heading else "left")
    steps = len(plain.losses)
    for number in range(steps):
        one, other = plain.loss_bits[number], offloaded.loss_bits[number]
        table.add_row(
            f"loss, step {number + 1}", _loss(plain, number), _loss(offloaded, number), _equal(one, other, check)
        )
    one, other = plain.parameters_sha256, offloaded.parameters_sha256
    table.add_row("parameters, hash", one[:_HASH_DIGITS], other[:_HASH_DIGITS], _equal(one, other, check))
    table.add_section()
    _add_memory(table, plain, offloaded, verdict)
    table.add_section()
    _add_time(table, plain, offloaded)
    return table


def _add_memory(table: Table, plain: Outcome, offloaded: Outcome, verdict: Verdict) -> None:
    steps = len(offloaded.losses)
    table.add_row("memory before", format_bytes(plain.base_bytes), format_bytes(offloaded.base_bytes))
    table.add_row("peak memory", format_bytes(plain.peak_bytes), format_bytes(offloaded.peak_bytes))
    table.add_row(
        "peak above before",
        format_bytes(plain.above_base_bytes),
        format_bytes(offloaded.above_base_bytes),
        f"{format_bytes(verdict.saved_bytes)} saved",
    )
    table.add_row("activations/step", "", format_bytes(verdict.activation_bytes), f"{verdict.saved_share:.0%} saved")
    table.add_row("moved out/step", "", format_bytes(offloaded.moved.out_bytes / steps))
    table.add_row("fetched back/step", "", format_bytes(offloaded.moved.in_bytes / steps))


def _add_time(table: Table, plain: Outcome, offloaded: Outcome) -> None:
    one, other = median(plain.step_s), median(offloaded.step_s)
    steps = len(offloaded.losses)
    stall_s = offloaded.moved.stall_forward_s + offloaded.moved.stall_backward_s
    table.add_row("median step time", _time(one), _time(other), f"{other / one:.2f}x")
    table.add_row("stall/step", "", _time(stall_s / steps))


def _loss(outcome: Outcome, number: int) -> str:
    return f"{outcome.losses[number]:.4f} {outcome.loss_bits[number]}"


def _equal(one: str, other: str, check: str) -> str:
    return f"[green]{check} same bits[/]" if one == other else "[red]DIFFERENT[/]"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
