"""transformers' Trainer with the callback, and settings from the command line.

python examples/transformers_trainer.py
python examples/transformers_trainer.py --offload_budget 0.8 --max_steps 20

Model and data are tiny and random, so that the script runs on any machine in seconds.
"""

import sys

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ebbtide.integrations.transformers import OffloadArguments, OffloadCallback

DEFAULTS = ["--output_dir", "outputs", "--max_steps", "4", "--logging_steps", "1", "--per_device_train_batch_size", "2"]
DEFAULTS += ["--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true"]

parser = HfArgumentParser((TrainingArguments, OffloadArguments))
args, offload = parser.parse_args_into_dataclasses([*DEFAULTS, *sys.argv[1:]])

# No settings are needed on a GPU: a planner moves as much as costs no time. A tiny model on the CPU needs some.
anywhere = {"store": "mock", "mode": "all", "min_bytes": 1, "window": "1KiB"}
settings = offload.settings() or ({} if torch.accelerator.is_available() else anywhere)

config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256, use_cache=False
)
tokens = torch.randint(0, config.vocab_size, (64, 32))
trainer = Trainer(
    LlamaForCausalLM(config),
    args,
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[OffloadCallback(**settings)],
)
trainer.train()

moved_gib = 0.0
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {entry['loss']:.4f}, {entry['ebbtide/stall_ms']:.1f} ms of stall")
        moved_gib += entry["ebbtide/moved_gib"]
print(f"{moved_gib * 1024:.2f} MiB moved out")
