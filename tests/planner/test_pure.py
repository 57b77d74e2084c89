"""The planner runs without torch: its process starts fast, and needs no device."""

import subprocess
import sys
from pathlib import Path

PROFILE = Path(__file__).parents[2] / "benchmarks" / "results" / "profiles" / "A-compiled.json"

SCRIPT = """
import sys
from ebbtide._planner.solve import Solver
from ebbtide._profiling.profile import Profile

solver = Solver(Profile.load(sys.argv[1]))
plan = solver.solve(solver.smallest_budget())
print(any(region.recipe.recomputes for region in plan.regions.values()), "torch" in sys.modules)
"""


def test_a_profile_is_solved_without_torch():
    command = [sys.executable, "-c", SCRIPT, str(PROFILE)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["True", "False"]
