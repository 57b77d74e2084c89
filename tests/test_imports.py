"""`import ebbtide` imports no package but torch, numpy and psutil, and the command line parses without torch."""

import json
import subprocess
import sys

import pytest

import ebbtide

OPTIONAL = ["highspy", "matplotlib", "rich", "transformers", "tyro"]


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Top-level packages in memory after torch alone, and after ebbtide too."""
    code = (
        "import json, sys, torch\n"
        "tops = lambda: sorted({name.partition('.')[0] for name in sys.modules})\n"
        "before = tops()\n"
        "import ebbtide, ebbtide._cli; ebbtide.offload, ebbtide.offload_activations, ebbtide.Stats().metrics()\n"
        "print(json.dumps({'before': before, 'after': tops()}))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("package", OPTIONAL)
def test_import_brings_no_optional_package(loaded, package):
    assert package not in set(loaded["after"]) - set(loaded["before"])


@pytest.mark.parametrize(
    "command", [[], ["plan"], ["demo"], ["max-batch"]], ids=lambda command: " ".join(["ebbtide", *command])
)
def test_help_needs_no_torch(command):
    code = (
        "import sys\n"
        "from ebbtide._cli import main\n"
        "try:\n"
        f"    main([*{command}, '--help'])\n"
        "finally:\n"
        "    sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: ebbtide" in done.stdout


@pytest.mark.parametrize("name", ["compat", "integrations", "pipeline", "types"])
def test_packages_are_found_by_name_before_their_import(name):
    """In a process of its own, where no test has imported the package."""
    code = f"import sys, ebbtide; print('ebbtide.{name}' in sys.modules, ebbtide.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", f"ebbtide.{name}"]


def test_unknown_names_are_not_found():
    with pytest.raises(AttributeError, match="has no attribute 'offlaod'"):
        _ = ebbtide.offlaod


def test_import_worked(loaded):
    assert "ebbtide" in loaded["after"]
