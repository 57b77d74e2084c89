"""A plain loop: the context, which needs no model, and the handle, which moves block by block or plans.

python examples/plain_loop.py
"""

import torch
from torch import nn

import ebbtide

# Leave these out for a large model on a GPU: the context moves all saved tensors, the handle as much as costs no time,
# or as budget="20GiB" needs.
tiny = {"min_bytes": 1, "window": "1KiB", "store": "host" if torch.accelerator.is_available() else "mock"}
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


torch.manual_seed(0)
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(step, context):
    x = torch.randn(8, 64, device=device)
    with context:
        loss = nn.functional.mse_loss(model(x), x.roll(1, -1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")


context = ebbtide.offload_activations(**tiny)
for step in range(3):
    train(step, context)
print(f"{context.stats().out.nbytes / 2**20:.2f} MiB moved out by the context")

handle = ebbtide.offload(model, **tiny)
for step in range(3, 6):
    train(step, torch.enable_grad())
print(handle.report())
handle.remove()
