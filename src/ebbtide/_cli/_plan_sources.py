"""Where the profile of `ebbtide plan` comes from: a file, a model that is measured here, somebody's training script."""

import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ebbtide._dry_run import measure
from ebbtide._errors import ConfigError, EbbtideError
from ebbtide._profiling.profile import Profile
from ebbtide._utils import env

_MIN_BYTES = "1MiB"


@dataclass(frozen=True)
class ModelSource:
    """A model and a batch, made by functions that are named as "package.module:function"."""

    model: str
    batch: str | None
    loss: str | None
    store: str | None
    min_bytes: str | None
    host_limit: str | None
    regions: tuple[str, ...]

    def profile(self) -> Profile:
        if self.batch is None:
            raise ConfigError("--model needs --batch package.module:function too: what the model is called with")
        make_model, make_batch = _function("--model", self.model), _function("--batch", self.batch)
        loss = None if self.loss is None else _function("--loss", self.loss)
        model = make_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"--model {self.model} gives a {type(model).__name__}: expected a torch.nn.Module")
        return measure(
            model,
            make_batch(),
            loss=loss,
            store=self.store,
            min_bytes=_MIN_BYTES if self.min_bytes is None else self.min_bytes,
            host_limit=self.host_limit,
            regions=self.regions,
        )


@dataclass(frozen=True)
class ScriptSource:
    """A training script, which runs in a process of its own until a handle has its profile."""

    script: Path
    arguments: str

    def profile(self) -> Profile:
        if not self.script.is_file():
            raise ConfigError(f"--script {self.script}: there is no such file")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            status = subprocess.run(  # noqa: S603 (what the user asked for)
                [sys.executable, str(self.script), *shlex.split(self.arguments)],
                env={**os.environ, **env.of_a_run_for_its_profile(path)},
                check=False,
            ).returncode
            if not path.exists():
                raise EbbtideError(self._why_none(status))
            return Profile.load(path)

    def _why_none(self, status: int) -> str:
        if status != 0:
            return f"--script {self.script} ended with exit status {status} before it had a profile"
        return (
            f"--script {self.script} ended before it had a profile: that takes three steps, and the beginning of a "
            "fourth, of a model with ebbtide.offload(model) or offload(model, budget=...)"
        )


def _function(option: str, name: str) -> Callable[..., Any]:
    module_name, _, inside = name.partition(":")
    if not module_name or not inside:
        raise ConfigError(f"{option} {name}: expected package.module:function")
    found = _attribute(option, name, _module(option, name, module_name), inside)
    if not callable(found):
        raise ConfigError(f"{option} {name} is a {type(found).__name__}: expected a function")
    return found


def _module(option: str, name: str, module_name: str) -> object:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; an installed command does not
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module needs
        raise ConfigError(f"{option} {name}: there is no module {error.name!r} here or in sys.path") from error


def _attribute(option: str, name: str, module: object, inside: str) -> object:
    try:
        return attrgetter(inside)(module)
    except AttributeError as error:
        raise ConfigError(f"{option} {name}: {error}") from error
