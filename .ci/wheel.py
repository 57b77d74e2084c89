"""Build wheel and sdist, check both, and install the wheel into an environment that has nothing but torch.

torch is linked from the environment of this process: its download may take GBs. Everything else comes from the index.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
DIST, BUILD = ROOT / "dist", ROOT / "build"
VENV = BUILD / "wheel-venv"

SMOKE = """
import copy, importlib.metadata, torch, ebbtide
assert all(getattr(ebbtide, name) for name in ebbtide.__all__)
assert ebbtide.__file__.startswith({venv!r}), ebbtide.__file__
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
twin, x = copy.deepcopy(model), torch.randn(8, 64)
handle = ebbtide.offload(model, mode="all", store="mock", min_bytes=1, window="1KiB")
for each in (model, twin):
    each(x).square().sum().backward()
assert handle.stats().out.nbytes > 0
assert all(torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), twin.parameters()))
"""


def main() -> None:
    for folder in (DIST, VENV):
        shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    # build makes the wheel of the sdist: what lacks in one lacks in the other.
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = output("git", "ls-files", "--full-name", "src").splitlines()
    assert packed == {name.removeprefix("src/") for name in tracked}, packed
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)

    run(sys.executable, "-m", "venv", VENV)
    python = VENV / "bin" / "python"
    link("torch", Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")))
    report = BUILD / "installed.json"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--report", report, wheel)
    installed = {each["metadata"]["name"] for each in json.loads(report.read_text())["install"]}
    assert "ebbtide" in installed, installed
    assert "torch" not in installed, "pip install has replaced torch"
    run(python, "-I", "-W", "error", "-c", SMOKE.format(venv=str(VENV)), cwd=BUILD)
    asked = subprocess.run([VENV / "bin" / "ebbtide", "--help"], capture_output=True, text=True, check=False)
    assert "pip install 'ebbtide[cli]'" in asked.stderr, asked
    print(f"{wheel.name} and {sdist.name}: checked and installed")


def link(name: str, site: Path) -> None:
    """Link an installed distribution and all that it requires into the site-packages of another environment."""
    left, seen = [name], set()
    while left:
        found = distribution(left.pop())
        if found.metadata["Name"] in seen:
            continue
        seen.add(found.metadata["Name"])
        left += required_by(found)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                os.symlink(found.locate_file(top), site / top)


def required_by(found: Distribution) -> list[str]:
    requirements = map(Requirement, found.requires or ())
    return [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]


def run(*command: object, cwd: Path = ROOT) -> None:
    # Neither the checkout's sources nor packages beside the environment may stand in for what is installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), cwd=cwd, env=env, check=True)


def output(*command: object) -> str:
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
