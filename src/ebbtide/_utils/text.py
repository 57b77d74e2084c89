"""Plain text for people: tables of fixed width, and names that count up written as one."""

import re
from collections.abc import Collection, Sequence

_NUMBER = re.compile(r"\d+")


def plain_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows below each other, columns as wide as they have to be; those in `right` flush right. For a log."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def counts_up(one: str, following: str) -> bool:
    """Whether two names differ by one number only, which is the next one: layers.3.mlp, layers.4.mlp."""
    own, others = _NUMBER.findall(one), _NUMBER.findall(following)
    if _NUMBER.split(one) != _NUMBER.split(following):
        return False
    steps = [int(b) - int(a) for a, b in zip(own, others, strict=True)]
    return sum(map(abs, steps)) == 1 == sum(steps)


def as_range(first: str, last: str) -> str:
    """layers.3.mlp, layers.7.mlp -> layers.3-7.mlp"""
    if first == last:
        return first
    own, others = _NUMBER.findall(first), _NUMBER.findall(last)
    parts = _NUMBER.split(first)
    numbers = [a if a == b else f"{a}-{b}" for a, b in zip(own, others, strict=True)]
    return "".join(part + number for part, number in zip(parts, [*numbers, ""], strict=True))
