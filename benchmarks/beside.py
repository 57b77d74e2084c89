"""What copies cost a step that they run beside: plain steps, plain steps with bare copies of as many bytes as a plan moves,
and the plan itself, in turns. Bare are a stream's pinned copies that nothing waits for and that nobody learned about."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from benchmarks.measure import Measured, merged, steps
from benchmarks.modes import Context
from benchmarks.planning import planned, settle
from benchmarks.workloads import Workload, build

_ROUNDS = 6
_CHUNK_BYTES = 64 * 2**20


def measure_beside(workload: Workload, device: torch.device, count: int) -> dict[str, object]:
    """Of the plan that is made without a budget.

    Args:
        count: half of the steps of each mode that are timed.
    """
    model, loss_of = build(workload, device)
    auto = settle(model, loss_of, None).plan
    assert auto.predicted is not None
    nbytes = auto.predicted.moved_bytes
    first = model.get_submodule(next(iter(auto.regions)))
    modes: dict[str, Callable[[], contextlib.AbstractContextManager[Context]]] = {
        "nothing": lambda: contextlib.nullcontext(contextlib.nullcontext),
        "bare copies": lambda: bare_copies(nbytes, device, first),
        "auto": lambda: planned(model, auto),
    }
    parts: dict[str, list[Measured]] = {key: [] for key in modes}
    for _ in range(_ROUNDS):
        for key, mode in modes.items():
            with mode() as context:
                parts[key].append(steps(model, loss_of, context, -(-2 * count // _ROUNDS)))
    return {"modes": {key: merged(measured).summary() for key, measured in parts.items()}, "copied_bytes": nbytes}


@contextlib.contextmanager
def bare_copies(nbytes: int, device: torch.device, first: torch.nn.Module) -> Iterator[Context]:
    """A context around forward: `nbytes` leave from where `first` is entered on, and come back from the end on. What a
    model looks at on the host before that would wait for them."""
    chunks = -(-nbytes // _CHUNK_BYTES)
    host = torch.empty(chunks, _CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
    outbound, inbound = torch.Stream(device), torch.Stream(device)
    source, target = (torch.empty(_CHUNK_BYTES * 8, dtype=torch.uint8, device=device).chunk(8) for _ in range(2))

    def leave(*_: object) -> None:
        outbound.wait_stream(torch.accelerator.current_stream(device))
        with outbound:
            for k in range(chunks):
                host[k].copy_(source[k % 8], non_blocking=True)

    @contextlib.contextmanager
    def around_forward() -> Iterator[None]:
        yield
        inbound.wait_stream(torch.accelerator.current_stream(device))
        with inbound:
            for k in range(chunks):
                target[k % 8].copy_(host[k], non_blocking=True)

    hook = first.register_forward_pre_hook(leave)
    yield around_forward
    hook.remove()
    torch.accelerator.synchronize()
