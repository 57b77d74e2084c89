"""Fabric: one line before setup().

python examples/fabric.py
"""

import torch
from lightning import Fabric
from torch import nn

import ebbtide

# No settings are needed on a GPU: a planner moves as much as costs no time. A tiny model on the CPU needs some.
anywhere = (
    {} if torch.accelerator.is_available() else {"store": "mock", "mode": "all", "min_bytes": 1, "window": "1KiB"}
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


fabric = Fabric(devices=1)
fabric.seed_everything(0)
model = Model()
handle = ebbtide.offload(model, **anywhere)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

for step in range(4):
    x = torch.randn(2, 16, 64, device=fabric.device)
    loss = nn.functional.mse_loss(model(x), x.roll(1, -1))
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

print(handle.report())
handle.remove()
