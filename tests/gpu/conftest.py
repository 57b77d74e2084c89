"""Bitwise comparisons need kernels that add in one order. Read by cuBLAS when its first handle is made."""

import gc
import importlib
import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_finish():
    """What is there before the first test is no garbage: each test collects, and need not walk all of torch."""
    importlib.import_module("torch._dynamo")  # comes with the first compiled block, and is half of it
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)
