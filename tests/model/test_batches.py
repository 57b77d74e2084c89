"""The size of a batch, in any container, and the cost of finding the size."""

import collections
import dataclasses

import pytest
import torch

from ebbtide._model.batches import tensors_in, tokens_of

SMALL, LARGE = torch.ones(2, 3), torch.ones(4, 5)


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor = dataclasses.field(init=False)


class Pair(collections.namedtuple("Pair", "first second")):
    pass


class Counted(list):
    """Counts the values taken from a list."""

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
    "dataclass": Batch(LARGE, SMALL),
    "dataclasses in a list": [Batch(SMALL, SMALL), Batch(SMALL, LARGE)],
}


@pytest.mark.parametrize("name", [*BATCHES, "BatchEncoding", "BatchFeature", "ModelOutput"])
def test_the_largest_tensor_is_found_in_every_container(name):
    batch = BATCHES[name] if name in BATCHES else transformers_batch(name)
    assert tokens_of((batch,), {}) == LARGE.numel()
    assert tokens_of((SMALL, "text", None), {"batch": batch, "use_cache": False}) == LARGE.numel()
    assert {t.shape for t in tensors_in([batch])} >= {LARGE.shape}


def test_a_batch_without_tensors_has_no_size():
    assert tokens_of((), {}) == 0
    assert tokens_of((3, "text", [1, 2], {"a": None}, Batch), {"labels": ()}) == 0


def test_lists_of_numbers_are_not_walked_to_their_end():
    Counted.taken = 0
    assert tokens_of((Counted(range(10**6)), LARGE), {}) == LARGE.numel()
    assert Counted.taken <= 256


def test_values_of_nested_lists_are_visited_up_to_a_limit():
    Counted.taken = 0
    rows = Counted(Counted([0] * 1000) for _ in range(1000))
    Counted.taken = 0
    assert tokens_of((rows,), {"x": LARGE}) == LARGE.numel()
    assert Counted.taken <= 1024


def test_outer_tensors_are_found_before_long_lists():
    deep = [[0] * 256 for _ in range(1024)]
    assert tokens_of((deep, deep, [LARGE]), {}) == LARGE.numel()


def test_a_list_inside_itself_ends():
    endless = [SMALL]
    endless.append(endless)
    assert tokens_of((endless,), {}) == SMALL.numel()
