"""The `ebbtide` command: one file per subcommand. Its extra packages are imported when it runs, not before."""

import shlex
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
        package = (error.name or "").partition(".")[0]
        if package not in _OF_THE_EXTRA:
            raise
        return _complain(f"the command line needs {package}. Install it with: pip install 'ebbtide[cli]'")


def _run(arguments: Sequence[str] | None) -> int:
    import tyro

    from ebbtide._cli.demo import demo
    from ebbtide._cli.plan import plan

    commands = tyro.extras.SubcommandApp()
    commands.command(demo)
    commands.command(plan)
    # Without pairs: nobody needs --no-small.
    return commands.cli(
        prog="ebbtide",
        description="Moves the activations of PyTorch training out of device memory and back, bit for bit.",
        args=_with_script_arguments(sys.argv[1:] if arguments is None else arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _with_script_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """What is behind "--" is a script's, and is handed to the command as one text: no parser looks at it."""
    if "--" not in arguments:
        return arguments
    place = list(arguments).index("--")
    return [*arguments[:place], f"--script-arguments={shlex.join(arguments[place + 1 :])}"]


def _complain(message: str) -> int:
    sys.stderr.write(f"ebbtide: {message}\n")
    return _BAD_INPUT
