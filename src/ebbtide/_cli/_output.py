"""Where results go: tables for readers, JSON for programs, on stdout; pictures and data in files."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ebbtide._errors import ConfigError

_PICTURES = (".png", ".svg", ".pdf")


def console_for(as_json: bool = False) -> Console:
    """A console on stdout; on stderr beside JSON. In a file or a pipe, lines have 160 columns."""
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=160)


def write_json(result: dict[str, Any]) -> None:
    """Write a result as the only text on stdout."""
    sys.stdout.write(json.dumps(result, indent=1, default=dataclasses.asdict) + "\n")


def check_files(files: Mapping[str, Path | None]) -> None:
    """Before the work begins. `files`: by option. Raises ConfigError."""
    for option, path in files.items():
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"{option} {path}: expected a file, in a folder that is there")
    picture = files.get("--picture")
    if picture is not None and picture.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--picture {picture}: expected a name that ends in {', '.join(_PICTURES)}")


def write_file(option: str, path: Path, write: Callable[[Path], object]) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror})") from error
