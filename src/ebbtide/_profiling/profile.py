"""What one step was measured to do: plain data, JSON both ways. Seconds and bytes."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide._errors import PlanError
from ebbtide._utils.serialize import check_fields, reading
from ebbtide._utils.sizes import format_bytes
from ebbtide._utils.text import as_range, counts_up, plain_table

FORMAT = 4
_READABLE = (1, 2, 3, FORMAT)
NOBODY, OUTSIDE = -1, -2
"""Of which save's memory one takes that is of no save of its region: see `Save.shares`."""
_LEAST = {"shares": OUTSIDE, "save": -1}  # those of no save


class OtherVersionError(PlanError):
    """A file of profiles as another version of ebbtide writes them."""


@dataclass(frozen=True)
class Save:
    """Bytes that a region's backward, or its second run, needs and that may travel.

    Attributes:
        index: of the save in its region, as `Recipe.sites` counts.
        nbytes: that travel for it; 0 if another save takes the same memory along, or what is saved outside of the
            regions has it stay.
        at_s: when it is there, after its region's forward began.
        shares: index of the save of this region whose memory it shares, and without which it frees nothing; OUTSIDE if
            what is saved outside of the regions has it stay, so that to send it would be in vain; NOBODY if it has
            memory of its own, or a save of another region has.
    """

    index: int
    nbytes: int
    at_s: float
    shares: int = NOBODY

    @property
    def is_of_another_region(self) -> bool:
        """Its memory travels for a save there."""
        return self.nbytes == 0 and self.shares == NOBODY


@dataclass(frozen=True)
class Dear:
    """What a call of a dear operator returns.

    Attributes:
        index: of the call in its region, as `Recipe.sites` counts for a selective recipe.
        nbytes: of its outputs.
        at_s: when it is there, after its region's forward (or second run) began.
        again_s: what the call takes.
        op: its operator, "aten::mm".
        led: indices of the saves that its output leads to through operators that are not dear; empty if it leads to
            something that has to be there (see recipe.beyond).
        led_s: what the operators in between take, those that lead to nothing else.
        led_ops: how many they are.
        users: indices of the dear calls that are given what it leads to.
    """

    index: int
    nbytes: int
    at_s: float
    again_s: float
    op: str
    led: tuple[int, ...] = ()
    led_s: float = 0.0
    led_ops: int = 0
    users: tuple[int, ...] = ()


@dataclass(frozen=True)
class RegionProfile:
    """One pass through a region.

    Attributes:
        name: FQN of the region's module.
        forward_s, backward_s: its forward, and its backward without a second run; each with what follows it outside of
            all regions, up to the next one.
        again_s: its second run, with nothing held.
        saves: what autograd saves in it, as far as it may travel.
        stuck_bytes: what autograd saves in it and cannot travel (small, of an unknown kind). A second run spares it.
        inputs: the tensors passed to it.
        dear: the outputs of dear operators that its second run makes; empty where the compiler hides them.
        forward_work_bytes: most that its forward allocates beyond what was there when it began, saving nothing.
        backward_work_bytes: the same of its second run and backward together, inputs included.
        grad_bytes: what its backward leaves allocated.
        moved_work_bytes: most that its backward allocates without a second run, less the saves that it has not asked
            for by then; 0 if nobody looked.
        unasked_bytes: of `saves`, what backward does not ask for.
        behind_bytes: saved outside of all regions between it and the next one. It stays, whatever is done.
        has_dead_saves: it saves more than that, in a branch that nobody uses, which is gone when its forward ends.
    """

    name: str
    forward_s: float
    backward_s: float
    again_s: float
    saves: tuple[Save, ...]
    stuck_bytes: int
    inputs: tuple[Save, ...]
    dear: tuple[Dear, ...]
    forward_work_bytes: int
    backward_work_bytes: int
    grad_bytes: int
    moved_work_bytes: int = 0
    unasked_bytes: int = 0
    behind_bytes: int = 0
    has_dead_saves: bool = False

    @property
    def saved_bytes(self) -> int:
        return sum(save.nbytes for save in self.saves) + self.stuck_bytes

    @property
    def has_saves_in_vain(self) -> bool:
        """Whether it saves what frees nothing where it is moved."""
        return self.has_dead_saves or any(save.shares == OUTSIDE for save in self.saves)

    @property
    def may_move_inputs(self) -> bool:
        """Whether to move the tensors passed to it frees memory, its own or another region's."""
        return any(save.nbytes > 0 or save.is_of_another_region for save in self.inputs)

    @property
    def short_lived_bytes(self) -> int:
        """Most that its second run and backward together allocate beyond what is saved for backward."""
        return max(0, self.backward_work_bytes - self.saved_bytes + self.unasked_bytes)


@dataclass(frozen=True)
class Turn:
    """A place between the last region's forward and its backward.

    Attributes:
        save: index of the save, outside of all regions, at which what is on its way may leave; -1 for the end of the
            last region's forward, where there is none.
        at_s: when forward comes by, after the last region's has ended.
        peak_bytes: most that is allocated from here to the next of these places (or the last region's backward), beyond
            what was there before the first region, what regions keep and what is on its way.
    """

    save: int
    at_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Around:
    """The step outside of its regions: what comes before the first of them, and between forward and backward.

    Attributes:
        before_s: forward before the first region.
        after_s: forward after the last region.
        turn_s: backward before that of the last region (loss, logits).
        end_s: backward after that of the first region.
        kept_bytes: what is saved there and stays until backward, allocated before the first region begins.
        turns: places behind the last region, in order; the first is the end of its forward.
        held_bytes: what is saved behind the last region and stays until backward.
    """

    before_s: float
    after_s: float
    turn_s: float
    end_s: float
    kept_bytes: int
    turns: tuple[Turn, ...]
    held_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most that is allocated behind the last region, beyond what was there when its forward ended."""
        return max((turn.peak_bytes for turn in self.turns), default=0)


@dataclass(frozen=True)
class HostTime:
    """What a pass through a region takes the host, by which it is queued, with everything kept.

    Attributes:
        forward_s, backward_s: its forward and its backward.
        again_s: its second run, with nothing held.
        ops: operators that it calls.
    """

    forward_s: float
    backward_s: float
    again_s: float
    ops: int

    def times(self, ratio: float) -> "HostTime":
        """With so many times the seconds."""
        return HostTime(self.forward_s * ratio, self.backward_s * ratio, self.again_s * ratio, self.ops)


@dataclass(frozen=True)
class Host:
    """The host, that queues what compute runs. It is ahead of compute, or compute waits for it.

    Attributes:
        regions: what each of the profile's regions takes.
        before_s, after_s, turn_s: as those of `Around`.
        lead_s: how far ahead of compute it is where a step begins, at least.
        steady_lead_s: the same where it takes longer for a step than compute.
        frame_s: what it takes to prepare a region to run again, and again to begin its second run.
        op_s: for each operator that a selective recipe looks at, in both runs.
        held_s: for each output that is held, and again for handing it out.
        moved_s: for each parcel, out, and again for its way back.
    """

    regions: tuple[HostTime, ...]
    before_s: float
    after_s: float
    turn_s: float
    lead_s: float
    steady_lead_s: float
    frame_s: float
    op_s: float
    held_s: float
    moved_s: float

    def times(self, ratio: float) -> "Host":
        """One that takes so many times as long for everything."""
        seconds = ("before_s", "after_s", "turn_s", "frame_s", "op_s", "held_s", "moved_s")
        return dataclasses.replace(
            self,
            regions=tuple(region.times(ratio) for region in self.regions),
            **{name: getattr(self, name) * ratio for name in seconds},
        )

    @property
    def seconds(self) -> float:
        """That a step with everything kept takes it."""
        outside = self.before_s + self.after_s + self.turn_s
        return outside + sum(region.forward_s + region.backward_s for region in self.regions)


@dataclass(frozen=True)
class Link:
    """Rates of the lanes in bytes per second.

    Attributes:
        out, back: one direction alone.
        out_duplex, back_duplex: both at once.
        latency_s: of one copy, however small. Assumed where a handle makes the profile, as is the next one.
        interference: seconds that compute loses for each second that a lane copies beside it; less than one.
    """

    out: float
    back: float
    out_duplex: float
    back_duplex: float
    latency_s: float
    interference: float = 0.013  # of bare copies beside the steps of a Llama 1B; see docs/measured.md, P1

    def __post_init__(self) -> None:
        for name in ("out", "back", "out_duplex", "back_duplex"):
            if not getattr(self, name) > 0:
                raise PlanError(f"link.{name} is {getattr(self, name)!r}: expected more than 0 bytes per second")
        if not 0.0 <= self.interference < 1.0:
            raise PlanError(f"interference {self.interference}: compute would stand still beside a copy, or gain by it")

    def times(self, out: float, back: float) -> "Link":
        """With its rates so many times as large, alone and both at once."""
        return dataclasses.replace(
            self,
            out=self.out * out,
            back=self.back * back,
            out_duplex=self.out_duplex * out,
            back_duplex=self.back_duplex * back,
        )


@dataclass(frozen=True)
class Profile:
    """One step.

    Attributes:
        made_for: what it was measured on, by name: model, device, version of torch, min_bytes. One of others is
            refused; to batches of another size it is scaled.
        regions: in the order of forward.
        around: the rest.
        link: the lanes.
        base_bytes: allocated when the step began.
        base: what `base_bytes` is made of, by name: parameters, gradients, optimizer, other.
        host_limit_bytes: most that the store takes; None if it has no limit.
        tokens: elements of the tensors passed to the model, by which a profile is scaled to another shape.
        device_bytes: memory that the device has in all; None if nobody asked it.
        graphs: forwards whose backward is still to come, at the most, the one at hand counted: 1 in a plain loop, more
            in a pipeline, or where several forwards make one loss.
        host: what queues the step; None where compute has no queue, or nobody measured it.
    """

    made_for: Mapping[str, str]
    regions: tuple[RegionProfile, ...]
    around: Around
    link: Link
    base_bytes: int
    base: Mapping[str, int]
    host_limit_bytes: int | None
    tokens: int
    device_bytes: int | None = None
    graphs: int = 1
    host: Host | None = None

    def __post_init__(self) -> None:
        if self.graphs < 1:
            raise PlanError(f"graphs={self.graphs}: a backward is of one forward at least")
        if self.host is not None and len(self.host.regions) != len(self.regions):
            raise PlanError(f"times of the host for {len(self.host.regions)} of {len(self.regions)} regions")

    @property
    def has_second_runs(self) -> bool:
        """Whether regions ran again while it was measured. If not, all a planner can do is keep and move."""
        return any(region.again_s > 0 for region in self.regions)

    def check_second_runs(self) -> None:
        """Raises PlanError for a profile that is of no use within a budget."""
        if not self.has_second_runs:
            raise PlanError(
                "the profile was measured without a budget, so it does not say what it takes to run a region again: "
                "measure one with a budget, or leave profile= out"
            )

    @property
    def plain_s(self) -> float:
        """Forward and backward with everything kept."""
        around = self.around
        outside = around.before_s + around.after_s + around.turn_s + around.end_s
        return outside + sum(region.forward_s + region.backward_s for region in self.regions)

    def scaled(self, tokens: int) -> "Profile":
        """The step of a batch with so many tokens: bytes and seconds in proportion, what is there anyway as it is.

        Attention costs more than in proportion; the measured steps correct that.
        """
        if tokens == self.tokens or self.tokens <= 0:
            return self
        k = tokens / self.tokens
        return dataclasses.replace(
            self,
            regions=tuple(_scaled_region(region, k) for region in self.regions),
            around=_scaled_around(self.around, k),
            tokens=tokens,
        )

    def with_reserved(self, nbytes: int) -> "Profile":
        """With so many bytes more before the step: of what comes later, such as the state of an optimizer."""
        if nbytes == 0:
            return self
        base = {**self.base, "reserved": self.base.get("reserved", 0) + nbytes}
        return dataclasses.replace(self, base_bytes=self.base_bytes + nbytes, base=base)

    def refitted(self, forward: float, backward: float, memory: float = 1.0) -> "Profile":
        """With times and work that turned out to be so many times the measured ones."""
        return dataclasses.replace(
            self,
            regions=tuple(_refitted_region(region, forward, backward, memory) for region in self.regions),
            around=dataclasses.replace(
                self.around,
                before_s=self.around.before_s * forward,
                after_s=self.around.after_s * forward,
                turn_s=self.around.turn_s * backward,
                end_s=self.around.end_s * backward,
                turns=tuple(
                    dataclasses.replace(turn, at_s=turn.at_s * forward, peak_bytes=int(turn.peak_bytes * memory))
                    for turn in self.around.turns
                ),
            ),
        )

    def __str__(self) -> str:
        """Memory by region: what each saves, and needs while it runs. Bytes of single saves are in `regions`."""
        return "\n".join([_headline(self), plain_table([_COLUMNS, *_rows(self)], right=range(1, len(_COLUMNS)))])

    def what_differs(self, wanted: Mapping[str, str]) -> list[str]:
        """In words: of what is `wanted`, what it was not measured on. Settings that it does not say are believed."""
        believed = {key: value for key, value in wanted.items() if key in _SETTINGS}
        known = {**believed, **self.made_for}
        return [
            f"{key} {known.get(key, 'unknown')!r}, not {value!r}"
            for key, value in wanted.items()
            if known.get(key) != value
        ]

    def check_made_for(self, wanted: Mapping[str, str]) -> None:
        """Raises PlanError unless it was measured on what `wanted` names."""
        others = self.what_differs(wanted)
        if others:
            raise PlanError(f"the profile is of {'; '.join(others)}: measure one here, or leave profile= out")

    def save(self, path: str | Path) -> None:
        """Write it as JSON. Whoever reads the file meanwhile finds the old one or the new one, whole."""
        new = Path(f"{path}.{os.getpid()}.new")
        new.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
        new.replace(path)

    @staticmethod
    def load(path: str | Path) -> "Profile":
        """Read what `save` wrote. Raises PlanError for anything else, and where there is nothing to read."""
        with reading(path, "profile"):
            data = json.loads(Path(path).read_text())
            if "predicted" in data:
                raise PlanError("it is a plan: give it to offload(model, plan=Plan.load(file))")
            if data.pop("format") in _READABLE:
                profile = _from_dict(data)
                check_fields(profile, _LEAST)
                return profile
        raise OtherVersionError(f"{path} was written by another version of ebbtide: measure the profile again")


_SETTINGS = ("store", "min_bytes", "compiled")  # what figures in a profile besides what it is of

_COLUMNS = ("regions", "saves", "saved", "may travel", "inputs", "dear outputs", "forward", "backward", "gradients")


def _headline(profile: Profile) -> str:
    behind_bytes = sum(region.behind_bytes for region in profile.regions)
    outside_bytes = profile.around.kept_bytes + behind_bytes + profile.around.held_bytes
    parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in profile.base.items() if nbytes > 0]
    return (
        f"profile of {profile.made_for.get('model', 'a model')}, {profile.tokens} tokens: "
        f"{format_bytes(profile.base_bytes)} before the step ({', '.join(parts)}), "
        f"{format_bytes(sum(region.saved_bytes for region in profile.regions))} saved in regions, "
        f"{format_bytes(outside_bytes)} outside of them"
    )


def _rows(profile: Profile) -> Iterator[Sequence[str]]:
    """One line for regions that follow each other with the same figures."""
    run: list[str] = []
    before: tuple[str, ...] = ()
    for region in profile.regions:
        cells = _cells(region)
        if run and not (cells == before and counts_up(run[-1], region.name)):
            yield as_range(run[0], run[-1]), *before
            run = []
        run.append(region.name)
        before = cells
    if run:
        yield as_range(run[0], run[-1]), *before


def _cells(region: RegionProfile) -> tuple[str, ...]:
    sums = (
        region.saved_bytes,
        region.saved_bytes - region.stuck_bytes,
        sum(save.nbytes for save in region.inputs),
        sum(dear.nbytes for dear in region.dear),
        region.forward_work_bytes,
        region.backward_work_bytes,
        region.grad_bytes,
    )
    return str(len(region.saves)), *map(format_bytes, sums)


def _from_dict(data: dict[str, Any]) -> Profile:
    around: dict[str, Any] = {**data["around"], "turns": tuple(Turn(**turn) for turn in data["around"]["turns"])}
    return Profile(
        made_for=data["made_for"],
        regions=tuple(map(_region_from_dict, data["regions"])),
        around=Around(**around),
        link=Link(**data["link"]),
        base_bytes=data["base_bytes"],
        base=data["base"],
        host_limit_bytes=data["host_limit_bytes"],
        tokens=data["tokens"],
        device_bytes=data.get("device_bytes"),
        graphs=data.get("graphs", 1),
        host=None if data.get("host") is None else _host_from_dict(data["host"]),
    )


def _host_from_dict(data: dict[str, Any]) -> Host:
    regions: dict[str, Any] = {**data, "regions": tuple(HostTime(**times) for times in data["regions"])}
    return Host(**regions)


def _region_from_dict(data: dict[str, Any]) -> RegionProfile:
    rows: dict[str, Any] = {
        "saves": tuple(Save(**save) for save in data["saves"]),
        "inputs": tuple(Save(**save) for save in data["inputs"]),
        "dear": tuple(map(_dear_from_dict, data["dear"])),
    }
    return RegionProfile(**{**data, **rows})


def _dear_from_dict(data: dict[str, Any]) -> Dear:
    numbers: dict[str, Any] = {name: tuple(data.get(name, ())) for name in ("led", "users")}
    return Dear(**{**data, **numbers})


def _scaled_around(around: Around, k: float) -> Around:
    return dataclasses.replace(_scaled(around, k), turns=tuple(_scaled(turn, k) for turn in around.turns))


def _scaled_region(region: RegionProfile, k: float) -> RegionProfile:
    return dataclasses.replace(
        _scaled(region, k),
        saves=tuple(_scaled(save, k) for save in region.saves),
        inputs=tuple(_scaled(save, k) for save in region.inputs),
        dear=tuple(_scaled(dear, k) for dear in region.dear),
    )


def _refitted_region(region: RegionProfile, forward: float, backward: float, memory: float) -> RegionProfile:
    """Moments in forward move with it, and dear calls are as much dearer as the second run that they are part of."""
    return dataclasses.replace(
        region,
        forward_s=region.forward_s * forward,
        backward_s=region.backward_s * backward,
        again_s=region.again_s * backward,
        saves=tuple(dataclasses.replace(save, at_s=save.at_s * forward) for save in region.saves),
        dear=tuple(
            dataclasses.replace(
                dear,
                at_s=dear.at_s * forward,
                again_s=dear.again_s * backward,
                led_s=dear.led_s * backward,
            )
            for dear in region.dear
        ),
        backward_work_bytes=int(region.backward_work_bytes * memory),
        moved_work_bytes=int(region.moved_work_bytes * memory),
    )


def _scaled(row: Any, k: float) -> Any:
    """All seconds and bytes of a dataclass times `k`. Bytes do not come to nothing: a save of none shares another's."""
    changed: dict[str, int | float] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if field.name.endswith("_s"):
            changed[field.name] = value * k
        elif field.name.endswith("bytes") and field.name != "grad_bytes" and value > 0:  # those are of parameters
            changed[field.name] = max(1, round(value * k))
    return dataclasses.replace(row, **changed)
