"""What several ranks of one job have to agree on before they go by one plan. Pure."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from ebbtide._errors import PlanError
from ebbtide._profiling.profile import Around, Dear, Host, HostTime, Link, Profile, RegionProfile, Save, Turn

Row = TypeVar("Row", RegionProfile, Around, Save, Dear, Turn, Host, HostTime)


def slowest(profiles: Sequence[Profile]) -> Profile:
    """One profile for all ranks: what fits it fits each of them, and takes none of them longer.

    Of all bytes and seconds the largest, of the link's rates and of host and device memory the smallest. Saves, inputs
    and dear outputs are told apart by number: what one rank alone has counts too, what shares its memory on one rank
    shares it, and what may travel on one rank may. Of the places behind the last region only those count that all ranks
    have: elsewhere some rank could not release. `tokens` are those of the largest batch, whose figures these are, so
    that a smaller batch is scaled down from them. `base` is that of the rank with the most allocated before the step,
    `made_for` that of the first, who keeps the file.

    Raises PlanError if they are of different regions.
    """
    first = profiles[0]
    for other in profiles[1:]:
        if [region.name for region in other.regions] != [region.name for region in first.regions]:
            raise PlanError(
                "ranks have different regions: name those that train the same module with process_group=, or give each "
                "rank its own plan=, or the recipes by hand"
            )
    fullest = max(profiles, key=lambda profile: profile.base_bytes)
    merged = Profile(
        made_for=first.made_for,
        regions=tuple(_slowest_region([p.regions[k] for p in profiles]) for k in range(len(first.regions))),
        around=_slowest_around([p.around for p in profiles]),
        link=_slowest_link([p.link for p in profiles]),
        base_bytes=fullest.base_bytes,
        base=fullest.base,
        host_limit_bytes=_least(p.host_limit_bytes for p in profiles),
        tokens=max(p.tokens for p in profiles),
        device_bytes=_least(p.device_bytes for p in profiles),
        graphs=max(p.graphs for p in profiles),
    )
    return dataclasses.replace(merged, host=_slowest_host([p.host for p in profiles]))


def _slowest_region(regions: Sequence[RegionProfile]) -> RegionProfile:
    merged = dataclasses.replace(
        _largest(regions),
        saves=_by_number((save.index, save) for region in regions for save in region.saves),
        inputs=_by_number((save.index, save) for region in regions for save in region.inputs),
        dear=_by_number((dear.index, dear) for region in regions for dear in _agreed(region.dear, regions)),
    )
    # What is short-lived is what the work is beyond the saves: no rank's may vanish behind the saves of another.
    short_lived = max(each.backward_work_bytes - each.saved_bytes + each.unasked_bytes for each in regions)
    was_seen = all(region.moved_work_bytes > 0 for region in regions)
    return dataclasses.replace(
        merged,
        backward_work_bytes=merged.saved_bytes - merged.unasked_bytes + short_lived,
        moved_work_bytes=merged.moved_work_bytes if was_seen else 0,
        again_s=merged.again_s if all(region.again_s > 0 for region in regions) else 0.0,  # 0: never recomputed
    )


def _agreed(dear: "Sequence[Dear]", regions: Sequence[RegionProfile]) -> Iterator[Dear]:
    """What a call leads to is known if it does on every rank that makes it."""
    for row in dear:
        others = (other for region in regions for other in region.dear if other.index == row.index)
        is_alike = all((other.led, other.users) == (row.led, row.users) for other in others)
        yield row if is_alike else dataclasses.replace(row, led=(), led_s=0.0, led_ops=0, users=())


def _slowest_around(arounds: Sequence[Around]) -> Around:
    common = frozenset[int].intersection(*(frozenset(turn.save for turn in around.turns) for around in arounds))
    turns = _by_number((turn.save, turn) for around in arounds for turn in _at_places(around.turns, common))
    return dataclasses.replace(_largest(arounds), turns=turns)


def _at_places(turns: Iterable[Turn], places: Collection[int]) -> Iterator[Turn]:
    """The same peaks, each at the last of `places` that forward has come by. What comes before is its end."""
    at = Turn(-1, 0.0, 0)
    for turn in turns:
        if turn.save in places:
            at = turn
        yield dataclasses.replace(at, peak_bytes=turn.peak_bytes)


def _slowest_link(links: Sequence[Link]) -> Link:
    return Link(
        out=min(link.out for link in links),
        back=min(link.back for link in links),
        out_duplex=min(link.out_duplex for link in links),
        back_duplex=min(link.back_duplex for link in links),
        latency_s=max(link.latency_s for link in links),
        interference=max(link.interference for link in links),
    )


def _slowest_host(hosts: Sequence[Host | None]) -> Host | None:
    """Of those that are known. How far ahead it has to be is the merged profile's to say."""
    known = [host for host in hosts if host is not None]
    if not known:
        return None
    regions = tuple(_largest(times) for times in zip(*(host.regions for host in known), strict=True))
    return dataclasses.replace(_largest(known), regions=regions, lead_s=min(host.lead_s for host in known))


def _least(limits: Iterable[int | None]) -> int | None:
    """None is no limit."""
    return min((limit for limit in limits if limit is not None), default=None)


def _by_number(rows: "Iterable[tuple[int, Row]]") -> "tuple[Row, ...]":
    alike: dict[int, list[Row]] = {}
    for number, row in rows:
        alike.setdefault(number, []).append(row)
    return tuple(_largest(alike[number]) for number in sorted(alike))


def _largest(rows: "Sequence[Row]") -> "Row":
    """Of each number the largest; what is no number, of the first."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(rows[0]):
        values = [getattr(row, field.name) for row in rows]
        if isinstance(values[0], int | float):
            changed[field.name] = max(values)
    return dataclasses.replace(rows[0], **changed)
