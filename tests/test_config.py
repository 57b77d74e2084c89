"""Every repetition of a setting agrees with its definition in `SETTINGS`; values of `budget=`."""

import ast
import dataclasses
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest

import ebbtide
from ebbtide import ConfigError
from ebbtide._config import SETTINGS, Budget, OffloadConfig, make_config, parse_budget
from ebbtide.integrations._arguments import OffloadArguments

ENTRY_POINTS = (ebbtide.offload, ebbtide.offload_activations, ebbtide.plan, ebbtide.measure)
INTEGRATIONS = Path(ebbtide.__file__).parent / "integrations"
TOTAL = 80 * 2**30


def parameters_of(function):
    """Annotation and default of each keyword that is a setting, as text of the source."""
    arguments = ast.parse(inspect.getsource(function)).body[0].args
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        each.arg: (ast.unparse(each.annotation).strip("'").replace("'", '"'), ast.literal_eval(default))
        for each, default in keywords
        if each.arg in SETTINGS
    }


def described(documentation):
    """Text of each entry of the section `Args:`, in a line."""
    section = inspect.cleandoc(documentation).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (?=\w+(?:, \w+)*: )", section, flags=re.M)[1:]
    return {name: " ".join(text.split()) for name, _, text in (entry.partition(": ") for entry in entries)}


def fields_in(file, class_name):
    """Fields of a class, from the source: the trainer's package need not be installed."""
    classes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)]
    lines = [line for node in classes if node.name == class_name for line in node.body]
    return {line.target.id: ast.unparse(line.value) for line in lines if isinstance(line, ast.AnnAssign)}


# -- one definition ----------------------------------------------------------------------------------------------------


def test_offload_has_every_setting():
    assert parameters_of(ebbtide.offload).keys() == SETTINGS.keys()


@pytest.mark.parametrize("function", ENTRY_POINTS)
def test_signatures_agree(function):
    for name, (annotation, default) in parameters_of(function).items():
        setting = SETTINGS[name]
        if (function, name) != (ebbtide.plan, "profile"):  # no file
            assert annotation.removesuffix(" | None") == setting.type, name
        if (function, name) != (ebbtide.offload_activations, "mode"):  # a context has no planner
            assert default in (None, setting.default), name


@pytest.mark.parametrize("function", ENTRY_POINTS, ids=lambda function: function.__name__)
def test_docstrings_agree(function):
    entries = described(function.__doc__)
    excepted = {ebbtide.offload_activations: {"mode"}, ebbtide.plan: {"profile"}}
    names = SETTINGS.keys() & inspect.signature(function).parameters.keys() - excepted.get(function, set())
    for name in names:
        assert entries[name].startswith(str(SETTINGS[name])), name


def test_arguments_of_parsers_agree():
    for each in dataclasses.fields(OffloadArguments):
        assert each.default is None
        assert each.metadata["help"] % () == str(SETTINGS[each.name.removeprefix("offload_")])


@pytest.mark.parametrize(
    ("file", "class_name"), [("axolotl.py", "_EbbtideSettings"), ("torchtitan.py", "Config")], ids=["axolotl", "titan"]
)
def test_fields_of_trainers_agree(file, class_name):
    fields = fields_in(INTEGRATIONS / file, class_name)
    assert {name for name, default in fields.items() if default == "None"} == SETTINGS.keys() - {
        "plan",
        "process_group",
    }


def test_defaults_of_the_config_agree():
    """A default that a user writes is the default of the config."""
    names = parameters_of(ebbtide.offload_activations).keys() | {"include", "exclude", "keep_last", "verify"}
    written = {name: SETTINGS[name].default for name in names - {"mode"}}
    assert make_config(**written) == make_config() == OffloadConfig()


def test_sizes_are_in_bytes():
    sizes = {name for name, setting in SETTINGS.items() if setting.unit == "bytes"}
    assert sizes == {"window", "prefetch", "min_bytes", "host_limit"}
    config = make_config(**dict.fromkeys(sizes, "2KiB"))
    assert (config.window_bytes, config.prefetch_bytes, config.min_bytes, config.host_limit_bytes) == (2048,) * 4


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("40GiB", "40GiB"),
        ("0.8", 0.8),
        ("1", 1.0),
        ("3000000000", "3000000000"),
        ("nan", "nan"),
        ("40", 40.0),
        ("80%", "80%"),
    ],
)
def test_a_number_on_a_command_line_is_a_share_or_bytes(text, value):
    assert parse_budget(text) == value


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (40 * 2**30, 40 * 2**30),
        (int(40e9), 40_000_000_000),
        (np.int64(40e9), 40_000_000_000),
        (2**19, 2**19),
        ("40GiB", 40 * 2**30),
        ("40GB", 40_000_000_000),
        ("37.5 gib", 75 * 2**29),
        ("4096", 4096),
        (0.5, TOTAL // 2),
        (1.0, TOTAL),
        ("50%", TOTAL // 2),
        (" 12.5 % ", TOTAL // 8),
        ("100%", TOTAL),
    ],
)
def test_bytes_text_or_a_share(value, nbytes):
    assert Budget(value)(TOTAL) == nbytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (40e9, "budget=40000000000.0: a float is a share .* between 0 and 1.*write int(40e9), '40GB' or '37.3GiB'"),
        (5e8, "write int(0.5e9), '0.5GB' or '0.5GiB'"),
        (40.0, "budget=40.0: a float is a share .* between 0 and 1.*For bytes write text like '40GiB'"),
        (1e30, "budget=1e+30: a float is a share .* between 0 and 1.*For bytes write text like '40GiB'"),
        (1.5, "budget=1.5: a float is a share.*For bytes write text like '1.5GiB'"),
        (24.0, "budget=24.0: a float is a share.*For bytes write text like '24GiB'"),
        (40, "budget=40: an int is bytes, and 40 bytes hold nothing: write '40GiB'"),
        (np.int64(40), "budget=40: an int is bytes, and 40 bytes hold nothing: write '40GiB'"),
        (1, "budget=1: an int is bytes.*write '1GiB', or 1.0 for all of the device's memory"),
        (524287, "budget=524287: an int is bytes.*write '524287MiB'"),
        (40960, "budget=40960: an int is bytes, and 40960 bytes hold nothing: write '40960MiB'"),
        (0.0, "budget=0.0: a float is a share .* between 0 and 1, such as 0.8"),
        (-0.5, "budget=-0.5: a float is a share .* between 0 and 1, such as 0.8"),
        (math.nan, "budget=nan: a float is a share .* between 0 and 1, such as 0.8"),
        (math.inf, "budget=inf: a float is a share .* between 0 and 1, such as 0.8"),
        (-math.inf, "budget=-inf: a float is a share .* between 0 and 1, such as 0.8"),
        ("0.8", "budget='0.8': text is bytes.*share of the device's memory write 0.8, without quotes"),
        ("1", "budget='1': text is bytes.*write 1.0, without quotes"),
        ("0%", "budget='0%': expected a share .* above 0% and at most 100%, such as '80%'"),
        ("101%", "budget='101%': expected a share .* above 0% and at most 100%, such as '80%'"),
        ("nan%", "budget='nan%': expected a share .* above 0% and at most 100%, such as '80%'"),
        ("%", "budget='%': expected a share .* above 0% and at most 100%, such as '80%'"),
        (True, "budget=True: expected bytes as an int, text like '40GiB', or a share .* such as 0.8"),
        ([1], "budget=[1]: expected bytes as an int, text like '40GiB', or a share .* such as 0.8"),
        (0, "budget=0: expected more than zero bytes"),
        (-1, "budget=-1: expected more than zero bytes"),
        ("0", "budget='0': expected more than zero bytes"),
        ("nan", "budget='nan' is not a size: write a number and a unit"),
        ("inf", "budget='inf' is not a size"),
        ("-5GiB", "budget='-5GiB' is not a size"),
        ("", "budget='' is not a size"),
    ],
)
def test_other_values_are_refused_with_a_correction(value, message):
    with pytest.raises(ConfigError, match=".*".join(map(re.escape, message.split(".*")))):
        Budget(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("40GiB", "40GiB"),
        (" 37.5 gib ", "37.5 gib"),
        (0.8, "0.8 of the device's memory"),
        (" 80% ", "80% of the device's memory"),
        (40 * 2**30, "42949672960 bytes (40.00 GiB)"),
        (np.int64(2**20), "1048576 bytes (1.00 MiB)"),
        ("42949672960", "42949672960 bytes (40.00 GiB)"),
    ],
)
def test_its_text_is_as_written(value, text):
    assert str(Budget(value)) == text
