"""Random programs with random recipes and plans on the adversarial simulator, and mutations that prove the checks work.

Each mutation removes one cause of the equality of recomputation and forward, or of the safety of release points. Some
program has to fail.
"""

import contextlib

import pytest
import torch
from recipe_programs import explore_recipes

from ebbtide import EbbtideError
from ebbtide._devices.sim import SimDevice
from ebbtide._engine.engine import Engine
from ebbtide._recompute import frame, ops, provenance, replay, rng_autocast, saved_outputs
from ebbtide._recompute.state import RegionSnapshot
from ebbtide._types import Wait

SEEDS = 200
CHUNK = 50


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_programs_equal_their_plain_twins_without_races(first):
    assert [found for seed in range(first, first + CHUNK) if (found := explore_recipes(seed))] == []


# -- mutations ---------------------------------------------------------------------------------------------------------


def rng_states_are_not_restored(patch):
    patch(rng_autocast, "restored", lambda states: contextlib.nullcontext())


def saved_random_outputs_do_not_advance_generators(patch):
    patch(replay, "set_rng_state", lambda device, state: None)


def operators_without_tensors_use_no_rng(patch):
    rng_device = saved_outputs.rng_device

    def mutant(op, args, kwargs):
        has_tensor = any(hasattr(value, "dtype") for value in (*args, *kwargs.values()))
        return rng_device(op, args, kwargs) if has_tensor else None

    patch(saved_outputs, "rng_device", mutant)


def autocast_is_off(patch):
    patch(rng_autocast._Autocast, "restored", lambda self: contextlib.nullcontext())


def modified_outputs_are_handed_out(patch):
    patch(saved_outputs.SavedOutput, "is_unmodified", property(lambda self: True))


def no_checksums_are_compared(patch):
    """Checksums find changes that versions do not show."""
    patch(saved_outputs, "checksum_of", lambda storage: torch.zeros(1))


def hidden_views_are_not_watched(patch):
    no_checksums_are_compared(patch)
    patch(saved_outputs.OutputRecorder, "follow", lambda self, op, args, out: None)


def hidden_views_are_saved(patch):
    no_checksums_are_compared(patch)
    is_hidden_view, is_view = ops.is_hidden_view, ops.is_view
    patch(ops, "is_hidden_view", lambda op: False)
    patch(ops, "is_view", lambda op: is_view(op) and not is_hidden_view(op))


def casts_are_saved(patch):
    is_never_expensive = ops._is_never_expensive
    patch(ops, "_is_never_expensive", lambda op: "_to_copy" not in str(op) and is_never_expensive(op))


def calls_of_inner_regions_are_numbered(patch):
    patch(frame, "numbering_paused", contextlib.nullcontext)


def failed_recomputations_publish_values(patch):
    pack = frame.Recomputation.pack

    def mutant(self, t):
        try:
            return pack(self, t)
        finally:
            self.publish()

    patch(frame.Recomputation, "pack", mutant)


def random_operators_are_skipped(patch):
    patch(provenance, "rng_device", lambda op, args, kwargs: None)
    patch(provenance, "_is_skippable", lambda op: not op._schema.is_mutable)


def mutating_operators_are_skipped(patch):
    patch(provenance, "may_be_skipped", lambda op, args, kwargs: True)


def module_state_is_not_restored(patch):
    patch(RegionSnapshot, "restored", lambda self: contextlib.nullcontext())


def buffer_bytes_are_not_compared(patch):
    from ebbtide._recompute import state

    patch(state._Buffer, "has_same_bytes", lambda self: True)


def release_points_do_not_wait(patch):
    wait, release_down_to = SimDevice.wait, Engine.release_down_to
    at_point = []

    def mutant(self, window_bytes):
        at_point.append(True)
        try:
            release_down_to(self, window_bytes)
        finally:
            at_point.pop()

    patch(Engine, "release_down_to", mutant)
    patch(SimDevice, "wait", lambda self, s, e, why: None if at_point and why is Wait.LANDED else wait(self, s, e, why))


MUTATIONS = [
    rng_states_are_not_restored,
    saved_random_outputs_do_not_advance_generators,
    operators_without_tensors_use_no_rng,
    autocast_is_off,
    modified_outputs_are_handed_out,
    hidden_views_are_not_watched,
    hidden_views_are_saved,
    casts_are_saved,
    calls_of_inner_regions_are_numbered,
    failed_recomputations_publish_values,
    random_operators_are_skipped,
    mutating_operators_are_skipped,
    module_state_is_not_restored,
    buffer_bytes_are_not_compared,
    release_points_do_not_wait,
]


@pytest.mark.long
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_caught(mutate, monkeypatch):
    mutate(monkeypatch.setattr)
    caught = None
    for seed in range(SEEDS):
        try:
            caught = explore_recipes(seed)
        except (EbbtideError, RuntimeError, AssertionError) as error:  # errors of our own checks count too
            caught = repr(error)
        if caught:
            break
    assert caught, f"{mutate.__name__} went unnoticed in {SEEDS} programs"
