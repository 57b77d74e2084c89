"""Facts in every result file: device, versions, commit, command, date."""

import datetime
import importlib.metadata
import subprocess
import sys

PACKAGES = ("torch", "transformers", "trl", "triton", "diffusers")


def facts(command: str, device: str, commit: str | None = None) -> dict[str, object]:
    """`commit`: of the measured code, if the tree is no git repository."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "device": device,
        "versions": {"python": sys.version.split()[0], **{package: _version(package) for package in PACKAGES}},
        "commit": commit or head.stdout.strip(),
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
