"""TRL's GRPOTrainer, which has no switch for offloading, with the callback. RLOO works alike.

python examples/trl_grpo.py

Model and data are tiny and random, so that the script runs on any machine in seconds.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from ebbtide.integrations.transformers import OffloadCallback

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "Ada", "C", "Go", "Lisp", "is", "a", "language", "for", "people"]

# No settings are needed on a GPU: a planner moves as much as costs no time. A tiny model on the CPU needs some.
anywhere = (
    {} if torch.accelerator.is_available() else {"store": "mock", "mode": "all", "min_bytes": 1, "window": "1KiB"}
)

torch.manual_seed(0)
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
rows = [{"prompt": f"{name} is"} for name in ("Ada", "C", "Go", "Lisp")]


def different_words(completions, **_):
    return [float(len(set(text.split()))) for text in completions]


with tempfile.TemporaryDirectory() as folder:
    args = GRPOConfig(
        output_dir=folder,
        num_generations=2,
        max_completion_length=8,
        max_steps=3,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,  # with checkpointing only the inputs of the checkpoints would move
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = GRPOTrainer(
        LlamaForCausalLM(config),
        reward_funcs=different_words,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[OffloadCallback(**anywhere)],
    )
    trainer.train()

moved_gib = 0.0
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"step {entry['step']}: loss {entry['loss']:.4f}, reward {entry['reward']:.2f}")
        moved_gib += entry["ebbtide/moved_gib"]
print(f"{moved_gib * 1024:.2f} MiB moved out")
