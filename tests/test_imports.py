"""`import ebbtide` needs torch, numpy, psutil and rich. Everything else is imported by who uses it."""

import json
import subprocess
import sys

import pytest

import ebbtide

OPTIONAL = ["matplotlib", "scipy", "transformers", "tyro"]


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Top-level packages in memory after torch alone, and after ebbtide too."""
    code = (
        "import json, sys, torch\n"
        "tops = lambda: sorted({name.partition('.')[0] for name in sys.modules})\n"
        "before = tops()\n"
        "import ebbtide, ebbtide._reports.stats_text, ebbtide._cli\n"
        "print(json.dumps({'before': before, 'after': tops()}))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("package", OPTIONAL)
def test_import_brings_no_optional_package(loaded, package):
    assert package not in set(loaded["after"]) - set(loaded["before"])


@pytest.mark.parametrize("name", ["compat", "integrations"])
def test_what_is_imported_by_its_users_is_found_by_name(name):
    """In a process of its own: nobody else has imported it."""
    code = f"import sys, ebbtide; print('ebbtide.{name}' in sys.modules, ebbtide.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", f"ebbtide.{name}"]


def test_other_names_are_not_found():
    with pytest.raises(AttributeError, match="has no attribute 'offlaod'"):
        _ = ebbtide.offlaod


def test_import_worked(loaded):
    assert "ebbtide" in loaded["after"]
