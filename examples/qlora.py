"""QLoRA: adapters on a 4-bit model (bitsandbytes), with offloaded activations.

python examples/qlora.py

The model is tiny and random, so that the script runs on any machine in seconds. For a model of your own leave out
`folder`, `**anywhere` and the lines that make them: the default moves as much as costs no time on a GPU, and
budget="20GiB" stays below 20 GiB.
"""

import tempfile

import peft
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import ebbtide

config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256, use_cache=False
)
anywhere = (
    {} if torch.accelerator.is_available() else {"store": "mock", "mode": "all", "min_bytes": 1, "window": "1KiB"}
)

with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits)

model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
handle = ebbtide.offload(model, **anywhere)

for step in range(3):
    tokens = torch.randint(0, config.vocab_size, (2, 32), device=model.device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

print(handle.report())
handle.remove()
