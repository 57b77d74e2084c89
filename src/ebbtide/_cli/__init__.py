"""The `ebbtide` command: one file per subcommand. No file imports torch before a command needs it."""

import shlex
import sys
from collections.abc import Sequence

from ebbtide._errors import EbbtideError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ebbtide <command>`; returns the exit status. `arguments` default to those of the process."""
    try:
        return _run(arguments)
    except EbbtideError as error:
        return _complain(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("tyro", "matplotlib"):
            raise
        return _complain(f"the command line needs {package}. Install it with: pip install 'ebbtide[cli]'")


def _run(arguments: Sequence[str] | None) -> int:
    import tyro

    from ebbtide._cli.demo import demo
    from ebbtide._cli.plan import plan

    commands = tyro.extras.SubcommandApp()
    commands.command(demo)
    commands.command(plan)
    return commands.cli(
        prog="ebbtide",
        description="Moves the activations of PyTorch training out of device memory and back, bit for bit.",
        args=_with_script_arguments(sys.argv[1:] if arguments is None else arguments),
        config=(tyro.conf.FlagCreatePairsOff,),  # no --no-small beside --small
    )


def _with_script_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """Join the arguments behind "--" into one text: arguments of a script, unread by any parser."""
    if "--" not in arguments:
        return arguments
    place = list(arguments).index("--")
    return [*arguments[:place], f"--script-arguments={shlex.join(arguments[place + 1 :])}"]


def _complain(message: str) -> int:
    """Exit status 2, as argument parsers use: the command could not begin. 1 is a command's own verdict."""
    sys.stderr.write(f"ebbtide: {message}\n")
    return 2
