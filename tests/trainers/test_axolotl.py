"""Axolotl's own mixin and its own switch, on full fine-tuning and LoRA; `make test-trainers` has it."""

import dataclasses

import peft
import pytest
import torch
from tiny_language import few_steps, language_model, losses_of, rows, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from ebbtide import compat

pytest.importorskip("axolotl", reason="make test-trainers installs it", exc_type=ImportError)


@dataclasses.dataclass
class Arguments(TrainingArguments):
    """With the field that Axolotl's arguments have."""

    activation_offloading: str | bool = False


def train(tmp_path, activation_offloading, has_adapter):
    from axolotl.core.trainers.mixins.activation_checkpointing import ActivationOffloadingMixin

    class AxolotlsTrainer(ActivationOffloadingMixin, Trainer):
        pass

    arguments = Arguments(**few_steps(tmp_path), activation_offloading=activation_offloading)
    words = tokenizer()
    data = rows("text").map(lambda row: words(row["text"]), remove_columns=["text"])
    model = language_model()
    if has_adapter:
        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, adapter)
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    trainer = AxolotlsTrainer(model, arguments, train_dataset=data, data_collator=collate)
    trainer.train()
    return trainer, losses_of(trainer)


@pytest.mark.parametrize("activation_offloading", [True, "legacy"])
@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
def test_its_switch_computes_the_same_and_moves(monkeypatch, tmp_path, activation_offloading, has_adapter):
    monkeypatch.setattr(compat.OffloadActivations, "settings", {"store": "mock"})
    twin, expected = train(tmp_path, False, has_adapter)
    with compat.install("axolotl"):
        trainer, losses = train(tmp_path, activation_offloading, has_adapter)
    context = trainer.activation_offload_context
    assert isinstance(context, compat.OffloadActivations)
    assert context.stats().parcels.count > 0
    assert (context._context._config.prefetch_bytes == 1) == (activation_offloading == "legacy")
    assert len(losses) == 3
    assert losses == expected
    for (name, p), q in zip(trainer.model.named_parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p, q), name
