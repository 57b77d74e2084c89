"""Tables in HTML, with all names escaped, and a plan as a table for notebooks."""

from collections.abc import Iterable, Sequence
from html import escape

from ebbtide._plans import Plan, RegionPlan, headline, places, short_recipe
from ebbtide._utils.sizes import format_bytes

_CLASSES = {"recipe": ' class="text"', "reason": ' class="text wrap"'}


def plan_table(plan: Plan) -> str:
    """One row per region, below the headline of `plan`. Kept and moved bytes are empty for a plan by hand."""
    regions = [*plan.regions.items(), *([] if plan.outside is None else [("outside of all", plan.outside)])]
    rows = ((name, short_recipe(region.recipe), *sizes(region), reason(region)) for name, region in regions)
    return table(headline(plan), ("region", "recipe", "kept", "moved", "reason"), rows)


def sizes(region: RegionPlan) -> tuple[str, str]:
    """Kept and moved bytes, as text."""
    cost = region.cost
    return ("", "") if cost is None else (format_bytes(cost.kept_bytes), format_bytes(cost.moved_bytes))


def reason(region: RegionPlan) -> str:
    """What the recipe does with outputs and inputs, and why the planner has chosen it."""
    return "; ".join(filter(None, (places(region.recipe), region.reason)))


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first cell of a row is its header."""
    classes = [_CLASSES.get(name, "") for name in columns]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, classes, strict=True))
    body = "".join(_row(row, classes) for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: Sequence[str], classes: Sequence[str]) -> str:
    cells = "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row[1:], classes[1:], strict=True))
    return f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'
