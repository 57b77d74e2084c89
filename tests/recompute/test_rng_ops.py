"""Which operators draw random numbers."""

import torch

from ebbtide._recompute.rng_ops import draws_on

CPU = torch.device("cpu")
ATEN = torch.ops.aten


def test_what_draws_and_what_only_could():
    q = torch.ones(1, 1, 2, 8)
    attention = ATEN._scaled_dot_product_flash_attention.default
    assert draws_on(attention, (q, q, q), {}) is None  # no dropout is the default, which modes are not given
    assert draws_on(attention, (q, q, q, 0.0), {}) is None
    assert draws_on(attention, (q, q, q, 0.5), {}) == CPU
    assert draws_on(attention, (q, q, q), {"dropout_p": 0.5}) == CPU
    assert draws_on(ATEN.native_dropout.default, (q, 0.5, True), {}) == CPU
    assert draws_on(ATEN.bernoulli.default, (q,), {}) == CPU
    assert draws_on(ATEN.mm.default, (q, q), {}) is None
