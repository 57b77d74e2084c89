"""A tiny language model with random weights, a tokenizer and rows, made without network."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

LANGUAGES = ["Ada", "Basic", "C", "D", "Erlang", "Fortran", "Go", "Haskell", "Icon", "Java", "Kotlin", "Lisp"]
_WORDS = ["<pad>", "<s>", "</s>", "<unk>", "is", "a", "language", "for", "people", "machines", *LANGUAGES]


def tokenizer():
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def language_model(scores=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(_WORDS),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        num_labels=1,
    )
    return (LlamaForSequenceClassification if scores else LlamaForCausalLM)(config)


def rows(kind):
    """Make a data set of `kind` "text", "pairs" (prompt, chosen, rejected) or "labels" (prompt, completion, label)."""
    made = {
        "text": lambda name: {"text": f"{name} is a language for people"},
        "pairs": lambda name: {"prompt": f"{name} is", "chosen": "a language for people", "rejected": "for machines"},
        "labels": lambda name: {"prompt": f"{name} is", "completion": "a language", "label": name < "F"},
    }[kind]
    return Dataset.from_list([made(name) for name in LANGUAGES])


def few_steps(folder):
    """Return trainer arguments for three steps on the CPU without files."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
    }


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
