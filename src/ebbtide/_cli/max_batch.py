"""`ebbtide max-batch`: the largest batch under a budget, and the fastest per sample."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from ebbtide._cli._output import check_files, write_file, write_json
from ebbtide._config import parse_budget
from ebbtide._profiling.profile import Profile
from ebbtide._utils.sizes import format_bytes

_KEYS = (
    "batch", "tokens", "fits", "is_measured", "step_s", "samples_per_s", "tokens_per_s", "peak_bytes", "smallest_bytes",
    "moved_bytes", "recompute_s", "actions",
)  # fmt: skip


def max_batch(
    profiles: Annotated[tuple[Path, ...], tyro.conf.Positional],
    *,
    batch: int,
    budget: str,
    reserve: str = "0",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    picture: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
) -> int:
    """Find the largest batch whose step fits a budget, and the batch with the most samples per second.

    A plan is made for each of the batch sizes, from profiles in files. No GPU is needed, and a size takes seconds. Two
    profiles, of two batch sizes, measure what grows with the batch; from one profile bytes and seconds are in
    proportion.

    Args:
        profiles: files of profiles of one model, each of another batch size.
        batch: samples in the batch of the first profile; of one rank.
        budget: Peak of device memory to stay under: bytes, text like "40GiB", or a share of the device memory: 0.8
            or "80%".
        reserve: memory in use before the step besides, "9GiB": the optimizer's state, if the profiles have none.
        as_json: print JSON instead of a table.
        picture: a file for a picture: samples per second and peaks over batch sizes (png, svg, pdf).
    """
    check_files({"--picture": picture})
    from ebbtide._max_batch import max_batch as solve  # the planner is a third of the time of --help

    measured = [Profile.load(path) for path in profiles]
    found = solve(measured, batch=batch, budget=parse_budget(budget), reserve=reserve)
    of, kept = measured[0].made_for, found.largest_kept
    title = " on ".join(of[key] for key in ("model", "device") if key in of)
    marks = {"fastest": found.fastest.batch, "largest": found.largest.batch}
    if as_json:
        rows = [{name: getattr(row, name) for name in _KEYS} for row in found.rows]
        sizes = {"budget_bytes": found.budget_bytes, **marks, "largest_kept": None if kept is None else kept.batch}
        write_json({**sizes, "rows": rows, "assumptions": found.assumptions})
    else:
        unmoved = "no batch keeps everything" if kept is None else f"largest with everything kept {kept.batch}"
        sys.stdout.write(
            f"{title}, within {format_bytes(found.budget_bytes)}: fastest {found.fastest.batch}, largest "
            f"{found.largest.batch}, {unmoved}.\n\n{found}\n\n" + "\n".join(found.assumptions) + "\n"
        )
    if picture is not None:
        from ebbtide._reports.pictures import batch_sizes

        fitting = [(row.batch, row.samples_per_s, row.peak_bytes) for row in found.rows if row.fits]
        marks |= {} if kept is None else {"largest with everything kept": kept.batch}
        seen = [row.batch for row in found.rows if row.is_measured]
        figure = batch_sizes(fitting, seen, marks, found.budget_bytes, title)
        write_file("--picture", picture, lambda path: figure.savefig(path))
    return 0
