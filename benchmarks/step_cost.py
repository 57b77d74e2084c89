"""Host cost of a step: what recipes add to a model of 24 tiny blocks, whose kernels take next to nothing (bar Z6).

python -m benchmarks.step_cost [--device cpu]
"""

import argparse
import contextlib
import gc
import json
import time
import warnings
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ebbtide

BLOCKS, WIDTH, TOKENS, ROUNDS = 24, 32, 16, 12


class Block(torch.nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x.sum()


def step_costs_ms(device: torch.device) -> dict[str, float]:
    """The least milliseconds of a step in each mode, measured in turns."""
    model = Model().to(device)
    x = torch.randn(2, TOKENS, WIDTH, device=device, requires_grad=True)
    modes: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "plain": contextlib.nullcontext,
        "checkpoint": lambda: _checkpointed(model),
        "nothing qualifies": lambda: _offloaded(model, min_bytes="1GiB"),
        "keep": lambda: _offloaded(model, recipe="keep"),
        "recompute": lambda: _offloaded(model, recipe="recompute"),
        "selective": lambda: _offloaded(model, recipe="selective"),
    }
    least = dict.fromkeys(modes, float("inf"))
    for _ in range(ROUNDS):
        for name, mode in modes.items():
            with mode():
                _step(model, x)
                _step(model, x)
                gc.collect()
                gc.disable()
                least[name] = min(least[name], *(_step(model, x) for _ in range(12)))
                gc.enable()
    return {name: 1000 * seconds for name, seconds in least.items()}


def _step(model: Model, x: torch.Tensor) -> float:
    torch.accelerator.synchronize() if x.is_cuda else None
    start = time.perf_counter()
    model(x).backward()
    return time.perf_counter() - start


@contextlib.contextmanager
def _checkpointed(model: Model):
    model.checkpoints = True
    yield
    model.checkpoints = False


@contextlib.contextmanager
def _offloaded(model: Model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "moved nothing", as meant
        handle = ebbtide.offload(model, verify=0, **options)
        try:
            yield
        finally:
            handle.remove()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    torch.set_num_threads(1)
    costs = step_costs_ms(torch.device(parser.parse_args().device))
    print(json.dumps({**costs, **{f"{n} / plain": c / costs["plain"] for n, c in costs.items()}}, indent=1))
