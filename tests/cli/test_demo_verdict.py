"""The verdict of `ebbtide demo`: which results pass, and how faults are named."""

from dataclasses import replace

import pytest

from ebbtide._cli.demo import MovedCounts, RunResult, judge
from ebbtide._utils.sizes import MIB

PLAIN = RunResult(
    losses=[2.0, 1.0],
    loss_bits=["0x40000000", "0x3f800000"],
    parameters_sha256="a" * 64,
    step_s=[1.0, 1.0],
    base_bytes=50 * MIB,
    peak_bytes=170 * MIB,
    curve_s=[0.0],
    curve_bytes=[50 * MIB],
    moved=MovedCounts(),
)
OFFLOADED = replace(
    PLAIN, base_bytes=60 * MIB, peak_bytes=90 * MIB, moved=MovedCounts(activation_bytes=200 * MIB, out_bytes=190 * MIB)
)


def test_equal_bits_and_enough_saved_pass():
    verdict = judge(PLAIN, OFFLOADED)
    assert verdict.activation_bytes == 100 * MIB
    assert verdict.saved_bytes == 90 * MIB
    assert verdict.saved_share == 0.9
    assert verdict.exit_status == 0
    assert "equal to the bit" in str(verdict)


def test_exactly_half_passes():
    assert judge(PLAIN, replace(OFFLOADED, peak_bytes=130 * MIB)).faults == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_bits": ["0x40000000", "0x3f800001"]}, "the losses differ from step 2 on"),
        ({"parameters_sha256": "b" * 64}, "the parameters after the last step differ"),
        ({"peak_bytes": 131 * MIB}, "dropped by 49.00 MiB, less than half of the 100.00 MiB"),
        ({"moved": MovedCounts()}, "nothing was moved"),
    ],
    ids=["loss", "parameters", "memory", "nothing moved"],
)
def test_a_false_claim_fails_and_is_named(change, message):
    verdict = judge(PLAIN, replace(OFFLOADED, **change))
    assert verdict.exit_status == 1
    assert message in str(verdict)
    assert str(verdict).startswith("FAILED")


def test_last_bit_of_a_loss_is_enough_to_fail_even_if_it_prints_the_same():
    plain = replace(PLAIN, losses=[2.0, 1.0], loss_bits=["0x40000000", "0x80000000"])
    other = replace(OFFLOADED, losses=[2.0, 1.0], loss_bits=["0x40000000", "0x00000000"])
    assert judge(plain, other).exit_status == 1
