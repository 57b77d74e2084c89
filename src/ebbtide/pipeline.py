"""What only the schedule of a pipeline knows: the microbatch whose saved tensors are needed next.

Note [Schedules]
~~~~~~~~~~~~~~~~
1. Without a schedule the engine learns the order of needs as in any loop, in the first steps, with tensors of each
   microbatch on demand. Nor does the engine know which half of a split backward runs.
2. A schedule of torch.distributed.pipelining runs its actions through three methods of its stages: forward, backward
   (or its first half, for inputs), and the second half, for weights. `attach` wraps the methods on the instances.
3. Each backward action has a mark in the engine's timetable (Note [Order is a guess]). Once the action is the next one,
   the engine goes on from the mark: tensors come while the action before runs, or while the stage waits for another.
   In the first step a mark points at the tensor that the microbatch has saved last.
4. A mark is closed until the microbatch's forward has run. Nothing behind a closed mark is fetched: the microbatch,
   which comes first, would find no room.
5. The first half of a split backward reads nearly all that the second half reads. What the first half has brought back
   stays until the second, as without ebbtide, unless the user wants the memory (`keeps_split=False`).
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
from ebbtide._model.hooks import is_compiled
from ebbtide._offload import OffloadHandle, handle_of
from ebbtide._utils.logs import logger_of
from ebbtide._utils.torch_private import (
    PipelineAction,
    donates_buffers,
    is_pipeline_compute,
    modules_of,
    pipeline_actions,
    pipeline_stages,
    pipeline_tensors,
    replaces_pipeline_actions,
)

_log = logger_of(__name__)

_ATTACHED = "_ebbtide_attached"
_LOOKED_AT = 2  # steps in which the memory of stages is looked at
_REGISTER = "register_custom_function"
_METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


class AttachedSchedule:
    """A schedule that tells the engines what comes next.

    Attributes:
        out_of_turn: actions that came in another order than the schedule's.
        held_bytes: the most that stages themselves hold on the device behind an action, which no offloading can free:
            "outputs" for their backward, and "received" from other stages.
        not_offloaded: numbers of this rank's stages that are not under `offload`.
    """

    def __init__(self, schedule: Any, actions: Sequence[PipelineAction], keeps_split: bool) -> None:
        self._actions = actions
        self._numbers = {action: number for number, action in enumerate(actions)}
        self._keeps_split = keeps_split
        self._stages = {stage.stage_index: stage for stage in pipeline_stages(schedule)}
        self._handles: dict[int, list[OffloadHandle]] = {}
        self._marks = [Site(f"pipeline {action}", 0, 0) for action in actions]
        for mark in self._marks:
            mark.is_closed = True  # until the forward of the microbatch has run
        self._at = -1  # the action that began last
        self._steps = 0
        self._former: list[tuple[dict[str, Any], str, Any, Any]] = []
        self.out_of_turn = 0
        self.held_bytes = {"outputs": 0, "received": 0}
        self.not_offloaded = [number for number, stage in self._stages.items() if not _handles_in(stage.submod)]
        for stage in self._stages.values():
            own = self._replace(stage, {method: self._wrapped(stage, method) for method in _METHODS})
            own[_ATTACHED] = self
        if hasattr(schedule, _REGISTER):  # schedules of one stage run no functions of the user
            self._replace(schedule, {_REGISTER: _guarded(schedule)})

    def remove(self) -> None:
        """Undo `attach`. A second call does nothing."""
        for own, method, former, wrapped in self._former:
            if own.get(method) is wrapped:
                del own[method]
                if former is not None:
                    own[method] = former
            own.pop(_ATTACHED, None)
        self._former = []

    def _replace(self, owner: Any, methods: dict[str, Callable[..., Any]]) -> dict[str, Any]:
        """Set `methods` on an instance until `remove`. Returns the attributes of the instance."""
        own = cast(dict[str, Any], vars(owner))
        self._former += [(own, method, own.get(method), wrapped) for method, wrapped in methods.items()]
        own.update(methods)
        return own

    def _wrapped(self, stage: Any, method: str) -> Callable[..., Any]:
        call = getattr(stage, method)
        signature = inspect.signature(call)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not stage.has_backward or not self._former:  # an evaluation, or removed under a wrapper of the user
                return call(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            kind = "I" if given.get("full_backward") is False else _METHODS[method]
            action = PipelineAction(stage.stage_index, kind, next(iter(given.values())))
            self._begin(action)
            try:
                result = call(*args, **kwargs)
            finally:
                self._leave(action)
            self._end(action)
            return result

        return run

    def _begin(self, action: PipelineAction) -> None:
        if action == self._actions[0] or not self._handles:  # a step begins, whatever became of the step before
            self._at = -1
            self._steps += 1
            self._handles = {number: _handles_in(stage.submod) for number, stage in self._stages.items()}
        if action != self._actions[self._next]:
            if not self.out_of_turn:
                _log.warning("pipeline: %s came where the schedule has %s", action, self._actions[self._next])
            self.out_of_turn += 1
        self._at = self._numbers.get(action, self._at)
        for engine, _ in self._engines(action.stage):
            engine.keeps_retained = self._keeps_split and action.kind == "I"
        if action.kind == "F":
            for handle in self._handles[action.stage]:
                handle._attachment.context.microbatch = action.microbatch
            self._look_ahead()  # copies come while forward runs

    def _leave(self, action: PipelineAction) -> None:
        for engine, _ in self._engines(action.stage):
            engine.keeps_retained = False
        for handle in self._handles[action.stage]:
            handle._attachment.context.microbatch = -1

    def _end(self, done: PipelineAction) -> None:
        if done in self._numbers:
            self._marks[self._numbers[done]].is_closed = True
        if done.kind == "F":
            for engine, _ in self._engines(done.stage):
                for number in (self._numbers.get(done._replace(kind=kind)) for kind in "BIW"):
                    if number is not None:
                        if engine.newest is not None:
                            self._marks[number].guess(engine.newest)
                        self._marks[number].is_closed = False
            if self._steps <= _LOOKED_AT:
                for name, nbytes in _held_bytes(self._stages.values()).items():
                    self.held_bytes[name] = max(nbytes, self.held_bytes[name])
        self._look_ahead()

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
        for handle in self._handles[stage]:
            attachment = handle._attachment
            engine, limits = attachment.engine(), attachment.context.limits
            planned = [region.prefetch_bytes for region in attachment.plan.regions.values()]
            prefetch_bytes = min((each for each in planned if each is not None), default=limits.prefetch_bytes)
            if engine is not None:
                yield engine, limits._replace(prefetch_bytes=prefetch_bytes)


def attach(schedule: Any, *, keeps_split: bool = True) -> AttachedSchedule:
    """Tell the engines which microbatch is needed next, by the order of a schedule.

    Every schedule works without as well, with some tensors of each microbatch on demand:

        ebbtide.offload(stage.submod, recipe="offload")
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
        ebbtide.pipeline.attach(schedule)

    Args:
        schedule: a schedule of torch.distributed.pipelining, with stages under `ebbtide.offload`.
        keeps_split: of a split backward, what the half for inputs has brought back stays for the half for weights. With
            False it leaves again beyond `prefetch=` and comes twice: less memory where many halves for weights come
            late.

    Returns:
        The attached schedule, with counts and `remove()`.

    Raises:
        ConfigError: no schedule of torch.distributed.pipelining, a schedule of an unknown class, without a stage under
            `offload`, with functions of the user in place of actions, with compiled blocks and split backward, or
            attached already.
    """
    name, stages = type(schedule).__name__, pipeline_stages(schedule)
    actions = pipeline_actions(schedule) if stages else None
    if actions is None:
        raise ConfigError(
            f"attach({name}): expected a schedule of torch.distributed.pipelining that tells its order. Leave attach() "
            "out: the order is learned in the first steps"
        )
    if any(_ATTACHED in vars(stage) for stage in stages):
        raise ConfigError(f"attach({name}): a stage is attached already; remove() of the first attach() undoes it")
    if replaces_pipeline_actions(schedule):
        raise ConfigError(f"attach({name}): {_UNSEEN}")
    compiled = [stage.stage_index for stage in stages if any(map(is_compiled, modules_of(stage.submod)))]
    if compiled and donates_buffers() and any(action.kind in "IW" for action in actions):
        raise ConfigError(
            f"attach({name}): stage {compiled[0]} has modules compiled in place, and the schedule runs their backward "
            "twice, once for inputs and once for weights, which torch refuses. Before the first forward write "
            "torch._functorch.config.donated_buffer = False, or take a schedule without split backward"
        )
    if not any(_handles_in(stage.submod) for stage in stages):
        raise ConfigError(
            f"attach({name}): no stage is under offload(); write ebbtide.offload(stage.submod) first, and no attach() "
            "with mode='off'"
        )
    return AttachedSchedule(schedule, actions, keeps_split)


_UNSEEN = (
    f"functions registered by {_REGISTER}() run in place of the stages' methods, and attach() would see nothing. Leave "
    "attach() out: the order is learned in the first steps"
)


def _guarded(schedule: Any) -> Callable[..., None]:
    """Registers functions of the user for actions without computation only."""
    register: Callable[[Any, Any], None] = getattr(schedule, _REGISTER)

    @functools.wraps(register)
    def checked(computation_type: Any, custom_function: Any) -> None:
        if is_pipeline_compute(computation_type):
            raise ConfigError(f"{type(schedule).__name__} is under attach(): {_UNSEEN}")
        register(computation_type, custom_function)

    return checked


def _held_bytes(stages: Iterable[Any]) -> dict[str, int]:
    held = [pipeline_tensors(stage) for stage in stages]
    strided = {name: [t for each in held for t in each[name] if t.layout is torch.strided] for name in held[0]}
    storages = {name: {t.untyped_storage() for t in tensors} for name, tensors in strided.items()}
    return {name: sum(storage.nbytes() for storage in each) for name, each in storages.items()}


def _handles_in(module: torch.nn.Module) -> list[OffloadHandle]:
    found = (handle_of(each) for each in modules_of(module))
    return [handle for handle in found if handle is not None]
