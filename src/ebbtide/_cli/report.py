"""`ebbtide report`: the page of a run, and its lanes as a trace."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from ebbtide._cli._output import write_json
from ebbtide._errors import ConfigError
from ebbtide._planner.view import view_of_plan
from ebbtide._reports.trace import write_trace


def report(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
    trace: Path | None = None,
    torch_trace: Path | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Make one HTML page of a run: what holds the memory, with and without ebbtide, copies beside compute, regions.

    The page works offline. The run is the file of handle.save("run.json"), or of EBBTIDE_REPORT=run.json around a
    training script.

    Args:
        run: the file of a run.
        out: the page. Default: the name of the run, ending in .html.
        trace: a file for the lanes of a step, for Perfetto (ui.perfetto.dev) or chrome://tracing.
        torch_trace: a file of torch.profiler's export_chrome_trace from the same run: its events join those of --trace.
        as_json: print the figures as JSON, in bytes and seconds, beside the names of the files.
    """
    if torch_trace is not None and trace is None:
        raise ConfigError(f"--torch-trace {torch_trace}: its events join a trace, write --trace FILE too")
    from ebbtide._reports.page import run_figures, run_page  # with torch and matplotlib, which --help does without
    from ebbtide._reports.run import Run

    found, page = Run.load(run), out or run.with_suffix(".html")
    written = {"--out": page}
    try:
        page.write_text(run_page(found))
        if trace is not None:
            written["--trace"] = trace
            lines = {} if found.timeline is None else {"ebbtide, measured": found.timeline}
            if found.profile is not None and found.plan.predicted is not None:
                lines["ebbtide, predicted"] = view_of_plan(found.profile, found.plan).timeline
            if not lines:
                raise ConfigError("--trace: this run has no lanes to show, because no planner has measured a step")
            write_trace(lines, trace, torch_trace)
    except OSError as error:
        option, path = list(written.items())[-1]
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror})") from error
    if as_json:
        write_json({**run_figures(found), "files": {name.strip("-"): str(path) for name, path in written.items()}})
    else:
        sys.stdout.write("".join(f"{path}\n" for path in written.values()))
    return 0
