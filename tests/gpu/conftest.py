"""Deterministic kernels for bitwise comparison. cuBLAS reads the variable when the first handle is made."""

import gc
import importlib
import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_finish():
    """Exclude torch from garbage collection: each test collects, and walking all of torch takes long."""
    importlib.import_module("torch._dynamo")  # imported by the first compiled block; half of all objects
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
