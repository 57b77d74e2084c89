"""Soak: random training steps in one process, with faults, each equal to a step of a twin without ebbtide.

    python -m benchmarks.soak [--steps 10000] [--minutes 20] [--seed 0] [-o FILE]

tests/ must be on the path (PYTHONPATH=src:tests:.). The command ends at the first of steps and minutes. A failure names
the seed of the round: `--seed SEED --steps 1` runs the round alone. Models train on the accelerator of the machine, if
any; programs and injected faults have the CPU.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import Transformer, gradients, make, tokens
from faults.lines import Lines
from faults.test_steps import ERRORS, FALLBACKS
from faults.training import TwinTraining
from planner.test_norm import tight
from recipe_programs import RecipeProgram
from support import Boom, HandleRig, OneStream, Program, assert_equal, difference

import ebbtide
from benchmarks.facts import facts
from benchmarks.steady import counters, growth
from benchmarks.zoo.models import built
from ebbtide._devices.cpu import CpuDevice
from ebbtide._stores.disk import DiskStore
from ebbtide._stores.host import HostStore

LOOKS = 50  # by the count of steps; fewer if the minutes end first
MODELS = ["Transformer", "Llama A", "Qwen3-MoE", "ViT-L", "Whisper-large", "T5-large", "SD3", "Wan"]  # deterministic
KINDS = ["plain", "retained", "dropped", "two graphs", "raises in forward", "raises in backward"]
MOVES: dict[str, Any] = {"mode": "all", "window": 1, "prefetch": 10_000}
SETTINGS = [MOVES, {**MOVES, "recipe": "recompute"}, {**MOVES, "recipe": "selective"}, {"budget": "64GiB"}]
HOST_STORE = functools.partial(HostStore, limit=2**28)


class Place(NamedTuple):
    device: torch.device
    folder: Path

    def options(self, choose: random.Random) -> dict[str, Any]:
        store = choose.choice(["mock", f"disk:{self.folder}", HOST_STORE])  # each lives as long as the process
        return {"store": store, "min_bytes": choose.choice([1, 256])}


class Pair:
    """A model under `ebbtide.offload`, and its twin."""

    def __init__(self, choose: random.Random, place: Place) -> None:
        self._name, self._device = choose.choice(MODELS), place.device
        self._width, self._depth = choose.choice([16, 24, 32]), choose.randint(1, 4)
        self._models = [self._made(), self._made()]
        self.handle = ebbtide.offload(self._models[0][0], **choose.choice(SETTINGS), **place.options(choose))

    def step(self, choose: random.Random) -> None:
        kind, seed = choose.choice(KINDS), choose.randrange(2**16)
        assert_equal(*(_results(model, loss_of, kind, seed) for model, loss_of in self._models))

    def _made(self) -> tuple[torch.nn.Module, Callable[[int], torch.Tensor]]:
        if self._name != "Transformer":
            model, loss_of = built(self._name, self._device, tiny=True)
            return model, lambda _: loss_of()
        model = make(lambda: Transformer(self._width, self._depth), self._device)
        return model, lambda seed: model(tokens(self._device, seed, rows=1 + seed % 4, length=2 + seed % 31))


def _results(model: torch.nn.Module, loss_of: Callable, kind: str, seed: int) -> list[torch.Tensor]:
    def hook(*args: Any) -> None:  # of the module, or of a gradient
        if kind == "raises in forward" or len(args) == 1:
            raise Boom
        if kind == "raises in backward":
            args[-1].register_hook(hook)

    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooked = linear[len(linear) // 2].register_forward_hook(hook)
    model.zero_grad()
    torch.manual_seed(seed)
    losses = []
    with contextlib.suppress(Boom):
        losses += [loss_of(seed + number) for number in range(1 + (kind in ("dropped", "two graphs")))]
        for loss in losses[kind == "dropped" :] * (2 if kind == "retained" else 1):
            loss.backward(retain_graph=kind == "retained")
    hooked.remove()
    return [*(loss.detach() for loss in losses), *gradients(model)]


def program(choose: random.Random, place: Place) -> int:
    kind, options = choose.choice([Program, RecipeProgram]), place.options(choose)
    program = kind(choose.randrange(2**20))
    if kind is Program:
        contexts = ebbtide.offload_activations(**options), contextlib.nullcontext()
        ours, plain = (program.run(context, OneStream()) for context in contexts)
    else:
        offload = functools.partial(ebbtide.offload, **MOVES, **options)
        ours, plain = (program.run(rig) for rig in (types.SimpleNamespace(offload=offload), None))
    assert (found := difference(ours, plain)) is None, f"{program}: {found}"
    return len(program._steps)


def fault(choose: random.Random, place: Place) -> int:
    store, inject, effect = choose.choice([*ERRORS, *FALLBACKS])
    training = _training(choose, place, store)
    with pytest.MonkeyPatch.context() as patch:
        inject(training, patch)
        with contextlib.suppress(*([effect] if isinstance(effect, type) else [])):
            training.step()
        training.then()
    training.check()
    return 2


def interrupt(choose: random.Random, place: Place) -> int:
    training = _training(choose, place, choose.choice(["host", "disk"]))
    with Lines() as lines:
        training.step()
    at = choose.randrange(lines.count)
    with contextlib.suppress(KeyboardInterrupt), Lines({at}, lambda: signal.raise_signal(signal.SIGINT)):
        training.step()
    training.check()
    return 3


def _training(choose: random.Random, place: Place, store: str) -> TwinTraining:
    make_store = functools.partial(DiskStore, folder=place.folder) if store == "disk" else HOST_STORE
    rig = HandleRig(CpuDevice(), prefetch=choose.choice([1, 3000]), make_store=make_store)
    return TwinTraining(rig, choose.choice([None, "recompute", "selective"]), is_context=False)


def model(choose: random.Random, place: Place) -> int:
    pair, steps = Pair(choose, place), 8
    with pair.handle as handle:
        for number in range(steps):
            pair.step(choose)
            if number == steps // 2 and handle.profile is not None:
                handle.set_plan(tight(handle.profile))
    return steps


def soak(steps: int, minutes: float, seed: int, place: Place) -> dict[str, Any]:
    """Rounds until `steps` or `minutes` are over; a pair that lives as long as the process steps after each."""
    looks, failures = [counters(place.device)], []
    resident, rounds, done, end_s = Pair(random.Random(seed), place), 0, 0, time.monotonic() + 60 * minutes
    while done < steps and time.monotonic() < end_s:
        choose = random.Random(seed + rounds)
        chosen = choose.choice([program, program, fault, interrupt, model, model])
        try:
            done += chosen(choose, place)  # the count of its steps; raises if one differs
            resident.step(choose)
        except Exception:
            failures.append(f"seed {seed + rounds}, {chosen.__name__}: {traceback.format_exc()}")
        rounds, done = rounds + 1, done + 1
        if done * LOOKS // steps >= len(looks):
            looks.append(counters(place.device))
    columns = {name: [each[name] for each in looks] for name in looks[0]}
    return {
        "seed": seed, "rounds": rounds, "steps": done, "ended_by": "steps" if done >= steps else "minutes",
        "mismatches": len(failures), "failures": failures, "looks": len(looks),
        "most": {name: max(counts) for name, counts in columns.items()},
        "growth": {name: growth(counts) for name, counts in columns.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # "moved nothing", as meant; torch and transformers about their own work
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    name = f"{os.cpu_count()} CPU cores" if device.type == "cpu" else torch.cuda.get_device_name()
    command = f"python -m benchmarks.soak --steps {options.steps} --minutes {options.minutes:g} --seed {options.seed}"
    about = facts(command, name)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = soak(options.steps, options.minutes, options.seed, Place(device, Path(folder)))
    options.output.write_text(json.dumps({**about, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
