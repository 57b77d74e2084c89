"""The suite on pairs of torch and Python: `pipx run nox -l` lists the pairs, `pipx run nox` runs all of them.

Arguments behind `--` go to pytest: `nox -s "tests(python='3.12', torch='2.15.0')" -- --all`. Each pair has an
environment of its own, of some GB where the index has builds with CUDA only. A Python that is not installed fails.
"""

from pathlib import Path

import nox

nox.options.error_on_missing_interpreters = True

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")


@nox.session
@nox.parametrize("python,torch", [(python, torch) for python in PYTHONS for torch in TORCHES])
def tests(session: nox.Session, torch: str) -> None:
    # torch first and alone, as in the Makefile: a later package may ask for another release.
    session.install(f"torch=={torch}")
    # Of some packages the pinned release does not exist for Python 3.10, which takes what pip finds.
    pins = [] if session.python == "3.10" else Path("constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join([*(pin for pin in pins if not pin.startswith("torch==")), f"torch=={torch}", ""]))
    session.install("-c", str(constraints), "-e", ".[dev]")
    session.run("python", "-m", "pytest", "-n", "auto", "--dist", "loadfile", *session.posargs)
