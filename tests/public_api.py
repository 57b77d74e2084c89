"""List the public names with their signatures, one a line, without importing the package.

python tests/public_api.py > tests/public_api.txt
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

SRC = Path(__file__).parents[1] / "src"


def public_api() -> list[str]:
    package = griffe.load("ebbtide", search_paths=[SRC])
    modules = [package, *(package[name] for name in ("compat", "compat.torchtune", "pipeline", "types"))]
    modules += [module for name, module in package["integrations"].modules.items() if not name.startswith("_")]
    exported = [(f"{module.path}.{name}", module[name]) for module in modules for name in module.exports or ()]
    return sorted(line for path, thing in exported for line in _lines(path, thing))


def _lines(path: str, thing: griffe.Object | griffe.Alias) -> Iterator[str]:
    if not (thing.is_function or thing.is_class):
        yield path
        return
    yield f"{path}({', '.join(_parameters(thing.parameters))})"
    if thing.is_class:
        for name, member in thing.members.items():
            if not name.startswith("_"):
                yield from _lines(f"{path}.{name}", member)


def _parameters(parameters: griffe.Parameters) -> Iterator[str]:
    kinds = griffe.ParameterKind
    stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    needs_star = True
    for each in parameters:
        if each.kind is kinds.keyword_only and needs_star:
            yield "*"
        needs_star = needs_star and each.kind not in (kinds.keyword_only, kinds.var_positional)
        has_default = each.default is not None and each.kind not in stars
        yield f"{stars.get(each.kind, '')}{each.name}{f'={each.default}' if has_default else ''}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in public_api())
