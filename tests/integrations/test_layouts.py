"""Layouts of several processes on gloo: by every recipe each trains as its twin does, bit for bit, with the collectives
of the twin and those that recomputation repeats; weights and gathered weights never travel."""

import contextlib
import dataclasses
import gc
import json
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from processes import join, spawn
from support import bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import ebbtide
from ebbtide._stores import MockStore
from ebbtide._utils.sizes import GIB
from ebbtide._utils.torch_private import plain_tensors

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
WIDTH, HEADS, WORDS, DEPTH = 16, 4, 24, 2
ROWS, LENGTH = 4, 8
STEPS = 5  # a planner measures three; ranks meet before the fourth and the eighth, and collectives count in the last
FEW_STEPS = 3


# -- a model that every layout can divide ------------------------------------------------------------------------------


class Attention(nn.Module):
    """`gathers`: context parallel, each rank has a part of the sequence and gathers keys and values."""

    def __init__(self, gathers=None):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gathers = gathers

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.gathers is not None:
            k, v = (collectives.all_gather_tensor_autograd(each, 2, self.gathers) for each in (k, v))
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Experts(nn.Module):
    """An expert for each rank: tokens go to the rank of their expert and back, in numbers that differ."""

    def __init__(self, group):
        super().__init__()
        self.router = nn.Linear(WIDTH, group.size())
        self.expert = FeedForward()
        self.group = group

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        out = expert.bincount(minlength=self.group.size())
        back = collectives.all_to_all_single(out, None, None, self.group).tolist()
        out = out.tolist()
        mine = collectives.all_to_all_single_autograd(tokens[order], back, out, self.group)
        done = collectives.all_to_all_single_autograd(self.expert(mine), out, back, self.group)
        return (torch.empty_like(tokens).index_copy(0, order, done) * weight.unsqueeze(-1)).view_as(x)


class Block(nn.Module):
    def __init__(self, attention=Attention, feed_forward=FeedForward, dropout=0.0):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), attention()
        self.norm2, self.feed_forward = nn.LayerNorm(WIDTH), feed_forward()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, has_scalar=False, **parts):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1)) if has_scalar else 1.0
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(**parts) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale


class Part(nn.Module):
    """A stage of a pipeline."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def made(kind=Model, seed=0, **parts):
    torch.manual_seed(seed)
    return kind(**parts)


def batch(seed, data_rank, rows=ROWS):
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(100 * seed + data_rank))


def loss_of(model, tokens, targets=None):
    targets = tokens.roll(-1, 1) if targets is None else targets
    return functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


# -- layouts: each gives `offload` the module, and returns the modules with the weights and the losses of a step -------


def replicated(offload):
    model = made(dropout=0.1)
    parallel = nn.parallel.DistributedDataParallel(model)
    offload(model)
    return model, lambda seed: backward(loss_of(parallel, batch(seed, dist.get_rank())))


def sharded(offload, first="shard", mesh=None, is_uneven=False, **settings):
    """`is_uneven`: batches of ranks differ in size, and all but the first rank have nothing of one of the weights."""
    model = made(dropout=0.1, has_scalar=is_uneven)
    rows = ROWS + dist.get_rank() if is_uneven else ROWS
    if first == "offload":
        offload(model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    if first == "shard the blocks":
        offload(model)
    fully_shard(model, mesh=mesh, **settings)
    if first == "shard":
        offload(model)
    return model, lambda seed: backward(loss_of(model, batch(seed, dist.get_rank(), rows)))


def sharded_and_replicated(offload):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    return sharded(offload, mesh=mesh)


def divided_blocks(model, mesh, has_sequences=False):
    """Columns and rows of weights; `has_sequences`: between the products each rank has a part of the sequence."""
    whole = Shard(1) if has_sequences else Replicate()
    block = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=whole),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=whole),
    }
    if has_sequences:
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        block |= {name: SequenceParallel() for name in ("norm1", "norm2")}
        block |= {"attention": gathered, "feed_forward": gathered}
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    return whole


def divided(model, mesh, has_sequences):
    whole = divided_blocks(model, mesh, has_sequences)
    ends = {"head": ColwiseParallel(input_layouts=whole, output_layouts=Replicate())}
    if has_sequences:
        ends |= {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
        }
    return parallelize_module(model, mesh, ends)


def tensor_parallel(offload, has_sequences=False):
    model = divided(made(), init_device_mesh("cpu", (dist.get_world_size(),)), has_sequences)
    offload(model)
    return model, lambda seed: backward(loss_of(model, batch(seed, 0)))


def sharded_tensor_parallel(offload, has_sequences):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = divided(made(), mesh["tensor"], has_sequences)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["data"])
    offload(model)
    return model, lambda seed: backward(loss_of(model, batch(seed, mesh.get_local_rank("data"))))


def context_parallel(offload):
    """Written with collectives: torch's `context_parallel` has no attention for CPUs."""
    model, rank = made(attention=partial(Attention, dist.group.WORLD)), dist.get_rank()

    def step(seed):
        tokens = batch(seed, 0)
        mine, targets = (each.chunk(dist.get_world_size(), 1)[rank] for each in (tokens, tokens.roll(-1, 1)))
        losses = backward(loss_of(model, mine, targets))
        for p in model.parameters():
            dist.all_reduce(p.grad)
        return losses

    offload(model)
    return model, step


def expert_parallel(offload):
    model = made(seed=dist.get_rank(), feed_forward=partial(Experts, dist.group.WORLD))
    offload(model)
    return model, lambda seed: backward(loss_of(model, batch(seed, dist.get_rank())))


def sharded_pipeline(offload, tensors=1):
    mesh = init_device_mesh("cpu", (2, 2, tensors), mesh_dim_names=("stages", "data", "tensor"))
    at, microbatches = mesh.get_local_rank("stages"), 4
    part = made(Part, seed=at)
    if tensors > 1:
        divided_blocks(part, mesh["tensor"])
    for module in (*part.layers, part):
        fully_shard(module, mesh=mesh["data"])
    offload(part, process_group=[dist.new_group(ranks.flatten().tolist()) for ranks in mesh.mesh][at])
    stage = PipelineStage(part, at, 2, CPU, group=mesh["stages"].get_group())
    schedule = Schedule1F1B(stage, microbatches, loss_fn=functional.mse_loss)

    def step(seed):
        numbers = torch.Generator().manual_seed(100 * seed + mesh.get_local_rank("data"))
        x, target = torch.randn(2, 2 * microbatches, LENGTH, WIDTH, generator=numbers)
        losses = []
        schedule.step(*([x] if at == 0 else []), target=target, losses=losses)
        return losses

    return part, step


def backward(loss):
    loss.backward()
    return [loss]


BETWEEN_SEQUENCES = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ON_THE_CPU = CPUOffloadPolicy(pin_memory=False)

# Ranks, the layout, and the collectives of each block that a recomputation repeats. Weights are gathered once for
# recomputation and backward, and what a block ends with is not computed again.
LAYOUTS = {
    "DDP": (2, replicated, {}),
    "FSDP2": (2, sharded, {}),
    "FSDP2 on 4": (4, sharded, {}),
    "FSDP2, not resharded": (2, partial(sharded, reshard_after_forward=False), {}),
    "FSDP2, offload first": (2, partial(sharded, first="offload"), {}),
    "FSDP2, offload in between": (2, partial(sharded, first="shard the blocks"), {}),
    "FSDP2, bf16": (2, partial(sharded, mp_policy=BF16), {}),
    "FSDP2, weights on the CPU": (2, partial(sharded, offload_policy=ON_THE_CPU), {}),
    "FSDP2, offload first, bf16, weights on the CPU, not resharded": (
        2,
        partial(sharded, first="offload", mp_policy=BF16, offload_policy=ON_THE_CPU, reshard_after_forward=False),
        {},
    ),
    "FSDP2, uneven": (2, partial(sharded, is_uneven=True), {}),
    "HSDP": (4, sharded_and_replicated, {}),
    "TP": (2, tensor_parallel, {"all_reduce": 1}),
    "TP on 4": (4, tensor_parallel, {"all_reduce": 1}),
    "TP, sequence parallel": (2, partial(tensor_parallel, has_sequences=True), BETWEEN_SEQUENCES),
    "FSDP2 x TP": (4, partial(sharded_tensor_parallel, has_sequences=False), {"all_reduce": 1}),
    "FSDP2 x TP, sequence parallel": (4, partial(sharded_tensor_parallel, has_sequences=True), BETWEEN_SEQUENCES),
    "CP": (2, context_parallel, {"all_gather_into_tensor": 2}),
    "EP": (2, expert_parallel, {"all_to_all_single": 3}),
    "EP on 4": (4, expert_parallel, {"all_to_all_single": 3}),
    "FSDP2 x PP": (4, sharded_pipeline, {}),
    "FSDP2 x TP x PP": (8, partial(sharded_pipeline, tensors=2), {"all_reduce": 4}),  # one for each microbatch
}


# -- training ----------------------------------------------------------------------------------------------------------


class Watch(MockStore):
    """Notes the bytes of each parcel."""

    sent: ClassVar[list[bytes]] = []

    def write(self, block, src, stream):
        Watch.sent.append(bits(src))
        return super().write(block, src, stream)


def watched(device):
    return Watch(device)


class Collectives(TorchDispatchMode):
    """Names of the collectives that run inside, in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        namespace, _, name = op.name().partition("::")
        if namespace in ("c10d", "_c10d_functional", "_dtensor") and name not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            self.found.append(name)
        return op(*args, **(kwargs or {}))


def weights_of(model):
    """The bytes of each matrix, of its part on this rank and of the whole, in float32 and bfloat16."""
    matrices = [p.detach() for p in model.parameters() if p.dim() > 1]  # vectors of zeros and ones equal other tensors
    wholes = [p.full_tensor() for p in matrices if isinstance(p, DTensor)]
    parts = [t for p in matrices for t in plain_tensors(p)]
    return {bits(t.to(dtype)) for t in (*wholes, *parts) for dtype in (torch.float32, torch.bfloat16)}


class Run:
    """Some steps of a layout.

    Attributes:
        found: losses and gradients of each step.
        collectives: of the last step.
        traveled: weights among the parcels.
        handle: of the offloaded module; None for the twin.
    """

    def __init__(self, layout, steps, **settings):
        self.settings, self.handle, self.found, self.traveled = settings, None, [], 0
        model, step = layout(self.offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(steps):
            torch.manual_seed(k)
            weights = weights_of(model)
            Watch.sent.clear()
            collectives = Collectives()
            with collectives if k == steps - 1 else contextlib.nullcontext():
                losses = step(k)
            self.traveled += sum(each in weights for each in Watch.sent)
            grads = [p.grad for p in model.parameters()]
            self.found.append([bits(t).hex() for each in (*losses, *grads) for t in plain_tensors(each.detach())])
            del losses, grads
            optimizer.step()
            optimizer.zero_grad()
        self.collectives = collectives.found
        gc.collect()  # a schedule and its graphs are a cycle

    def offload(self, module, **ranks):
        if self.settings:
            settings = {**self.settings, **(ranks if "budget" in self.settings else {})}
            self.handle = ebbtide.offload(module, store=watched, min_bytes=1, **settings)

    def compared(self, plain):
        stats, plan = self.handle.stats(), self.handle.plan
        self.handle.remove()
        repeated = Counter(self.collectives)
        repeated.subtract(plain.collectives)
        return {
            "is_equal": self.found == plain.found[: len(self.found)],
            "traveled": self.traveled,
            "left": stats.host_bytes,
            "moved": stats.out.count,
            "recomputed": stats.recomputed.count,
            "unable": sum(stats.unable.values()),
            "status": plan.status,
            "plan": {name: str(region.recipe) for name, region in plan.regions.items()},
            "collectives": self.collectives,
            "repeated": {name: count for name, count in repeated.items() if count},
        }


RECIPES = {
    "all": {"mode": "all"},
    "recompute": {"recipe": "recompute"},
    "selective": {"recipe": "selective"},
    "selective, with collectives": {"recipe": ebbtide.Recipe("selective", ops=("collective", "attention", "matmul"))},
}


def enlarged(profile):
    """The profile as if saved tensors were large, and all else nothing: toys are smaller than what a process's memory
    changes by between two looks."""

    def large(rows):
        unread = dict.fromkeys(("read_at", "read_bytes"), 0) if hasattr(next(iter(rows), None), "read_at") else {}
        return tuple(dataclasses.replace(row, nbytes=1024 * row.nbytes, **unread) for row in rows)

    regions = []
    for region in profile.regions:
        tensors = {name: large(getattr(region, name)) for name in ("saved_tensors", "inputs", "expensive_ops")}
        nothing = dict.fromkeys(
            ("forward_work_bytes", "recompute_work_bytes", "moved_work_bytes", "grad_bytes", "after_bytes"), 0
        )
        region = dataclasses.replace(region, **tensors, **nothing)
        regions.append(dataclasses.replace(region, backward_work_bytes=region.saved_bytes - region.unused_bytes))
    points = tuple(dataclasses.replace(point, peak_bytes=0) for point in profile.outside.post_region_points)
    outside = dataclasses.replace(profile.outside, kept_bytes=0, held_bytes=0, post_region_points=points)
    base = {"other": GIB}
    return dataclasses.replace(profile, regions=tuple(regions), outside=outside, base_bytes=GIB, base=base)


def train(rank, folder, ranks, name):
    torch.set_num_threads(1)
    join(rank, folder, ranks)
    _, layout, repeated = LAYOUTS[name]
    plain = Run(layout, STEPS)
    found = {}
    for recipe, settings in RECIPES.items():
        if recipe == "selective, with collectives" and not repeated:
            continue  # as selective
        found[recipe] = Run(layout, FEW_STEPS, window="1KiB", **settings).compared(plain)
    measured = Run(layout, STEPS, budget=psutil.Process().memory_info().rss + 16 * GIB)
    profile = enlarged(measured.handle.profile)
    found["large budget"] = measured.compared(plain)
    budget = GIB + profile.graphs * sum(region.saved_bytes for region in profile.regions) // 2
    found["budget"] = Run(layout, FEW_STEPS, budget=budget, profile=profile).compared(plain)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # threads of gloo do not always end in order with the interpreter


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_recipe_trains_as_the_twin(tmp_path, name):
    ranks, _, repeated = LAYOUTS[name]
    spawn(train, str(tmp_path), ranks, name, ranks=ranks)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    per_step = {collective: count * DEPTH for collective, count in repeated.items()}
    for recipe in found[0]:
        rows = [each[recipe] for each in found]
        for row in rows:
            assert row["is_equal"], recipe
            assert (row["traveled"], row["left"], row["unable"], row["status"]) == (0, 0, 0, ""), recipe
            assert row["moved"] + row["recomputed"] > 0, recipe
            assert (row["recomputed"] > 0) == (recipe != "all") or recipe == "budget", recipe
            if recipe in ("recompute", "selective"):
                assert row["repeated"] == per_step, recipe
            elif recipe == "budget":
                assert all(count <= per_step[collective] for collective, count in row["repeated"].items()), recipe
            else:
                assert row["repeated"] == {}, recipe
        stages = [rows[: ranks // 2], rows[ranks // 2 :]] if name.endswith("PP") else [rows]
        for stage in stages:
            assert all(
                (row["plan"], row["collectives"]) == (stage[0]["plan"], stage[0]["collectives"]) for row in stage
            )
