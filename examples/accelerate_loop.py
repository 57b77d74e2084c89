"""A loop with accelerate and accumulated gradients.

python examples/accelerate_loop.py
accelerate launch examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn

from ebbtide.integrations.accelerate import offload

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


torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.randn(16, 16, 64), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
handle = offload(accelerator, model, **anywhere)

for step, x in enumerate(loader):
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), x.roll(1, -1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.4f}")

accelerator.print(handle.report())
handle.remove()
