"""How far ahead of compute a host has to be, and what a plan has it do. Pure."""

import dataclasses
import math

from ebbtide._planner.options import Option, option_for, queueing_s
from ebbtide._planner.simulate import Outcome, Pace, simulate
from ebbtide._plans import Plan, Recipe
from ebbtide._profiling.profile import Host, Profile

_WIDE = 2**62  # windows that nothing waits for


def with_host(profile: Profile, host: Host | None) -> Profile:
    """The profile with its host so far ahead that a step with everything kept waits for nothing: what such a step waits
    for is in the times of compute."""
    if host is None:
        return dataclasses.replace(profile, host=None)
    alone = dataclasses.replace(host, lead_s=0.0, steady_lead_s=math.inf)
    needed_s = _all_kept(dataclasses.replace(profile, host=alone)).host_wait_s
    late_s = host.seconds - profile.plain_s
    leads = {"lead_s": max(host.lead_s, needed_s), "steady_lead_s": max(needed_s, late_s)}
    return dataclasses.replace(profile, host=dataclasses.replace(host, **leads))


def _all_kept(profile: Profile) -> Outcome:
    keep, count = Recipe("keep"), len(profile.regions)
    windows, turns = (0,) * count, (0,) * len(profile.around.turns)
    return simulate(profile, [option_for(region, keep) for region in profile.regions], Pace(windows, turns, windows))


def queueing_forward_s(profile: Profile, host: Host, plan: Plan) -> float:
    """What a forward by `plan` takes the host, from the first region to the end of the last one."""
    own = zip(options_of_plan(profile, plan), host.regions, strict=True)
    return sum(region.forward_s + queueing_s(option, host, region) for option, region in own)


def host_wait_s(profile: Profile, plan: Plan) -> float:
    """What compute waits for the host in a step by `plan`, if it waits for nothing else."""
    count = len(profile.regions)
    pace = Pace((_WIDE,) * count, (_WIDE,) * len(profile.around.turns), (_WIDE,) * count)
    return simulate(profile, options_of_plan(profile, plan), pace).host_wait_s


def options_of_plan(profile: Profile, plan: Plan) -> list[Option]:
    """What `plan` chooses for each region of the profile."""
    return [option_for(region, plan.recipe_of(region.name) or Recipe("keep")) for region in profile.regions]
