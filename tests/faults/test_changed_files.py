"""Changed files are read, or refused by an error of ebbtide's own, at bounded cost."""

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.workloads import workload_a
from reports.test_run import RUN

import ebbtide
from ebbtide import EbbtideError, Plan, RegionPlan
from ebbtide._profiling.profile import Profile
from ebbtide._reports.run import Run
from ebbtide._utils import serialize

PROFILE = workload_a()
PLAN = Plan({"a": RegionPlan("selective", ((1, 2),), 3, "the link is busy")}, RegionPlan("keep", ((0, 0),)), 2**30)
KINDS = {"profile": (Profile, PROFILE), "plan": (Plan, PLAN), "run": (Run, RUN)}

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(10**18, 10**400), st.floats(), st.text(max_size=5),
    st.just("1" * 5000), st.just([]), st.just({}),
)  # fmt: skip
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


def places(data, at=()):
    """The path of every value."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*at, key))


def mutated(draw, data):
    """`data` with some values replaced, removed or given a second name."""
    for _ in range(draw(st.integers(1, 3))):
        *around, last = draw(st.sampled_from(list(places(data))[1:]))
        row = data
        for key in around:
            row = row[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "rename"])):
            case "replace":
                row[last] = draw(VALUES)
            case "remove":
                del row[last]
            case "rename" if isinstance(row, dict):
                row[draw(st.text(max_size=8) | st.sampled_from(list(serialize.OLD_KEYS)))] = row.pop(last)
        if not list(places(data))[1:]:
            break
    return data


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, (_, row) in KINDS.items():
        row.save(folder / name)
    return folder


def read(path, kind):
    """The content of the file; None after a refusal. An unexpected error fails the test."""
    try:
        return kind.load(path)
    except EbbtideError:
        return None


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_a_file_with_other_values_is_read_or_refused(files, name, data):
    path = files / f"{name}-values"
    path.write_text(json.dumps(mutated(data.draw, json.loads((files / name).read_text()))))
    found = read(path, KINDS[name][0])
    if found is not None:
        found.save(path)
        assert KINDS[name][0].load(path) == found


@pytest.mark.parametrize("name", KINDS)
@given(
    cut=st.tuples(st.integers(0, 10**5), st.integers(0, 40)), patch=st.binary(max_size=40) | st.text('[{}]"\\,:0-e.')
)
def test_a_file_with_other_bytes_is_read_or_refused(files, name, cut, patch):
    path, text = files / f"{name}-bytes", (files / name).read_bytes()
    at, length = cut[0] % len(text), cut[1]
    path.write_bytes(text[:at] + (patch if isinstance(patch, bytes) else patch.encode()) + text[at + length :])
    read(path, KINDS[name][0])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("opening", ["[", '{"regions":', '{"format":', "[[{}],"])
def test_a_deep_file_is_refused(files, name, opening):
    path = files / "deep"
    path.write_text(opening * 100_000)
    assert read(path, KINDS[name][0]) is None


@pytest.mark.parametrize("name", KINDS)
def test_a_large_file_is_refused_unparsed(files, name, monkeypatch):
    monkeypatch.setattr(serialize, "_MOST_BYTES", (files / name).stat().st_size - 1)
    monkeypatch.setattr(json, "loads", None)
    assert read(files / name, KINDS[name][0]) is None


SOURCES = Path(ebbtide.__file__).parent
PICKLES = {
    ("_planner/process.py", "load"),  # of the question, in the solver's process, from the parent
    ("_planner/process.py", "loads"),  # of the answer, from the solver's process, our own child
}


def names(tree):
    """Dotted names of all functions called or handed on."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}


def test_no_source_runs_a_shell_or_reads_a_pickle_of_others():
    for path in SOURCES.rglob("*.py"):
        tree, name = ast.parse(path.read_text()), str(path.relative_to(SOURCES))
        found = names(tree)
        assert not found & {"eval", "exec", "os.system", "os.popen", "marshal", "shelve", "yaml.load", "torch.load"}, (
            name
        )
        assert not any(isinstance(node, ast.keyword) and node.arg == "shell" for node in ast.walk(tree)), name
        read = {(name, call.rpartition(".")[2]) for call in found if call.startswith("pickle.load")}
        assert read <= PICKLES, name
