"""The `ebbtide` command: one file per subcommand. No file imports torch before a command needs it."""

import shlex
import sys
from collections.abc import Sequence

from ebbtide._errors import EbbtideError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ebbtide <command>`; returns the exit status. `arguments` default to those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--" in given:  # arguments of a script, unread by any parser: joined into one text
        place = given.index("--")
        given[place:] = [f"--script-arguments={shlex.join(given[place + 1 :])}"]
    try:
        import tyro

        from ebbtide._cli.demo import demo
        from ebbtide._cli.plan import plan
        from ebbtide._cli.report import report

        commands = tyro.extras.SubcommandApp()
        commands.command(demo)
        commands.command(plan)
        commands.command(report)
        return commands.cli(
            prog="ebbtide",
            description="Moves the activations of PyTorch training out of device memory and back, bit for bit.",
            args=given,
            config=(tyro.conf.FlagCreatePairsOff,),  # no --no-small beside --small
        )
    except EbbtideError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("tyro", "matplotlib"):
            raise
        message = f"the command line needs {package}. Install it with: pip install 'ebbtide[cli]'"
    sys.stderr.write(f"ebbtide: {message}\n")
    return 2  # as argument parsers end: the command could not begin. 1 is a command's own verdict
