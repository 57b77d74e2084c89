"""Modes to compare: each prepares the model and gives a context around forward."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import save_on_cpu

import ebbtide

Context = Callable[[], AbstractContextManager[object]]
HOST_LIMIT = "60GiB"


def ebbtide_context(**settings: object) -> ebbtide.OffloadActivations:
    return ebbtide.offload_activations(host_limit=HOST_LIMIT, **settings)


def nothing_qualifies() -> AbstractContextManager[object]:
    return ebbtide_context(min_bytes="1TiB")


@contextlib.contextmanager
def prepared(mode: str, model: torch.nn.Module) -> Iterator[Context]:
    """Prepare `model` for `mode` and yield the context around forward."""
    if mode == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield contextlib.nullcontext
        finally:
            model.gradient_checkpointing_disable()
        return
    yield _context(mode, model)


def _context(mode: str, model: torch.nn.Module) -> Context:
    if mode == "nothing":
        return contextlib.nullcontext
    if mode == "ebbtide":
        return ebbtide_context
    if mode == "save_on_cpu":
        return lambda: save_on_cpu(pin_memory=True)
    if mode == "torchtune":
        from torchtune.training import OffloadActivations

        return OffloadActivations
    assert mode == "trl"
    from accelerate import PartialState

    PartialState()  # required by TRL's logger
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    context = get_act_offloading_ctx_manager(model)
    return lambda: context


def available(mode: str) -> bool:
    """Whether the packages of the mode are installed."""
    return mode not in _NEIGHBOURS or importlib.util.find_spec(mode) is not None


_NEIGHBOURS = ("trl", "torchtune")
MODES = ("nothing", "checkpoint", "save_on_cpu", *_NEIGHBOURS, "ebbtide")
