"""A pipeline of torch.distributed.pipelining: each rank offloads its stage. On GPUs, or on the CPU by gloo.

torchrun --standalone --nproc-per-node 2 examples/pipeline.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ebbtide

# Leave these out for a large model on GPUs.
tiny = {"min_bytes": 1, "window": "1KiB", "store": "host" if torch.accelerator.is_available() else "mock"}
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


dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
module = nn.Sequential(*(Block() for _ in range(2))).to(device)
handle = ebbtide.offload(module, recipe="selective", **tiny)  # or "offload", "recompute", or a budget for each stage
stage = PipelineStage(module, rank, ranks, device)
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
ebbtide.pipeline.attach(schedule)  # the engine knows which microbatch comes next
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

for step in range(4):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
    losses = []
    schedule.step(*([x] if rank == 0 else []), target=x.roll(1, -1), losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")

print(f"rank {rank}: {handle.stats().out.nbytes / 2**20:.2f} MiB moved out")
handle.remove()
dist.destroy_process_group()
