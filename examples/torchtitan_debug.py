"""torchtitan's Trainer with its llama3 debug model, and ebbtide instead of activation checkpointing.

python examples/torchtitan_debug.py
torchrun --nproc-per-node 2 examples/torchtitan_debug.py

The second line is for machines with GPUs.
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

ONE_RANK = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
WORDS = [f"word{number}" for number in range(60)]


def use_cpu():
    """Have torchtitan use the CPU, before further imports: without an accelerator torchtitan uses CUDA."""
    from torchtitan.tools import utils

    missing = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda _: "cpu",
        "get_device_properties": lambda _: SimpleNamespace(total_memory=1 << 34),
        "memory_stats": lambda _: {},
        "reset_peak_memory_stats": lambda: None,
    }
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**{**vars(torch.cpu), **missing})


def write_assets(folder):
    """A tokenizer and some text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "text").mkdir()
    draw = random.Random(0)
    rows = [json.dumps({"text": " ".join(draw.choices(WORDS, k=40))}) for _ in range(200)]
    (folder / "text" / "rows.json").write_text("\n".join(rows))


def debug_config(folder):
    """llama3_debugmodel, smaller, with the files of `write_assets`."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.hf_assets_path = str(folder)
    config.dump_folder = str(folder / "outputs")
    config.dataloader.dataset_path = str(folder / "text")
    config.training.local_batch_size = 2
    config.training.seq_len = 64
    config.training.steps = 3
    config.metrics.log_freq = 1
    config.lr_scheduler.warmup_steps = 0
    config.debug.seed = 0
    config.debug.deterministic = True
    if not torch.accelerator.is_available():
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def train(trainer):
    """Run the steps of a Trainer: `train()` needs a torch that can set timeouts."""
    if hasattr(torch.distributed, "set_timeout"):
        trainer.train()
        return
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.should_continue_training():
        trainer.step += 1
        trainer.train_step(batches)


def main():
    os.environ.setdefault("RANK", "0")
    is_first = os.environ["RANK"] == "0"
    for name, value in ONE_RANK.items():
        os.environ.setdefault(name, value)
    settings = {"mode": "all"}  # on a GPU rather a budget: {"budget": "40GiB"}
    if not torch.accelerator.is_available():
        use_cpu()
        settings |= {"store": "mock", "min_bytes": 1, "window": "1KiB"}

    from torchtitan.tools.logging import init_logger

    from ebbtide.integrations.torchtitan import OffloadAC, handles

    init_logger()
    with tempfile.TemporaryDirectory() as folder:
        write_assets(Path(folder))
        config = debug_config(Path(folder))
        config.activation_checkpoint = OffloadAC.Config(**settings)
        trainer = config.build()
        train(trainer)
        for handle in handles(trainer.model_parts) if is_first else []:
            print(handle.report())
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
