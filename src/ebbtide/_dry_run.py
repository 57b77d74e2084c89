"""The door before training: a few steps on an example batch are measured and planned, and leave no trace."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch

from ebbtide._config import Names
from ebbtide._devices import device_for
from ebbtide._errors import ConfigError, ModuleError, PlanError
from ebbtide._model.batches import tensors_in, tokens_of
from ebbtide._model.placement import device_of, made_for
from ebbtide._model.preserve_state import drop_gradients, restored
from ebbtide._offload import OffloadHandle, offload
from ebbtide._planner.solve import Solver
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile
from ebbtide._settings import Budget
from ebbtide._utils import env
from ebbtide._utils.distributed import gather
from ebbtide._utils.sizes import parse_bytes
from ebbtide._utils.torch_private import buffers_of, parameters_of
from ebbtide.types import StoreFactory

LossOf = Callable[[Any], torch.Tensor]
"""Gives the loss of a model's output."""

_MOST_STEPS = 5  # one to warm up, two that are watched, and those again if they were of different kinds
_ANY_BUDGET = 2**60  # more than any device has: regions run again while they are measured, whatever is planned then


class _Batch(NamedTuple):
    """What the model is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(tensors_in((*self.args, *self.kwargs.values())))


class _Settings(NamedTuple):
    """What `offload` is asked for besides the budget."""

    store: str | StoreFactory | None
    min_bytes: int | str
    host_limit: int | str | None
    regions: Names | list[Names] | tuple[Names, ...]


def plan(
    model: torch.nn.Module,
    example_batch: Any,
    *,
    budget: int | float | str | None = None,
    loss: LossOf | None = None,
    store: str | StoreFactory | None = None,
    min_bytes: int | str = "1MiB",
    host_limit: int | str | None = None,
    regions: Names | list[Names] | tuple[Names, ...] = (),
    reserve: int | str = 0,
    profile: Profile | None = None,
) -> Plan:
    """The plan that `offload(model, budget=...)` would come to in its first steps, before any training.

    Runs a few steps, forward and backward, on `example_batch` and leaves the model as it found it: gradients, buffers,
    attributes that carry state from step to step, random numbers and hooks, also after an error::

        planned = plan(model, batch, budget="40GiB", reserve="9GiB")
        print(planned)
        ebbtide.offload(model, plan=planned)

    Args:
        model: in training mode, on its device, compiled or wrapped as it will be trained.
        example_batch: what the model is called with: a mapping (by keyword), a tuple or list (by position) or one
            tensor; as large as batches get. Call within the autocast context of your training, if it has one.
        budget: the peak of device memory to stay under: bytes, "40GiB", or a share of the device's memory such as 0.8.
            None: move what makes the step no slower.
        loss: what backward begins with, of the model's output. Default: its `loss`, or the output itself if that is one
            number, else the sum of all floating-point tensors in it.
        store, min_bytes, host_limit, regions: as for `offload`, and the same there if the plan is to hold.
        reserve: bytes ("9GiB") of device memory for what is not there yet, such as the state of the optimizer.
        profile: of this model on this device, measured before: nothing is run then, `example_batch` only says how
            large batches are, and `loss`, `store`, `min_bytes` and `regions` do not matter. For a budget it has to be
            measured with one, or by `measure`.

    Raises:
        ConfigError: a setting that cannot be, an output without a loss, a batch without tensors.
        ModuleError: the model is not in training mode, has nothing to train, trains in backward, has a handle already,
            or carries a tensor that cannot be copied.
        PlanError: no plan fits the budget (the text names the smallest that does), no regions are found, or the batch
            comes by none of them.

    Traps: the state of an optimizer is allocated by its first step and not counted here: write `reserve`, or plan after
    that step. Gradients that are there stay allocated beside those of the measured steps: zero_grad() first. Effects
    of hooks, and of forward on objects that modules hold, are not undone. The device's record of its peak memory begins
    anew. Host memory that was taken stays taken for the training: `release_memory()` gives it back. Where a job has
    several ranks, all of them have to call it.
    """
    batch = _batch_of(example_batch)
    reserved_bytes = _reserved(reserve)
    budget_of = None if budget is None else Budget(budget)
    if profile is None:
        settings = _Settings(store, min_bytes, host_limit, regions)
        profile = _measured(model, batch, loss, None if budget is None else _ANY_BUDGET, settings)
    else:
        profile = _for_batch(profile, model, batch, host_limit)
        if budget is not None:
            profile.check_second_runs()
    budget_bytes = None
    if budget_of is not None:
        budget_bytes = min(gather(budget_of(_device_bytes(profile, model)), None, "a budget"))
    planned = Solver(profile.with_reserved(reserved_bytes)).solve(budget_bytes)
    return planned if budget_of is None else dataclasses.replace(planned, budget=str(budget_of))


def measure(
    model: torch.nn.Module,
    example_batch: Any,
    *,
    loss: LossOf | None = None,
    store: str | StoreFactory | None = None,
    min_bytes: int | str = "1MiB",
    host_limit: int | str | None = None,
    regions: Names | list[Names] | tuple[Names, ...] = (),
    reserve: int | str = 0,
) -> Profile:
    """What a step does, measured in a few of them: bytes and seconds of each region, for plans of any budget.

    Every region runs again meanwhile and its inputs wait in the store, so that the steps need the least memory there
    is. The model is left as `plan` leaves it::

        profile = measure(model, batch)
        profile.save("profile.json")                     # `ebbtide plan profile.json` needs no GPU
        ebbtide.offload(model, profile=profile, budget="40GiB")

    Args:
        model, example_batch, loss, store, min_bytes, host_limit, regions, reserve: as for `plan`.

    Raises:
        ConfigError, ModuleError: as `plan` does.
        PlanError: no regions are found, or the batch comes by none of them.
        RecomputeError: a region cannot run again: `handle.profile` of `offload(model)` without a budget can do without.
    """
    batch, reserved_bytes = _batch_of(example_batch), _reserved(reserve)
    settings = _Settings(store, min_bytes, host_limit, regions)
    return _measured(model, batch, loss, _ANY_BUDGET, settings).with_reserved(reserved_bytes)


# -- what was given --------------------------------------------------------------------------------------------------


def _batch_of(given: Any) -> _Batch:
    if isinstance(given, torch.Tensor):
        batch = _Batch((given,), {})
    elif isinstance(given, Mapping):
        batch = _Batch((), cast("Mapping[str, Any]", given))
    elif isinstance(given, tuple | list):
        batch = _Batch(tuple(cast("list[Any]", given)), {})
    else:
        raise ConfigError(
            f"example_batch is of type {type(given).__name__}: expected what the model is called with, as a mapping "
            "(by keyword), a tuple or list (by position) or one tensor"
        )
    if not batch.tensors:
        raise ConfigError("example_batch has no tensor in it: expected what the model is called with in training")
    if any(t.requires_grad and not t.is_leaf for t in batch.tensors):
        raise ConfigError("example_batch has a tensor with a graph of its own, good for one backward only: detach() it")
    return batch


def _reserved(reserve: int | str) -> int:
    return 0 if reserve in (0, "0") else parse_bytes(reserve, "reserve")


def _check(model: torch.nn.Module) -> None:
    name = type(model).__name__
    if not model.training:
        raise ModuleError(f"{name} is not in training mode, where it saves other things: call train() first")
    if any(map(torch.nn.parameter.is_lazy, (*parameters_of(model), *buffers_of(model)))):
        raise ModuleError(f"{name} has parameters or buffers that its first forward makes: run one forward before")
    if not any(p.requires_grad for p in parameters_of(model)):
        raise ModuleError(f"{name} has no parameter that requires a gradient: there is nothing to plan for")
    if any(p._post_accumulate_grad_hooks for p in parameters_of(model)):
        raise ModuleError(
            f"{name} has hooks that run once a gradient is there (an optimizer inside backward?), and these would "
            "train it while it is measured: plan before they are registered"
        )
    if env.is_disabled():
        raise ConfigError("EBBTIDE_DISABLE switches ebbtide off, so that nothing can be measured: write 0 there")


def _for_batch(profile: Profile, model: torch.nn.Module, batch: _Batch, host_limit: int | str | None) -> Profile:
    profile.check_made_for(made_for(model, device_of(model)))
    if host_limit is not None:
        profile = dataclasses.replace(profile, host_limit_bytes=parse_bytes(host_limit, "host_limit"))
    tokens = tokens_of(batch.args, batch.kwargs)
    return profile.scaled(tokens) if tokens > 0 else profile


def _device_bytes(profile: Profile, model: torch.nn.Module) -> int:
    device = device_of(model)
    if profile.device_bytes is not None or device is None:
        return profile.device_bytes or 0
    return device_for(device).total_bytes()


# -- the steps -------------------------------------------------------------------------------------------------------


def _measured(
    model: torch.nn.Module, batch: _Batch, loss: LossOf | None, budget: int | None, settings: _Settings
) -> Profile:
    _check(model)
    others = (t for t in (*buffers_of(model), *batch.tensors) if t.requires_grad and t.is_leaf)
    leaves = [*parameters_of(model), *others]
    with restored(model, leaves):
        handle = offload(model, mode="auto", budget=budget, **settings._asdict())
        try:
            return _profile_of(handle, lambda: _step(model, batch, loss, leaves))
        finally:
            handle.remove()


def _profile_of(handle: OffloadHandle, step: Callable[[], None]) -> Profile:
    """Raises PlanError if steps make none."""
    for _ in range(_MOST_STEPS):
        step()
        profile = handle.conclude()
        if profile is not None:
            return profile
    names = list(handle.plan.regions)
    raise PlanError(
        f"the batch makes no profile: in {_MOST_STEPS} steps it came by none of the {len(names)} regions "
        f"({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}), by others each time, or by one inside of "
        "another. Name some that every step comes by one after the other: regions=[...]"
    )


def _step(model: torch.nn.Module, batch: _Batch, loss: LossOf | None, leaves: list[torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        output = model(*batch.args, **batch.kwargs)  # held during backward, as most training loops do
        _loss_of(output, loss).backward()
    drop_gradients(leaves)
    torch.clear_autocast_cache()  # as leaving autocast does between two steps


def _loss_of(output: Any, loss: LossOf | None) -> torch.Tensor:
    found = _default_loss(output) if loss is None else loss(output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"loss= gives {_described(found)}: expected a tensor with one element")
    if not found.requires_grad:
        raise ConfigError(
            "the loss does not depend on any parameter that requires a gradient: give a batch with labels, or loss=, a "
            "function of the model's output"
        )
    return found


def _default_loss(output: Any) -> torch.Tensor:
    is_mapping = isinstance(output, Mapping)
    found = cast("Mapping[str, Any]", output).get("loss") if is_mapping else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found if found.numel() == 1 else found.sum()
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output
    sums = [t.sum(dtype=torch.float32) for t in _floating_in(output)]
    if not sums:
        raise ConfigError(f"the model returns {_described(output)}, in which no loss is found: give loss=")
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


def _floating_in(output: Any) -> Iterator[torch.Tensor]:
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return (t for t in tensors_in((output,)) if t.requires_grad and t.is_floating_point())


def _described(found: object) -> str:
    return f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
