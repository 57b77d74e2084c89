"""A plan as an HTML table, for notebooks."""

from collections.abc import Iterable
from html import escape

from ebbtide._plans import Plan, RegionPlan, headline, places, short_recipe
from ebbtide._utils.sizes import format_bytes

_COLUMNS = ("region", "recipe", "kept", "moved", "reason")


def plan_html(plan: Plan) -> str:
    """One row per region, below the headline of `plan`. Kept and moved bytes are empty for a plan by hand."""
    regions = [*plan.regions.items(), *([] if plan.outside is None else [("outside of all", plan.outside)])]
    body = "".join(_row("td", _cells(name, region)) for name, region in regions)
    return f"<table><caption>{escape(headline(plan))}</caption>{_row('th', _COLUMNS)}{body}</table>"


def _cells(name: str, region: RegionPlan) -> Iterable[str]:
    cost = region.cost
    sizes = ("", "") if cost is None else (format_bytes(cost.kept_bytes), format_bytes(cost.moved_bytes))
    reason = "; ".join(filter(None, (places(region.recipe), region.reason)))
    return (name, short_recipe(region.recipe), *sizes, reason)


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
