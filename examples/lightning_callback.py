"""Lightning's Trainer with the callback.

python examples/lightning_callback.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from ebbtide.integrations.lightning import OffloadCallback

# No settings are needed on a GPU: a planner moves as much as costs no time. A tiny model on the CPU needs some.
anywhere = (
    {} if torch.accelerator.is_available() else {"store": "mock", "mode": "all", "min_bytes": 1, "window": "1KiB"}
)


class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4))

    def training_step(self, batch, index):
        x = batch
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.mse_loss(x, batch.roll(1, -1))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs, batch, index):
        figures = self.trainer.callback_metrics
        moved_mib = figures["ebbtide/moved_gib"] * 1024
        print(f"step {index}: loss {figures['loss']:.4f}, {moved_mib:.2f} MiB moved out")


seed_everything(0)
trainer = Trainer(
    callbacks=[OffloadCallback(**anywhere)],
    max_epochs=1,
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Task(), torch.utils.data.DataLoader(torch.randn(8, 16, 64), batch_size=2))
