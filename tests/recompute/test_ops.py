"""Properties of operators."""

import torch

from ebbtide._recompute.ops import rng_device

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
