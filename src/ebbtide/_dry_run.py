"""Plans and measurements before training: a few steps on an example batch, which leave no trace."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch

from ebbtide._config import Budget, Names, check_one_goal, checked_slowdown
from ebbtide._devices import device_for
from ebbtide._errors import ConfigError, ModuleError, PlanError
from ebbtide._model.batches import tensors_in, tokens_of
from ebbtide._model.placement import device_of, made_for
from ebbtide._model.preserve_state import drop_gradients, restored
from ebbtide._offload import offload
from ebbtide._planner.solve import Solver
from ebbtide._plans import Plan
from ebbtide._profiling.profile import Profile
from ebbtide._types import StoreFactory
from ebbtide._utils import env
from ebbtide._utils.distributed import gather
from ebbtide._utils.sizes import parse_bytes
from ebbtide._utils.torch_private import buffers_of, parameters_of

LossOf = Callable[[Any], torch.Tensor]
"""Takes the output of a model, returns the loss."""


class _Batch(NamedTuple):
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(tensors_in((*self.args, *self.kwargs.values())))


def plan(
    model: torch.nn.Module,
    example_batch: Any,
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    loss: LossOf | None = None,
    store: str | StoreFactory | None = None,
    min_bytes: int | str = "1MiB",
    host_limit: int | str | None = None,
    regions: Names | list[Names] | tuple[Names, ...] = (),
    reserve: int | str = 0,
    profile: Profile | None = None,
) -> Plan:
    """The plan that `offload(model, budget=...)` would make in the first steps, before any training.

    A few steps, forward and backward, run on `example_batch`. Gradients, buffers, attributes with state, random numbers
    and hooks of the model are restored, also after an error:

        planned = plan(model, batch, budget="40GiB", reserve="9GiB")
        print(planned)
        ebbtide.offload(model, plan=planned)

    Args:
        model: in training mode, on its device, compiled or wrapped as for training.
        example_batch: arguments of the model: a mapping (by keyword), a tuple or list (by position) or one tensor; as
            large as batches get. Call within the autocast context of the training, if any.
        budget: Peak of device memory to stay under: bytes, text like "40GiB", or a share of the device memory: 0.8
            or "80%".
        max_slowdown: Largest slowdown of a step as a share, 0.05 for 5 %: the planner keeps, moves and recomputes for
            the smallest peak. Default: 0.01, by moving alone; not beside a budget.
        loss: function of the model's output that backward begins with. Default: the output's `loss`, or the output if
            that is one number, else the sum of all floating-point tensors in the output.
        store: Where parcels wait: "host" (pinned memory), "disk", "disk:/folder" or "mock". Default: "host" for
            accelerators, "disk" for a model on the CPU of a machine without an accelerator.
        min_bytes: Saved tensors of smaller storages stay on the device. Default: 1MiB.
        host_limit: Most host memory to take; tensors beyond the limit stay on the device. Default: 80 % of free memory,
            divided among the processes of the host.
        regions: Names, patterns or classes of the modules to plan for. Default: the repeated blocks and the norm
            behind. Equal settings for `offload` keep the plan valid.
        reserve: bytes ("9GiB") of device memory for what comes later, such as the state of the optimizer.
        profile: of this model on this device: no step runs. `example_batch` says how large batches are, and `loss`,
            `store`, `min_bytes` and `regions` have no effect. For a budget or `max_slowdown`, the profile must be
            measured with one of these, or by `measure`.

    Raises:
        ConfigError: an impossible setting, an output without a loss, a batch without tensors.
        ModuleError: the model is not in training mode, has nothing to train, trains in backward, has a handle already,
            or holds a tensor that cannot be copied.
        PlanError: no plan fits the budget (the text names the smallest budget with a plan), no regions are found, or
            the batch enters none.

    Traps:
        The first step of an optimizer allocates the optimizer state, which is not counted: write `reserve`, or plan
        after that step. Present gradients stay allocated beside those of the measured steps: call zero_grad() first.
        Effects of hooks, and of forward on objects held by modules, are not undone. The peak memory statistics of the
        device are reset. Host memory stays allocated for the training: `release_memory()` frees it. In a job of several
        ranks all ranks have to call.
    """
    batch = _batch_of(example_batch)
    reserved_bytes = _reserved(reserve)
    check_one_goal(budget, checked_slowdown(max_slowdown))
    budget_of = None if budget is None else Budget(budget)
    may_recompute = budget is not None or max_slowdown is not None
    if profile is None:
        settings = {"store": store, "min_bytes": min_bytes, "host_limit": host_limit, "regions": regions}
        profile = _measured(model, batch, loss, settings, recomputes=may_recompute)
    else:
        profile = _for_batch(profile, model, batch, host_limit)
        if may_recompute:
            profile.check_has_recomputation()
    budget_bytes = None
    if budget_of is not None:  # all ranks meet before any work of their own, which may raise
        budget_bytes = min(gather(budget_of(_device_bytes(profile, model)), None, "a budget"))
    planned = Solver(profile.with_reserved(reserved_bytes)).solve(budget_bytes, max_slowdown=max_slowdown)
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
    """Bytes and seconds of each region, measured in a few steps, for plans of any budget.

    Every region recomputes meanwhile and inputs wait in the store: the steps take the least possible memory. The model
    is restored, as by `plan`:

        profile = measure(model, batch)
        profile.save("profile.json")                     # `ebbtide plan profile.json` needs no GPU
        ebbtide.offload(model, profile=profile, budget="40GiB")

    Args:
        model: as for `plan`.
        example_batch: as for `plan`.
        loss: as for `plan`.
        store: Where parcels wait: "host" (pinned memory), "disk", "disk:/folder" or "mock". Default: "host" for
            accelerators, "disk" for a model on the CPU of a machine without an accelerator.
        min_bytes: Saved tensors of smaller storages stay on the device. Default: 1MiB.
        host_limit: Most host memory to take; tensors beyond the limit stay on the device. Default: 80 % of free memory,
            divided among the processes of the host.
        regions: Names, patterns or classes of the modules to plan for. Default: the repeated blocks and the norm
            behind.
        reserve: as for `plan`.

    Raises:
        ConfigError, ModuleError: as `plan` does.
        PlanError: no regions are found, or the batch enters none.
        RecomputeError: a region cannot recompute. `offload(model).profile` without a budget needs no recomputation.
    """
    batch, reserved_bytes = _batch_of(example_batch), _reserved(reserve)
    settings = {"store": store, "min_bytes": min_bytes, "host_limit": host_limit, "regions": regions}
    return _measured(model, batch, loss, settings, recomputes=True).with_reserved(reserved_bytes)


# -- inputs ------------------------------------------------------------------------------------------------------------


def _batch_of(example: Any) -> _Batch:
    if isinstance(example, torch.Tensor):
        batch = _Batch((example,), {})
    elif isinstance(example, Mapping):
        batch = _Batch((), cast("Mapping[str, Any]", example))
    elif isinstance(example, tuple | list):
        batch = _Batch(tuple(cast("list[Any]", example)), {})
    else:
        raise ConfigError(
            f"example_batch is of type {type(example).__name__}: expected the arguments of the model, as a mapping "
            "(keywords), a tuple or list (positions) or one tensor"
        )
    if not batch.tensors:
        raise ConfigError("example_batch has no tensor in it: expected the arguments of the model in training")
    if any(t.requires_grad and not t.is_leaf for t in batch.tensors):
        raise ConfigError("example_batch has a tensor with a graph of its own, good for one backward only: detach() it")
    return batch


def _reserved(reserve: int | str) -> int:
    return 0 if reserve in (0, "0") else parse_bytes(reserve, "reserve")


def _check(model: torch.nn.Module) -> None:
    name = type(model).__name__
    if not model.training:
        raise ModuleError(f"{name} is in evaluation mode, which saves other tensors than training: call train() first")
    if any(map(torch.nn.parameter.is_lazy, (*parameters_of(model), *buffers_of(model)))):
        raise ModuleError(f"{name} has parameters or buffers that the first forward makes: run one forward before")
    if not any(p.requires_grad for p in parameters_of(model)):
        raise ModuleError(f"{name} has no parameter that requires a gradient: there is nothing to plan for")
    if any(p._post_accumulate_grad_hooks for p in parameters_of(model)):
        raise ModuleError(
            f"{name} has hooks on finished gradients (an optimizer inside backward?), which would train the model "
            "during the measurement: plan before registering the hooks"
        )
    if env.is_disabled():
        raise ConfigError("EBBTIDE_DISABLE switches ebbtide off, and nothing can be measured: set EBBTIDE_DISABLE=0")


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


# -- steps -------------------------------------------------------------------------------------------------------------


def _measured(
    model: torch.nn.Module, batch: _Batch, loss: LossOf | None, settings: dict[str, Any], recomputes: bool
) -> Profile:
    _check(model)
    budget = 2**60 if recomputes else None  # more than any device has: all regions recompute in the measured steps
    inputs = (t for t in (*buffers_of(model), *batch.tensors) if t.requires_grad and t.is_leaf)
    leaves = [*parameters_of(model), *inputs]
    with restored(model, leaves), offload(model, mode="auto", budget=budget, **settings) as handle:
        planning = handle._planning
        assert planning is not None and planning.controller is not None
        steps = 0
        while steps < planning.controller.steps + 3:  # two if the first two were of different kinds, one timed again
            _step(model, batch, loss, leaves)
            profile = planning.conclude()
            if profile is not None:
                return profile
            steps += 1
        names = list(handle.plan.regions)
        raise PlanError(
            f"the batch makes no profile: in {steps} steps forward entered none of the {len(names)} regions "
            f"({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}), or changing or nested regions. Name regions "
            "that every step enters one after the other: regions=[...]"
        )


def _step(model: torch.nn.Module, batch: _Batch, loss: LossOf | None, leaves: list[torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        output = model(*batch.args, **batch.kwargs)  # alive during backward, as in most training loops
        _loss_of(output, loss).backward()
    drop_gradients(leaves)
    torch.clear_autocast_cache()  # as at the end of an autocast context between two steps


def _loss_of(output: Any, loss: LossOf | None) -> torch.Tensor:
    found = _default_loss(output) if loss is None else loss(output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"loss= returns {_described(found)}: expected a tensor with one element")
    if not found.requires_grad:
        raise ConfigError(
            "the loss does not depend on any parameter that requires a gradient: pass a batch with labels, or loss=, a "
            "function from the output of the model to the loss"
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
        raise ConfigError(f"the model returns {_described(output)}, in which no loss is found: pass loss=")
    return torch.stack([t.to(sums[0].device) for t in sums]).sum()


def _floating_in(output: Any) -> Iterator[torch.Tensor]:
    if dataclasses.is_dataclass(output) and not isinstance(output, type):  # a dict or a list as well, at times
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return (t for t in tensors_in((output,)) if t.requires_grad and t.is_floating_point())


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
