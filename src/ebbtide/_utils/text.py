"""Plain text for logs: tables of fixed width, and ranges of names that count up."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Row = TypeVar("Row", bound="tuple[Any, ...]")

_NUMBER = re.compile(r"\d+")


def plain_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """A table with columns as wide as the widest cell; columns in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def consecutive(rows: "Iterable[Row]", are_alike: "Callable[[Row, Row], bool]") -> "Iterator[list[Row]]":
    """Group neighbouring rows: names (the first cells) count up, and `are_alike` holds."""
    run: list[Row] = []
    for row in rows:
        if run and not (are_alike(run[-1], row) and counts_up(run[-1][0], row[0])):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def counts_up(one: str, following: str) -> bool:
    """Whether the names differ in a single number, by one: layers.3.mlp, layers.4.mlp."""
    first, second = _NUMBER.findall(one), _NUMBER.findall(following)
    if _NUMBER.split(one) != _NUMBER.split(following):
        return False
    steps = [int(b) - int(a) for a, b in zip(first, second, strict=True)]
    return sum(map(abs, steps)) == 1 == sum(steps)


def as_range(first: str, last: str) -> str:
    """layers.3.mlp, layers.7.mlp -> layers.3-7.mlp"""
    if first == last:
        return first
    parts = _NUMBER.split(first)
    pairs = zip(_NUMBER.findall(first), _NUMBER.findall(last), strict=True)
    numbers = [a if a == b else f"{a}-{b}" for a, b in pairs]
    return "".join(part + number for part, number in zip(parts, [*numbers, ""], strict=True))


def shortened(name: str, most: int) -> str:
    """At most `most` characters: names of modules differ at either end."""
    if len(name) <= most:
        return name
    front = (most - 3) // 2
    return f"{name[:front]}...{name[front + 3 - most :]}"
