"""TRL's SFTTrainer with its own switch, `activation_offloading=True`, and ebbtide behind.

DPO, KTO and Reward work alike.

python examples/trl_sft.py

Model and data are tiny and random, so that the script runs on any machine in seconds.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ebbtide import compat

compat.OffloadActivations.settings = {"window": 1}  # only here: all of a tiny model would fit into the window
if not torch.accelerator.is_available():
    compat.OffloadActivations.settings["store"] = "mock"  # on the CPU nothing moves without a store
compat.install("trl")  # the one line to add

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "Ada", "C", "Go", "Lisp", "is", "a", "language", "for", "people"]

words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=len(WORDS),
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
rows = [{"text": f"{name} is a language for people"} for name in ("Ada", "C", "Go", "Lisp")]

with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        output_dir=folder,
        activation_offloading=True,
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_checkpointing=False,  # with checkpointing only the inputs of the checkpoints would move
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(config), args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()

for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {entry['loss']:.4f}")
stats = trainer.maybe_activation_offload_context.stats()
print(f"{stats.out.nbytes / 2**20:.2f} MiB moved out")
