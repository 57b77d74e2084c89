"""How far ahead of compute a host has to be. Pure."""

import dataclasses
import math

from ebbtide.planner.options import option_for
from ebbtide.planner.profile import Host, Profile
from ebbtide.planner.simulate import Outcome, Pace, simulate
from ebbtide.plans import Recipe


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
