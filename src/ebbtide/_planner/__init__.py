"""The planner: from the profile of a step to the plan that makes the best of a budget. Pure, without torch.

A profile's walk: `options` lists what each region could do, and the cost of each. `groups` merges regions of equal
build. `search` proposes assignments of options to regions, from the linear program in `relaxation`. `simulate` predicts
time and memory of each, and alone decides. `solve` is the entry point: `Solver(profile).solve(budget_bytes)` returns a
Plan, with the reasons from `explain`.
"""
