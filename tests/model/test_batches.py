"""How large a batch is, whatever it is wrapped in, and at what price."""

import collections
import dataclasses

import pytest
import torch

from ebbtide._model.batches import MOST_IN_ONE, MOST_VALUES, tensors_in, tokens_of

SMALL, LARGE = torch.ones(2, 3), torch.ones(4, 5)


@dataclasses.dataclass
class CopyTiming:
    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor = dataclasses.field(init=False)


class Pair(collections.namedtuple("Pair", "first second")):
    pass


class Counted(list):
    """Counts what is taken out of it."""

    taken = 0

    def __iter__(self):
        for value in super().__iter__():
            type(self).taken += 1
            yield value


def transformers_batch(kind):
    transformers = pytest.importorskip("transformers")
    if kind == "BatchEncoding":
        return transformers.BatchEncoding({"input_ids": LARGE, "labels": SMALL})
    if kind == "BatchFeature":
        return transformers.BatchFeature({"pixel_values": LARGE, "labels": SMALL})
    return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=LARGE, hidden_states=(SMALL,))


BATCHES = {
    "tensor": LARGE,
    "list": [SMALL, LARGE],
    "tuple in a dict": {"x": (SMALL, LARGE), "y": 3},
    "UserDict": collections.UserDict(x=LARGE, y=SMALL),
    "named tuple": Pair(SMALL, LARGE),
    "dataclass": CopyTiming(LARGE, SMALL),
    "dataclasses in a list": [CopyTiming(SMALL, SMALL), CopyTiming(SMALL, LARGE)],
}


@pytest.mark.parametrize("name", [*BATCHES, "BatchEncoding", "BatchFeature", "ModelOutput"])
def test_the_largest_tensor_is_found_in_all_that_batches_come_in(name):
    given = BATCHES[name] if name in BATCHES else transformers_batch(name)
    assert tokens_of((given,), {}) == LARGE.numel()
    assert tokens_of((SMALL, "text", None), {"batch": given, "use_cache": False}) == LARGE.numel()
    assert {t.shape for t in tensors_in([given])} >= {LARGE.shape}


def test_what_has_no_tensor_is_of_no_size():
    assert tokens_of((), {}) == 0
    assert tokens_of((3, "text", [1, 2], {"a": None}, CopyTiming), {"labels": ()}) == 0


def test_lists_of_numbers_are_not_walked_to_their_end():
    Counted.taken = 0
    assert tokens_of((Counted(range(10**6)), LARGE), {}) == LARGE.numel()
    assert Counted.taken <= MOST_IN_ONE


def test_of_lists_in_lists_only_so_many_values_are_looked_at():
    Counted.taken = 0
    rows = Counted(Counted([0] * 1000) for _ in range(1000))
    Counted.taken = 0
    assert tokens_of((rows,), {"x": LARGE}) == LARGE.numel()
    assert Counted.taken <= MOST_VALUES


def test_a_tensor_behind_long_lists_is_seen_for_the_outermost_come_first():
    deep = [[0] * MOST_IN_ONE for _ in range(MOST_VALUES)]
    assert tokens_of((deep, deep, [LARGE]), {}) == LARGE.numel()


def test_a_list_in_itself_comes_to_an_end():
    endless = [SMALL]
    endless.append(endless)
    assert tokens_of((endless,), {}) == SMALL.numel()
