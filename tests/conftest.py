"""For every test."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """The tensors here are tiny, and more threads than cores only get in each other's way."""
    torch.set_num_threads(1)
