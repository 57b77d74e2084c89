"""Random programs with random recipes and plans on the adversarial simulator, and proof that they notice what they are
there for.

Each mutation takes out of the second run one thing that makes it the first one over again, or out of a release point
what makes it safe. Some program has to fail.
"""

import contextlib

import pytest
import torch
from recipe_programs import explore_recipes

from ebbtide import EbbtideError
from ebbtide._devices.sim import SimDevice
from ebbtide._engine.engine import Engine
from ebbtide._recompute import frame, ops, provenance, rng_autocast, saved_outputs
from ebbtide._recompute.state import Found
from ebbtide.types import Wait

SEEDS = 200
CHUNK = 50


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_programs_equal_their_plain_twins_and_race_nowhere(first):
    assert [found for seed in range(first, first + CHUNK) if (found := explore_recipes(seed))] == []


# -- mutations ---------------------------------------------------------------------------------------------------------


def random_numbers_go_on(patch):
    patch(rng_autocast, "restored", lambda states: contextlib.nullcontext())


def held_random_operators_draw_nothing(patch):
    patch(saved_outputs, "set_rng_state", lambda device, state: None)


def operators_without_tensors_draw_nothing(patch):
    draws_on = saved_outputs.draws_on

    def mutant(op, args, kwargs):
        has_tensor = any(hasattr(value, "dtype") for value in (*args, *kwargs.values()))
        return draws_on(op, args, kwargs) if has_tensor else None

    patch(saved_outputs, "draws_on", mutant)


def autocast_is_off(patch):
    patch(rng_autocast._Autocast, "restored", lambda self: contextlib.nullcontext())


def outputs_are_handed_out_whatever_became_of_them(patch):
    patch(saved_outputs.SavedOutput, "is_unmodified", property(lambda self: True))


def no_bytes_are_compared(patch):
    """They would show what versions do not."""
    patch(saved_outputs, "sums_of", lambda storage: torch.zeros(1))


def hidden_views_are_not_watched(patch):
    no_bytes_are_compared(patch)
    patch(saved_outputs.OutputRecorder, "follow", lambda self, op, args, out: None)


def views_without_notice_are_held(patch):
    no_bytes_are_compared(patch)
    patch(ops, "is_hidden_view", lambda op: False)


def casts_are_held(patch):
    is_never_dear = ops._is_never_dear
    patch(ops, "_is_never_dear", lambda op: "_to_copy" not in str(op) and is_never_dear(op))


def regions_inside_are_numbered_too(patch):
    patch(frame, "numbering_paused", contextlib.nullcontext)


def a_run_that_fails_gives_what_it_has_made(patch):
    pack = frame.Recomputation.pack

    def mutant(self, t):
        try:
            return pack(self, t)
        finally:
            self.give()

    patch(frame.Recomputation, "pack", mutant)


def what_draws_is_left_out(patch):
    patch(provenance, "draws_on", lambda op, args, kwargs: None)
    patch(provenance, "_is_known", lambda op: not op._schema.is_mutable)


def what_is_changed_is_left_out(patch):
    patch(provenance, "may_be_left_out", lambda op, args, kwargs: True)


def state_is_as_it_is_now(patch):
    patch(Found, "restored", lambda self: contextlib.nullcontext())


def buffers_are_believed_to_count(patch):
    from ebbtide._recompute import state

    patch(state._Buffer, "has_same_bytes", lambda self: True)


def nobody_waits_at_release_points(patch):
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
    random_numbers_go_on,
    held_random_operators_draw_nothing,
    operators_without_tensors_draw_nothing,
    autocast_is_off,
    outputs_are_handed_out_whatever_became_of_them,
    hidden_views_are_not_watched,
    views_without_notice_are_held,
    casts_are_held,
    regions_inside_are_numbered_too,
    a_run_that_fails_gives_what_it_has_made,
    what_draws_is_left_out,
    what_is_changed_is_left_out,
    state_is_as_it_is_now,
    buffers_are_believed_to_count,
    nobody_waits_at_release_points,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_caught(mutate, monkeypatch):
    mutate(monkeypatch.setattr)
    caught = None
    for seed in range(SEEDS):
        try:
            caught = explore_recipes(seed)
        except (EbbtideError, RuntimeError, AssertionError) as error:  # our own checks count too
            caught = repr(error)
        if caught:
            break
    assert caught, f"{mutate.__name__} went unnoticed in {SEEDS} programs"
