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
        (1.5, "budget=1.5: a float is a share"),
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
