"""torchtune's context for `enable_activation_offloading: True`, as in torchtune's recipes, with ebbtide behind.

python examples/torchtune_compat.py

A recipe of torchtune needs only the line with `install`, above the recipe.
"""

import torch
from torchtune import training
from torchtune.models.llama2 import llama2

from ebbtide import compat

compat.torchtune.OffloadActivations.settings = {"window": 1}  # only here: all of a tiny model would fit into the window
if not torch.accelerator.is_available():
    compat.torchtune.OffloadActivations.settings["store"] = "mock"  # on the CPU nothing moves without a store
compat.install("torchtune")  # the one line to add
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

torch.manual_seed(0)
model = llama2(vocab_size=64, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=32, max_seq_len=32).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
context = training.get_act_offloading_ctx_manager(model, enable_activation_offloading=True)

for step in range(4):
    tokens = torch.randint(64, (2, 32), device=device)
    with context:
        logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

print(f"{context.stats().out.nbytes / 2**20:.2f} MiB moved out")
