"""FSDP2 x tensor parallelism: parallelize, shard, then offload. On GPUs, or on the CPU by gloo.

torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ebbtide

# No settings are needed on GPUs: a planner moves as much as costs no time, or as budget="40GiB" needs. A tiny model on
# the CPU needs some.
anywhere = (
    {} if torch.accelerator.is_available() else {"store": "mock", "mode": "all", "min_bytes": 1, "window": "1KiB"}
)

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type != "cpu":
    device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("data", "tensor"))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4))).to(device)
for block in model:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
handle = ebbtide.offload(model, **anywhere)  # with a budget, all ranks of both dimensions agree on the plan
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(4):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + mesh.get_local_rank("data"))).to(device)
    loss = nn.functional.mse_loss(model(x), x.roll(1, -1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

print(f"rank {rank}: {handle.stats().out.nbytes / 2**20:.2f} MiB moved out")
handle.remove()
dist.destroy_process_group()
