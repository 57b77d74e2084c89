"""Where results go: tables for readers, JSON for programs, on stdout."""

import dataclasses
import json
import sys
from typing import Any

from rich.console import Console


def console_for(as_json: bool = False) -> Console:
    """A console on stdout; on stderr beside JSON. In a file or a pipe, lines have 160 columns."""
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=160)


def write_json(result: dict[str, Any]) -> None:
    """Write a result as the only text on stdout."""
    sys.stdout.write(json.dumps(result, indent=1, default=dataclasses.asdict) + "\n")
