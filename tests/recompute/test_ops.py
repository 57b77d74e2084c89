"""Properties of operators."""

import pytest
import torch

from ebbtide._recompute.ops import MASK, host_wait, rng_device

CPU = torch.device("cpu")
ATEN = torch.ops.aten


def test_calls_with_random_numbers():
    q = torch.ones(1, 1, 2, 8)
    attention = ATEN._scaled_dot_product_flash_attention.default
    assert rng_device(attention, (q, q, q), {}) is None  # modes do not receive defaults
    assert rng_device(attention, (q, q, q, 0.0), {}) is None
    assert rng_device(attention, (q, q, q, 0.5), {}) == CPU
    assert rng_device(attention, (q, q, q), {"dropout_p": 0.5}) == CPU
    assert rng_device(ATEN.native_dropout.default, (q, 0.5, True), {}) == CPU
    assert rng_device(ATEN.bernoulli.default, (q,), {}) == CPU
    assert rng_device(ATEN.mm.default, (q, q), {}) is None


# Tensors on "meta" stand for those of an accelerator: operators are looked at, and not run.
DEVICE = torch.device("meta")
T, HOST = torch.empty(4, 4, device=DEVICE), torch.empty(4, 4)
ROWS, PICKED = torch.empty(2, dtype=torch.long, device=DEVICE), torch.empty(4, dtype=torch.bool, device=DEVICE)
NUMBER = torch.tensor(0.0)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        (ATEN._local_scalar_dense.default, (T,), {}, ".item()"),
        (ATEN._local_scalar_dense.default, (HOST,), {}, ""),
        (ATEN.nonzero.default, (T,), {}, "nonzero"),
        (ATEN._unique2.default, (T,), {}, "unique"),
        (ATEN.masked_select.default, (T, PICKED), {}, "masked_select"),
        (ATEN.equal.default, (T, T), {}, "equal"),
        (ATEN._linalg_check_errors.default, (T, "inv"), {"is_matrix": True}, "linalg_check_errors"),
        (ATEN.repeat_interleave.Tensor, (ROWS,), {}, "repeat_interleave"),
        (ATEN.repeat_interleave.Tensor, (ROWS,), {"output_size": 9}, ""),
        (ATEN.masked_scatter.default, (T, PICKED, T), {}, ""),
        (ATEN.mm.default, (T, T), {}, ""),
        (ATEN.index.Tensor, (T, [PICKED]), {}, MASK),
        (ATEN.index.Tensor, (T, [None, PICKED]), {}, MASK),
        (ATEN.index.Tensor, (T, [ROWS]), {}, ""),
        (ATEN.index.Tensor, (T, [torch.tensor([0, 2])]), {}, "copy from the host"),
        (ATEN.index.Tensor, (T, [torch.ones(4, dtype=torch.bool)]), {}, ""),
        (ATEN.index.Tensor, (HOST, [torch.ones(4, dtype=torch.bool)]), {}, ""),
        (ATEN.index_put_.default, (T, [PICKED], T), {}, MASK),
        (ATEN.index_put_.default, (T, [PICKED], NUMBER), {}, ""),
        (ATEN.index_put_.default, (T, [ROWS], NUMBER), {}, "copy from the host"),
        (ATEN.index_put_.default, (T, [ROWS], T), {}, ""),
        (ATEN.index_put_.default, (T, [PICKED], NUMBER, True), {}, MASK),
        (ATEN.index_put_.default, (T, [PICKED, ROWS], NUMBER), {}, MASK),
        (ATEN._index_put_impl_.default, (T, [PICKED], T, True, True), {}, MASK),
        (ATEN.lift_fresh.default, (T,), {}, "copy from the host"),
        (ATEN._to_copy.default, (T,), {"device": CPU}, "copy to the host"),
        (ATEN._to_copy.default, (T,), {"device": CPU, "non_blocking": True}, ""),
        (ATEN._to_copy.default, (HOST,), {"device": DEVICE}, "copy from the host"),
        (ATEN._to_copy.default, (T,), {"dtype": torch.half}, ""),
        (ATEN.copy_.default, (HOST, T), {}, "copy to the host"),
        (ATEN.copy_.default, (HOST, T, True), {}, "copy to the host"),  # pageable
        (ATEN.copy_.default, (T, HOST), {}, "copy from the host"),
        (ATEN.copy_.default, (T, HOST, True), {}, ""),
        (ATEN.copy_.default, (T, T), {}, ""),
    ],
)
def test_calls_that_make_the_host_wait(op, args, kwargs, expected):
    assert host_wait(op, args, kwargs, "meta") == expected


def test_a_model_on_the_cpu_waits_where_a_gpu_would():
    assert host_wait(ATEN._local_scalar_dense.default, (HOST,), {}, "cpu") == ".item()"
    assert host_wait(ATEN.index.Tensor, (HOST, [torch.ones(4, dtype=torch.bool)]), {}, "cpu") == MASK
    assert host_wait(ATEN._to_copy.default, (HOST,), {"device": CPU}, "cpu") == ""
    assert host_wait(ATEN.lift_fresh.default, (HOST,), {}, "cpu") == ""
