"""What only the schedule of a pipeline knows: the microbatch whose saved tensors are needed next.

Note [Schedules]
~~~~~~~~~~~~~~~~
1. Without a schedule the engine learns the order of needs as in any loop. It knows nothing in the first step, and later
   the first tensors of a microbatch come on demand.
2. A schedule of torch.distributed.pipelining runs its actions through three methods of its stages: forward, backward
   (or its first half, for inputs), and the second half, for weights. `attach` wraps the methods on the instances.
3. Each backward action has a mark in the engine's timetable (Note [Order is a guess]). Once the action is the next one,
   the engine goes on from the mark: tensors come while the action before runs, or while the stage waits for another.
   In the first step a mark points at the tensor that the microbatch has saved last.
4. A mark is closed until the microbatch's forward has run. Nothing behind a closed mark is fetched: the microbatch,
   which comes first, would find no room.
5. The first half of a split backward reads nearly all that the second half reads. What the first half has brought back
   stays until the second, as without ebbtide.
6. The order of actions is a guess too. An action out of turn is counted, and costs copies on demand.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

from ebbtide._engine.context import Limits
from ebbtide._engine.engine import Engine
from ebbtide._engine.timetable import Site
from ebbtide._errors import ConfigError
from ebbtide._offload import OffloadHandle, handle_of
from ebbtide._utils.logs import logger_of
from ebbtide._utils.torch_private import (
    PipelineAction,
    modules_of,
    pipeline_actions,
    pipeline_stages,
    pipeline_tensors,
    replaces_pipeline_actions,
)

_log = logger_of(__name__)

_ATTACHED = "_ebbtide_attached"
_METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


class AttachedSchedule:
    """A schedule that tells the engines what comes next.

    Attributes:
        out_of_turn: actions that came in another order than the schedule's.
        held_bytes: the most that stages themselves hold on the device behind an action, which no offloading can free:
            "outputs" for their backward, and "received" from other stages.
    """

    def __init__(self, schedule: Any, actions: Sequence[PipelineAction]) -> None:
        self._schedule = schedule
        self._actions = actions
        self._stages = {stage.stage_index: stage for stage in pipeline_stages(schedule)}
        self._marks = [Site(f"pipeline {action}", 0, 0) for action in actions]
        for mark in self._marks:
            mark.is_closed = True  # until the forward of the microbatch has run
        self._at = -1  # the action that began last
        self._former: list[tuple[Any, str, Any]] = []
        self.out_of_turn = 0
        self.held_bytes = {"outputs": 0, "received": 0}
        for stage in self._stages.values():
            own = cast(dict[str, Any], vars(stage))
            for method in _METHODS:
                self._former.append((stage, method, own.get(method)))
                own[method] = self._wrapped(stage, method)
        vars(schedule)[_ATTACHED] = self

    def remove(self) -> None:
        """Undo `attach`. A second call does nothing."""
        for stage, method, former in self._former:
            del vars(stage)[method]
            if former is not None:
                vars(stage)[method] = former
        if self._former:
            del vars(self._schedule)[_ATTACHED]
        self._former = []

    def _wrapped(self, stage: Any, method: str) -> Callable[..., Any]:
        call = getattr(stage, method)
        signature = inspect.signature(call)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not stage.has_backward:  # an evaluation
                return call(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            kind = "I" if given.get("full_backward") is False else _METHODS[method]
            action = PipelineAction(stage.stage_index, kind, next(iter(given.values())))
            self._begin(action)
            result = call(*args, **kwargs)
            self._end(action)
            return result

        return run

    def _begin(self, action: PipelineAction) -> None:
        if action == self._actions[0]:
            self._at = -1  # a step begins, whatever became of the step before
        if action != self._actions[self._next]:
            if not self.out_of_turn:
                _log.warning("pipeline: %s came where the schedule has %s", action, self._actions[self._next])
            self.out_of_turn += 1
        self._at = self._actions.index(action) if action in self._actions else self._at
        for engine, _ in self._engines(action.stage):
            engine.is_guided = True
            engine.keeps_retained = action.kind == "I"
            engine.newest = None  # what a microbatch saves first is needed last: nothing of its own follows
        if action.kind == "F":
            self._name_microbatch(action.stage, action.microbatch)
            self._look_ahead()  # copies come while forward runs

    def _end(self, done: PipelineAction) -> None:
        for engine, _ in self._engines(done.stage):
            engine.is_guided = engine.keeps_retained = False
            for mark, action in zip(self._marks, self._actions, strict=True):
                if done.kind == "F" and (action.stage, action.microbatch) == (done.stage, done.microbatch):
                    mark.guess(engine.newest)
                    mark.is_closed = False
        self._marks[self._at].is_closed = True
        self._name_microbatch(done.stage, -1)
        self._look_ahead()
        for name, nbytes in _held_bytes(self._stages.values()).items():
            self.held_bytes[name] = max(nbytes, self.held_bytes[name])

    def _name_microbatch(self, stage: int, microbatch: int) -> None:
        for handle in _handles_in(self._stages[stage].submod):
            handle._attachment.context.microbatch = microbatch

    @property
    def _next(self) -> int:
        return (self._at + 1) % len(self._actions)

    def _look_ahead(self) -> None:
        """If backward comes next, fetch its tensors."""
        following = self._actions[self._next]
        if following.kind != "F" and not self._marks[self._next].is_closed:
            for engine, limits in self._engines(following.stage):
                engine.reach(self._marks[self._next], limits)

    def _engines(self, stage: int) -> Iterator[tuple[Engine, Limits]]:
        """The engines of a stage, and how far to look ahead: no further than a plan allows anywhere."""
        for handle in _handles_in(self._stages[stage].submod):
            attachment = handle._attachment
            engine, limits = attachment.engine(), attachment.context.limits
            planned = [region.prefetch_bytes for region in attachment.plan.regions.values()]
            prefetch_bytes = min((each for each in planned if each is not None), default=limits.prefetch_bytes)
            if engine is not None:
                yield engine, limits._replace(prefetch_bytes=prefetch_bytes)


def attach(schedule: Any) -> AttachedSchedule:
    """Tell the engines which microbatch is needed next, by the order of a schedule.

    Every schedule works without as well, with some tensors of each microbatch on demand::

        ebbtide.offload(stage.submod, recipe="offload")
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
        ebbtide.pipeline.attach(schedule)

    Args:
        schedule: a schedule of torch.distributed.pipelining, with stages under `ebbtide.offload`.

    Returns:
        The attached schedule, with counts and `remove()`.

    Raises:
        ConfigError: no schedule of torch.distributed.pipelining, a schedule of an unknown class, without a stage under
            `offload`, with functions of the user in place of actions, or attached already.
    """
    name, stages = type(schedule).__name__, pipeline_stages(schedule)
    actions = pipeline_actions(schedule) if stages else None
    if actions is None:
        raise ConfigError(
            f"attach({name}): expected a schedule of torch.distributed.pipelining that tells its order. Leave attach() "
            "out: the order is learned in the first steps"
        )
    if _ATTACHED in vars(schedule):
        raise ConfigError(f"attach({name}): the schedule is attached already; remove() of the first attach() undoes it")
    if replaces_pipeline_actions(schedule):
        raise ConfigError(
            f"attach({name}): functions registered by register_custom_function() run in place of the stages' methods, "
            "and attach() would see nothing. Leave attach() out: the order is learned in the first steps"
        )
    if not any(_handles_in(stage.submod) for stage in stages):
        raise ConfigError(f"attach({name}): no stage is under offload(); write ebbtide.offload(stage.submod) first")
    return AttachedSchedule(schedule, actions)


def _held_bytes(stages: Iterable[Any]) -> dict[str, int]:
    held = [pipeline_tensors(stage) for stage in stages]
    storages = {name: {t.untyped_storage() for each in held for t in each[name]} for name in ("outputs", "received")}
    return {name: sum(storage.nbytes() for storage in each) for name, each in storages.items()}


def _handles_in(module: torch.nn.Module) -> list[OffloadHandle]:
    found = (handle_of(each) for each in modules_of(module))
    return [handle for handle in found if handle is not None]
