"""What `budget=` takes, and what it says of anything else."""

import math
import re

import numpy as np
import pytest

from ebbtide import ConfigError
from ebbtide._settings import Budget

TOTAL = 80 * 2**30


@pytest.mark.parametrize(
    ("given", "nbytes"),
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
    ],
)
def test_bytes_text_or_a_share(given, nbytes):
    assert Budget(given)(TOTAL) == nbytes


@pytest.mark.parametrize(
    ("given", "said"),
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
def test_anything_else_is_refused_and_the_text_says_what_to_write(given, said):
    with pytest.raises(ConfigError, match=".*".join(map(re.escape, said.split(".*")))):
        Budget(given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("40GiB", "40GiB"),
        (" 37.5 gib ", "37.5 gib"),
        (0.8, "0.8 of the device's memory"),
        (40 * 2**30, "42949672960 bytes (40.00 GiB)"),
        (np.int64(2**20), "1048576 bytes (1.00 MiB)"),
        ("42949672960", "42949672960 bytes (40.00 GiB)"),
    ],
)
def test_as_text_it_is_what_was_written(given, text):
    assert str(Budget(given)) == text
