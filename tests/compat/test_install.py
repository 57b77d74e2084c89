"""Unmodified scripts of trainers with ebbtide's replacements, against the real packages."""

import importlib.util
import subprocess
import sys
import types

import peft
import pytest
import torch
import trl
from tiny_language import LANGUAGES, few_steps, language_model, losses_of, rows, tokenizer

from ebbtide import ConfigError, EbbtideWarning, MissingPackageError, compat
from ebbtide.compat import OffloadActivations


@pytest.fixture(autouse=True)
def moves_on_the_cpu(monkeypatch):
    """Without an accelerator the replacements move nothing by default."""
    monkeypatch.setattr(OffloadActivations, "settings", {"store": "mock"})


@pytest.fixture
def installed():
    with compat.install("trl"):
        yield


def trained(trainer):
    trainer.train()
    return trainer, losses_of(trainer)


def sft(tmp_path, **settings):
    arguments = trl.SFTConfig(**few_steps(tmp_path), max_length=64, **settings)
    return trl.SFTTrainer(language_model(), arguments, train_dataset=rows("text"), processing_class=tokenizer())


def dpo(tmp_path, **settings):
    arguments = trl.DPOConfig(**few_steps(tmp_path), max_length=64, **settings)
    return trl.DPOTrainer(
        language_model(), language_model(), arguments, train_dataset=rows("pairs"), processing_class=tokenizer()
    )


def reward(tmp_path, **settings):
    arguments = trl.RewardConfig(**few_steps(tmp_path), max_length=64, **settings)
    model = language_model(scores=True)
    return trl.RewardTrainer(model, args=arguments, train_dataset=rows("pairs"), processing_class=tokenizer())


def kto(tmp_path, **settings):
    arguments = trl.KTOConfig(**few_steps(tmp_path), max_length=64, **settings)
    return trl.KTOTrainer(
        language_model(), language_model(), arguments, train_dataset=rows("labels"), processing_class=tokenizer()
    )


def adapter(task="CAUSAL_LM"):
    torch.manual_seed(0)
    return peft.LoraConfig(task_type=task, r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def adapted_sft(tmp_path, **settings):
    arguments = trl.SFTConfig(**few_steps(tmp_path), max_length=64, **settings)
    model = peft.get_peft_model(language_model(), adapter())
    return trl.SFTTrainer(model, arguments, train_dataset=rows("text"), processing_class=tokenizer())


def adapted_dpo(tmp_path, **settings):
    """The model without its adapter is the reference."""
    arguments = trl.DPOConfig(**few_steps(tmp_path), max_length=64, **settings)
    given = {"train_dataset": rows("pairs"), "processing_class": tokenizer(), "peft_config": adapter()}
    return trl.DPOTrainer(language_model(), None, arguments, **given)


def adapted_reward(tmp_path, **settings):
    arguments = trl.RewardConfig(**few_steps(tmp_path), max_length=64, **settings)
    given = {"train_dataset": rows("pairs"), "processing_class": tokenizer(), "peft_config": adapter("SEQ_CLS")}
    return trl.RewardTrainer(language_model(scores=True), args=arguments, **given)


def adapted_kto(tmp_path, **settings):
    arguments = trl.KTOConfig(**few_steps(tmp_path), max_length=64, **settings)
    given = {"train_dataset": rows("labels"), "processing_class": tokenizer(), "peft_config": adapter()}
    return trl.KTOTrainer(language_model(), None, arguments, **given)


FULL = [sft, dpo, reward, kto]
ADAPTED = [adapted_sft, adapted_dpo, adapted_reward, adapted_kto]


@pytest.mark.parametrize("make", [*FULL, *ADAPTED])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")
def test_trls_trainers_compute_the_same_and_move(installed, tmp_path, make, checkpoints):
    before = OffloadActivations().stats().parcels.count
    trainer, ours = trained(make(tmp_path, activation_offloading=True, gradient_checkpointing=checkpoints))
    context = trainer.maybe_activation_offload_context
    assert isinstance(context, OffloadActivations)
    assert context.stats().parcels.count > before
    assert context.stats().host_bytes == 0
    twin, plain = trained(make(tmp_path, activation_offloading=False, gradient_checkpointing=checkpoints))
    assert not isinstance(twin.maybe_activation_offload_context, OffloadActivations)
    assert len(ours) == 3
    assert ours == plain
    for (name, p), q in zip(trainer.model.named_parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_install_warns_if_nothing_can_move(monkeypatch, has_accelerator):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    compat.install("trl").remove()  # no warning with a store for the CPU
    monkeypatch.setattr(OffloadActivations, "settings", {})
    if has_accelerator:
        compat.install("trl").remove()
        return
    expected_text = (
        r"install\('trl'\): what trl is to offload stays .* write \{'store': 'disk'\} to ebbtide\.compat\.Offload"
    )
    with pytest.warns(EbbtideWarning, match=expected_text):
        compat.install("trl").remove()


def test_names_are_replaced_wherever_they_were_imported_to_and_put_back():
    import trl.models
    from trl.models import activation_offloading as module

    theirs = module.OffloadActivations, module.get_act_offloading_ctx_manager
    elsewhere = types.ModuleType("a_users_script")
    elsewhere.offload = module.get_act_offloading_ctx_manager
    sys.modules["a_users_script"] = elsewhere
    try:
        with compat.install("trl"):
            assert module.OffloadActivations is OffloadActivations
            assert trl.models.get_act_offloading_ctx_manager is compat.get_act_offloading_ctx_manager
            assert elsewhere.offload is compat.get_act_offloading_ctx_manager
            with compat.install("trl"):  # nothing is left to do
                pass
            assert module.OffloadActivations is OffloadActivations
        assert (module.OffloadActivations, module.get_act_offloading_ctx_manager) == theirs
        assert elsewhere.offload is theirs[1]
        assert trl.models.get_act_offloading_ctx_manager is theirs[1]
    finally:
        del sys.modules["a_users_script"]


def test_replacements_stay_until_the_last_install_is_removed():
    from trl.models import activation_offloading as module

    theirs = module.OffloadActivations
    first, second = compat.install("trl"), compat.install("trl")
    first.remove()
    first.remove()
    assert module.OffloadActivations is OffloadActivations
    second.remove()
    assert module.OffloadActivations is theirs
    with compat.install("trl"):
        assert module.OffloadActivations is OffloadActivations
    assert module.OffloadActivations is theirs


def test_trainers_imported_afterwards_get_the_replacements():
    code = """
import ebbtide.compat
ebbtide.compat.install("trl")
from trl.trainer import sft_trainer
from trl.models import get_act_offloading_ctx_manager
from trl.models.activation_offloading import NoOpManager
assert sft_trainer.get_act_offloading_ctx_manager is ebbtide.compat.get_act_offloading_ctx_manager
assert get_act_offloading_ctx_manager is ebbtide.compat.get_act_offloading_ctx_manager
assert NoOpManager is ebbtide.compat.NoOpManager
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.parametrize("trainer", ["lightning", "TRL", ""])
def test_an_unknown_trainer_is_an_error(trainer):
    with pytest.raises(ConfigError, match="expected one of 'trl', 'torchtune', 'axolotl'"):
        compat.install(trainer)


@pytest.mark.skipif(importlib.util.find_spec("torchtune") is not None, reason="it is there")
def test_a_trainer_that_is_not_there_is_an_error_with_the_line_to_write():
    with pytest.raises(MissingPackageError, match="pip install torchtune"):
        compat.install("torchtune")


def test_a_version_without_the_names_is_an_error(monkeypatch):
    from trl.models import activation_offloading as module

    monkeypatch.delattr(module, "NoOpManager")
    with pytest.raises(ConfigError, match=rf"trl {trl.__version__} has no NoOpManager in trl.models"):
        compat.install("trl")
    assert module.OffloadActivations is not OffloadActivations


def test_languages_differ():
    """Equal rows would hide a trainer that mixes rows up."""
    assert len(set(LANGUAGES)) == len(LANGUAGES) > 8
