"""The profile behind `ebbtide plan`: from a file or a measurement, and changed by what-ifs."""

import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from ebbtide._config import SETTINGS, Budget, parse_budget
from ebbtide._errors import ConfigError, EbbtideError
from ebbtide._profiling.profile import Profile
from ebbtide._utils import env
from ebbtide._utils.sizes import format_bytes, parse_bytes


def measure_model(
    model: str,
    batch: str | None,
    loss: str | None,
    store: str | None,
    min_bytes: str | None,
    host_limit: str | None,
    regions: tuple[str, ...],
) -> Profile:
    """Measure a model and a batch, made by functions that are named as "package.module:function"."""
    if batch is None:
        raise ConfigError("--model needs --batch package.module:function too: what the model is called with")
    make_model, make_batch = _function("--model", model), _function("--batch", batch)
    loss_of = None if loss is None else _function("--loss", loss)
    from torch.nn import Module

    from ebbtide._dry_run import measure

    module = make_model()
    if not isinstance(module, Module):
        raise ConfigError(f"--model {model} gives a {type(module).__name__}: expected a torch.nn.Module")
    return measure(
        module,
        make_batch(),
        loss=loss_of,
        store=store,
        min_bytes=SETTINGS["min_bytes"].default if min_bytes is None else min_bytes,
        host_limit=host_limit,
        regions=regions,
    )


def measure_script(script: Path, arguments: str, output: TextIO) -> Profile:
    """Run a training script, which prints to `output`, in a separate process until a handle has a profile."""
    if not script.is_file():
        raise ConfigError(f"--script {script}: there is no such file")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        status = subprocess.run(  # noqa: S603 (what the user asked for)
            [sys.executable, str(script), *shlex.split(arguments)],
            env={**os.environ, **env.profiling_variables(path)},
            stdout=output,
            check=False,
        ).returncode
        if path.exists():
            return Profile.load(path)
    if status != 0:
        raise EbbtideError(f"--script {script} ended with exit status {status} before it had a profile")
    raise EbbtideError(
        f"--script {script} ended before it had a profile: that takes three steps, and the beginning of a fourth, of "
        "a model with ebbtide.offload(model) or offload(model, budget=...)"
    )


def _function(option: str, name: str) -> Callable[..., Any]:
    module_name, _, inside = name.partition(":")
    if not module_name or not inside:
        raise ConfigError(f"{option} {name}: expected package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; an installed command does not
    try:
        found = attrgetter(inside)(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a package that the module needs
        raise ConfigError(f"{option} {name}: there is no module {error.name!r} here or in sys.path") from error
    except AttributeError as error:
        raise ConfigError(f"{option} {name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{option} {name} is a {type(found).__name__}: expected a function")
    return found


@dataclass(frozen=True)
class WhatIf:
    """Differences from the measured step.

    Attributes:
        link: what if the link carried so many GB/s each way.
        tokens: tokens of the assumed batch: elements of the largest tensor among the model's arguments.
        scale: what if a batch had so many times the measured tokens.
        host_limit: what if the store took so much at most, "64GiB".
        reserve: memory in use before the step besides, "9GiB": the optimizer's state, if the profile has none.
        graphs: forwards before the first backward: of a pipeline's stage, or of one loss.
    """

    link: float | None = None
    tokens: int | None = None
    scale: float | None = None
    host_limit: str | None = None
    reserve: str | None = None
    graphs: int | None = None

    def check(self) -> None:
        """Raise ConfigError for an impossible value."""
        for option in ("link", "tokens", "scale", "graphs"):
            value = getattr(self, option)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"--{option} {value}: expected a finite number more than 0")
            if value is not None and value > 1e15:  # bytes and seconds would overflow
                raise ConfigError(f"--{option} {value}: expected 1e+15 at most")
        if self.tokens is not None and self.scale is not None:
            raise ConfigError("--tokens and --scale both say how large batches are: write one of them")
        for option, text in (("--host-limit", self.host_limit), ("--reserve", self.reserve)):
            if text is not None:
                parse_bytes(text, option)

    def applied_to(self, measured: Profile) -> tuple[Profile, list[str]]:
        """The profile with all differences, and a sentence for each."""
        profile, notes = measured, list[str]()
        if self.link is not None:
            link = measured.link
            rates = f"{link.out / 1e9:.1f} out and {link.back / 1e9:.1f} back"
            notes.append(f"What if the link carried {self.link:g} GB/s each way, not {rates}.")
            profile = replace(profile, link=replace(link, out=self.link * 1e9, back=self.link * 1e9))
        if self.host_limit is not None:
            nbytes = parse_bytes(self.host_limit, "--host-limit")
            notes.append(f"What if the store took {format_bytes(nbytes)} at most.")
            profile = replace(profile, host_limit_bytes=nbytes)
        if self.reserve is not None:
            nbytes = parse_bytes(self.reserve, "--reserve")
            notes.append(f"What if {format_bytes(nbytes)} more were in use before the step.")
            profile = profile.with_reserved(nbytes)
        if self.graphs is not None:
            notes.append(f"What if {self.graphs} forwards were under way at once, not {profile.graphs}.")
            profile = replace(profile, graphs=self.graphs, passes=())
        if profile.tokens == 0 and (self.tokens is not None or self.scale is not None):
            raise ConfigError("--tokens, --scale: the profile does not say how large its batches were, leave both out")
        tokens = profile.tokens if self.tokens is None else self.tokens
        if self.scale is not None:
            tokens = max(1, round(tokens * self.scale))
        if tokens != profile.tokens:
            notes.append(
                f"What if batches had {tokens} tokens, not {profile.tokens}: bytes and seconds in proportion. Right "
                "for more or fewer sequences; in longer sequences attention takes more time than in proportion, and "
                "steps are slower than predicted here."
            )
        return profile.scaled(tokens), notes


def budget_of(text: str | None, profile: Profile) -> Budget | None:
    """The budget of "40GiB", or of "0.8" or "80%" of the device's memory. Raises ConfigError."""
    if text is None:
        return None
    budget = Budget(parse_budget(text))
    if budget.is_share and profile.device_bytes is None:
        raise ConfigError(
            f"--budget {text}: the profile does not say how much memory its device has: write bytes, such as 40GiB"
        )
    return budget
