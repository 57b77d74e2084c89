"""The `ebbtide` command: one file per subcommand. Its extra packages are imported when it runs, not before."""

import sys
from collections.abc import Sequence

from ebbtide._errors import EbbtideError

__all__ = ["main"]

_OF_THE_EXTRA = {"tyro", "matplotlib"}
_BAD_INPUT = 2
"""Exit status of commands that could not begin, as argument parsers use it; 1 is a command's own verdict."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ebbtide <command>`; returns the exit status. `arguments` default to those of the process."""
    try:
        return _run(arguments)
    except EbbtideError as error:
        return _complain(str(error))
    except ModuleNotFoundError as error:
        if error.name not in _OF_THE_EXTRA:
            raise
        return _complain(f"the command line needs {error.name}. Install it with: pip install 'ebbtide[cli]'")


def _run(arguments: Sequence[str] | None) -> int:
    import tyro

    from ebbtide.cli.demo import demo

    commands = tyro.extras.SubcommandApp()
    commands.command(demo)
    status: int = commands.cli(prog="ebbtide", description="Moves activations of training.", args=arguments)
    return status


def _complain(message: str) -> int:
    sys.stderr.write(f"ebbtide: {message}\n")
    return _BAD_INPUT
