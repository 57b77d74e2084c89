"""The same step on another link, another host, with larger batches. Pure."""

from dataclasses import dataclass, replace
from math import inf

from ebbtide._errors import ConfigError
from ebbtide._profiling.profile import Link, Profile
from ebbtide._settings import LEAST_BYTES, Budget
from ebbtide._utils.sizes import format_bytes, parse_bytes

_MOST = 10**15  # what comes of more is no number of bytes or seconds any longer


@dataclass(frozen=True)
class WhatIf:
    """What is different from what was measured; None: nothing.

    Attributes:
        link: GB/s, both ways.
        tokens, scale: of the batch: how many, or how many times the measured ones.
        host_limit, reserve: bytes, as text: most that the store takes, and what is there before the step besides.
        graphs: forwards that are under way at once.
    """

    link: float | None = None
    tokens: int | None = None
    scale: float | None = None
    host_limit: str | None = None
    reserve: str | None = None
    graphs: int | None = None

    def __post_init__(self) -> None:
        for option in ("link", "tokens", "scale", "graphs"):
            value = getattr(self, option)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"--{option} {value}: expected a finite number more than 0")
            if value is not None and value > _MOST:
                raise ConfigError(f"--{option} {value}: expected {_MOST:g} at most")
        if self.tokens is not None and self.scale is not None:
            raise ConfigError("--tokens and --scale both say how large batches are: write one of them")
        for option, text in (("--host-limit", self.host_limit), ("--reserve", self.reserve)):
            if text is not None:
                parse_bytes(text, option)

    def of(self, profile: Profile) -> Profile:
        """The profile with all that."""
        if self.link is not None:
            profile = replace(profile, link=_as_fast(profile.link, self.link * 1e9))
        if self.host_limit is not None:
            profile = replace(profile, host_limit_bytes=parse_bytes(self.host_limit, "--host-limit"))
        if self.reserve is not None:
            profile = profile.with_reserved(parse_bytes(self.reserve, "--reserve"))
        if self.graphs is not None:
            profile = replace(profile, graphs=self.graphs)
        if profile.tokens == 0 and (self.tokens is not None or self.scale is not None):
            raise ConfigError("--tokens, --scale: the profile does not say how large its batches were, leave both out")
        return profile.scaled(self._tokens(profile))

    def notes(self, profile: Profile) -> list[str]:
        """What is assumed, a sentence for each; `profile` is the measured one."""
        notes: list[str] = []
        if self.link is not None:
            notes.append(f"What if the link carried {self.link:g} GB/s each way, not {_rates(profile.link)}.")
        if self.host_limit is not None:
            notes.append(f"What if the store took {_size(self.host_limit, '--host-limit')} at most.")
        if self.reserve is not None:
            notes.append(f"What if {_size(self.reserve, '--reserve')} more were there before the step.")
        if self.graphs is not None:
            notes.append(f"What if {self.graphs} forwards were under way at once, not {profile.graphs}.")
        if self._tokens(profile) != profile.tokens:
            notes.append(
                f"What if batches had {self._tokens(profile)} tokens, not {profile.tokens}: bytes and seconds in "
                "proportion. Right for more or fewer sequences; in longer ones attention takes more time than that, "
                "and steps are slower than predicted here."
            )
        return notes

    def _tokens(self, profile: Profile) -> int:
        if self.tokens is not None:
            return self.tokens
        return profile.tokens if self.scale is None else max(1, round(profile.tokens * self.scale))


def parse_budget(text: str | None, profile: Profile) -> int | None:
    """Bytes of "40GiB", or of "0.8" of the device's memory. Raises ConfigError."""
    if text is None:
        return None
    is_share = text.replace(".", "", 1).isdigit() and ("." in text or float(text) < LEAST_BYTES)
    budget = Budget(float(text) if is_share else text)
    if is_share and profile.device_bytes is None:
        raise ConfigError(
            f"--budget {text}: the profile does not say how much memory its device has: write bytes, such as 40GiB"
        )
    return budget(profile.device_bytes or 0)


def _as_fast(link: Link, rate: float) -> Link:
    """Both at once cost what they cost before, in proportion."""
    duplex = rate * link.out_duplex / link.out, rate * link.back_duplex / link.back
    return replace(link, out=rate, back=rate, out_duplex=duplex[0], back_duplex=duplex[1])


def _size(text: str, option: str) -> str:
    return format_bytes(parse_bytes(text, option))


def _rates(link: Link) -> str:
    return f"{link.out / 1e9:.1f} out and {link.back / 1e9:.1f} back"
