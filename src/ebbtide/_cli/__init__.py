"""The `ebbtide` command: one file per subcommand. No file imports torch before a command needs it."""

import shlex
import sys
from collections.abc import Sequence

from ebbtide._errors import EbbtideError
from ebbtide._utils.packages import installed_version

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ebbtide <command>`; returns the exit status. `arguments` default to those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--" in given:  # arguments of a script, unread by any parser: joined into one text
        place = given.index("--")
        given[place:] = [f"--script-arguments={shlex.join(given[place + 1 :])}"]
    if given == ["--version"]:
        sys.stdout.write(f"ebbtide {installed_version('ebbtide') or '(not installed by pip)'}\n")
        return 0
    try:
        import tyro

        from ebbtide._cli.bench import bench
        from ebbtide._cli.demo import demo
        from ebbtide._cli.doctor import doctor
        from ebbtide._cli.max_batch import max_batch
        from ebbtide._cli.plan import plan
        from ebbtide._cli.report import report

        commands = tyro.extras.SubcommandApp()
        commands.command(demo)
        commands.command(plan)
        commands.command(max_batch)
        commands.command(report)
        commands.command(doctor)
        commands.command(bench)
        return commands.cli(
            prog="ebbtide",
            description="Moves the activations of PyTorch training out of device memory and back, bit for bit. "
            "`ebbtide --version` prints the version.",
            args=given,
            # No --no-small beside --small, and no "None" in place of a file.
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
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
