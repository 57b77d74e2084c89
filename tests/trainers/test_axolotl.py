"""Axolotl's mixin, switch and command, on full fine-tuning and LoRA; in `make test-trainers`."""

import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import signal
import sys
from pathlib import Path

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_language import few_steps, language_model, losses_of, rows, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

import ebbtide
from ebbtide import ConfigError, EbbtideWarning, ForeignAttributeError, compat
from ebbtide._engine.stats import Count
from ebbtide._stores import DiskStore, MockStore
from ebbtide.compat import _axolotl as axolotl

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "AXOLOTL_TEE_STDOUT": "0", "HF_HUB_OFFLINE": "1"}
pytest.importorskip("axolotl", reason="make test-trainers installs it", exc_type=ImportError)
from ebbtide.integrations.axolotl import _EbbtideSettings
from ebbtide.integrations.transformers import OffloadCallback

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


@pytest.fixture(autouse=True)
def _memory(monkeypatch):
    """Without an accelerator the contexts need a store: a store per test, because contexts with equal settings share
    what was learned. The window is small in comparison, as on a large model."""
    monkeypatch.setattr(compat.OffloadActivations, "settings", {"store": lambda device: MockStore(device, None)})
    monkeypatch.setattr("ebbtide.compat._context._WINDOW_BYTES", 1024)


@dataclasses.dataclass
class Arguments(TrainingArguments):
    """With the field of Axolotl's arguments."""

    activation_offloading: str | bool = False


def train(tmp_path, activation_offloading, has_adapter, context=None, **settings):
    """`context`: entered around each step by the script."""
    from axolotl.core.trainers.mixins.activation_checkpointing import ActivationOffloadingMixin

    class AxolotlsTrainer(ActivationOffloadingMixin, Trainer):
        def training_step(self, *args, **kwargs):
            with contextlib.nullcontext() if context is None else context:
                return super().training_step(*args, **kwargs)

    arguments = Arguments(**few_steps(tmp_path), activation_offloading=activation_offloading, **settings)
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


def assert_same(trained, twin):
    (trainer, losses), (other, expected) = trained, twin
    assert len(losses) == 3
    assert losses == expected
    for (name, p), q in zip(trainer.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def stats():
    """Stats of all contexts with the settings of a test."""
    return compat.OffloadActivations().stats()


@pytest.mark.parametrize("activation_offloading", [True, "legacy"])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_its_switch_computes_the_same_and_moves(tmp_path, activation_offloading, has_adapter):
    twin = train(tmp_path, False, has_adapter)
    with compat.install("axolotl"):
        trained = train(tmp_path, activation_offloading, has_adapter)
    context = trained[0].activation_offload_context
    assert isinstance(context, compat.OffloadActivations)
    assert context.stats().parcels.count > 0
    assert (context._context._config.prefetch_bytes == 1) == (activation_offloading == "legacy")
    assert_same(trained, twin)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_disk_is_a_disk(monkeypatch, tmp_path, has_adapter):
    folders = []

    class Spied(DiskStore):
        def __init__(self, device, folder):
            folders.append(folder)
            super().__init__(device, folder)

    monkeypatch.setattr("ebbtide._stores.DiskStore", Spied)
    monkeypatch.setitem(axolotl._OnDisk.settings, "store", f"disk:{tmp_path}")
    twin = train(tmp_path, False, has_adapter)
    with compat.install("axolotl"):
        trained = train(tmp_path, "disk", has_adapter)
    assert folders == [tmp_path]
    assert trained[0].activation_offload_context.stats().out.nbytes > 0
    assert stats().parcels.count == 0  # no other store was used
    assert_same(trained, twin)


HIDDEN_STATES = 2 * 6 * 32 * 4  # bytes: rows, tokens, width


def hidden_states(has_adapter):
    """Inputs of two layers in three steps. With an adapter the input of the first layer is a leaf that needs a
    gradient, like a parameter, and stays."""
    count = 3 if has_adapter else 6
    return Count(count, count * HIDDEN_STATES)


def checkpoints(use_reentrant):
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_hidden_states_are_all_that_moves(tmp_path, use_reentrant, has_adapter):
    twin = train(tmp_path, False, has_adapter, **checkpoints(use_reentrant))
    with compat.install("axolotl"):
        trained = train(tmp_path, "hidden_states", has_adapter, **checkpoints(use_reentrant))
    assert stats().parcels == hidden_states(has_adapter)
    assert stats().out.nbytes > 0
    assert_same(trained, twin)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_hidden_states_of_reentrant_checkpoints_as_its_loader_asks_for_them(tmp_path, has_adapter):
    from axolotl.monkeypatch import activation_offload_checkpoint as home

    twin = train(tmp_path, False, has_adapter, **checkpoints(True))
    torchs = torch.utils.checkpoint.CheckpointFunction
    with compat.install("axolotl"):
        home.patch_hidden_states_offload()
        trained = train(tmp_path, False, has_adapter, **checkpoints(True))
    assert torch.utils.checkpoint.CheckpointFunction is torchs
    assert stats().parcels == hidden_states(has_adapter)
    assert stats().out.nbytes > 0
    assert_same(trained, twin)


@pytest.mark.parametrize(
    "name", ["CheckpointHiddenStatesOffload", "get_checkpoint_hidden_states_offloading_ctx_manager"]
)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_hidden_states_of_a_script_that_enters_the_context_itself(tmp_path, name, has_adapter):
    twin = train(tmp_path, False, has_adapter, **checkpoints(False))
    with compat.install("axolotl"):
        module = importlib.import_module("axolotl.monkeypatch.checkpoint_activation_offload")
        context = getattr(module, name)()
        trained = train(tmp_path, False, has_adapter, context, **checkpoints(False))
    assert isinstance(context, axolotl.CheckpointHiddenStatesOffload)
    assert context.use_streams
    with pytest.raises(ForeignAttributeError, match="every tensor that a checkpointed layer is given"):
        context.mark(torch.ones(3))
    assert context.stats().parcels == hidden_states(has_adapter)
    assert context.stats().out.nbytes > 0
    assert_same(trained, twin)
    assert not any(axolotl._is_offloaded(module) for module in trained[0].model.modules() if is_checkpointed(module))


def is_checkpointed(module):
    return "_gradient_checkpointing_func" in vars(module)


def test_a_context_of_a_script_without_checkpoints_warns(tmp_path):
    with compat.install("axolotl"):
        module = importlib.import_module("axolotl.monkeypatch.checkpoint_activation_offload")
        context = module.CheckpointHiddenStatesOffload()
        with pytest.warns(EbbtideWarning, match="moved nothing"):
            train(tmp_path, False, False, context)


def test_a_pool_of_buffers_warns():
    with pytest.warns(EbbtideWarning, match="max_cpu_buffer_pool_size=3 is not followed.*host_limit"):
        axolotl.CheckpointHiddenStatesOffload(max_cpu_buffer_pool_size=3)


def test_hidden_states_of_a_script_that_replaces_the_checkpoint_itself(monkeypatch, tmp_path):
    twin = train(tmp_path, False, False, **checkpoints(True))
    with compat.install("axolotl"):
        from axolotl.monkeypatch.activation_offload_checkpoint import HiddenStatesOffloadCheckpoint

        monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", HiddenStatesOffloadCheckpoint)
        trained = train(tmp_path, False, False, **checkpoints(True))
    assert stats().parcels == hidden_states(False)
    assert stats().out.nbytes > 0
    assert_same(trained, twin)


def test_the_engine_of_selective_checkpoints_warns_of_being_axolotls():
    from axolotl.monkeypatch import selective_checkpointing_offload as home

    theirs = home.SacOffloadEngine
    with compat.install("axolotl"), compat.install("axolotl"):
        with pytest.warns(EbbtideWarning, match=r"does not replace SacOffloadEngine.*offload: false") as caught:
            engine = home.SacOffloadEngine(min_offload_bytes=7)
        assert len(caught) == 1
        with pytest.warns(EbbtideWarning, match="does not replace SacOffloadEngine"):
            home.build_sac_offload_context_fn(["attention"])
    assert isinstance(engine, theirs)
    assert engine.min_offload_bytes == 7
    assert home.SacOffloadEngine is theirs


def names_of_axolotl():
    """Names and values in Axolotl's and TRL's modules."""
    for home in compat._install._TARGETS["axolotl"]:
        importlib.import_module(home.module)
    modules = {name: module for name, module in sys.modules.items() if name.startswith(("axolotl.", "trl."))}
    return {(name, key): id(value) for name, module in modules.items() for key, value in vars(module).items()}


def test_all_names_are_put_back():
    before = names_of_axolotl()
    with compat.install("axolotl"):
        assert names_of_axolotl() != before
    assert names_of_axolotl() == before


def test_hidden_states_without_checkpoints_are_an_error(tmp_path):
    with compat.install("axolotl"), pytest.raises(ConfigError, match="write gradient_checkpointing: true"):
        train(tmp_path, "hidden_states", False)


def test_an_unknown_mode_is_an_error(tmp_path):
    with compat.install("axolotl"), pytest.raises(ConfigError, match="expected true, legacy, disk, hidden_states"):
        train(tmp_path, "tape", False)


@pytest.fixture
def plugins():
    """Axolotl's manager, with only the plugins in the config of a test."""
    from axolotl.integrations.base import PluginManager

    manager = PluginManager.get_instance()
    manager.plugins.clear()
    yield manager
    manager.plugins.clear()


def config(**keys):
    """Axolotl's config of the example with `keys`: plugins loaded, then validated."""
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "axolotl.yml").read_text())
    given = DictDefault({**example, **keys})
    prepare_plugins(given)
    return validate_config(given)


def trained_with(plugins, tmp_path, cfg):
    """Axolotl's trainer between the hooks of the plugin, called as by Axolotl's own train()."""
    from axolotl.core.trainers import AxolotlTrainer
    from axolotl.core.training_args_base import AxolotlTrainingMixins

    @dataclasses.dataclass
    class AxolotlsArguments(AxolotlTrainingMixins, TrainingArguments):
        pass

    plugins.pre_model_load(cfg)
    words = tokenizer()
    data = rows("text").map(lambda row: words(row["text"]), remove_columns=["text"])
    arguments = AxolotlsArguments(**few_steps(tmp_path), activation_offloading=cfg.activation_offloading)
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    trainer = AxolotlTrainer(
        model=language_model(), args=arguments, train_dataset=data, data_collator=collate, processing_class=words
    )
    plugins.post_trainer_create(cfg, trainer)
    trainer.train()
    plugins.post_train(cfg, trainer.model)
    return trainer, losses_of(trainer)


def test_the_plugin_computes_the_same_and_its_metrics_join_the_logs(plugins, tmp_path):
    cfg = config(ebbtide={"mode": "all", "store": "mock", "min_bytes": 1, "window": "1KiB"})
    trained = trained_with(plugins, tmp_path, cfg)
    moved = [entry["ebbtide/moved_gib"] for entry in trained[0].state.log_history if "loss" in entry]
    assert len(moved) == 3
    assert all(moved)
    assert isinstance(trained[0].callback_handler.callbacks[0], OffloadCallback)
    (plugin,) = plugins.plugins.values()
    assert plugin.result.stats().out.nbytes > 0
    assert "moved out" in str(plugin.result)
    assert_same(trained, train(tmp_path, False, False))


def test_the_plugin_follows_the_switch(plugins, tmp_path):
    from axolotl.core.trainers.mixins.activation_checkpointing import ActivationOffloadingMixin

    theirs = ActivationOffloadingMixin.__init__
    cfg = config(ebbtide=None, activation_offloading=True, gradient_checkpointing=True)
    trained = trained_with(plugins, tmp_path, cfg)
    assert ActivationOffloadingMixin.__init__ is theirs
    assert stats().out.nbytes > 0
    assert_same(trained, train(tmp_path, False, False))


def test_the_block_has_the_keywords_of_offload():
    assert _EbbtideSettings.model_fields.keys() < inspect.signature(ebbtide.offload).parameters.keys()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"activation_offloading": "disk", "gradient_checkpointing": True}, "move the same"),
        ({"gradient_checkpointing": "offload"}, "move the same"),
        ({"gradient_checkpointing": True}, "a budget decides what is recomputed"),
        ({"ebbtide": {"bugdet": "40GiB"}}, "bugdet"),
        ({"ebbtide": None, "activation_offloading": True}, "requires gradient_checkpointing"),
        ({"ebbtide": None, "activation_offloading": "tape", "gradient_checkpointing": True}, "tape"),
    ],
)
def test_wrong_keys_are_refused_by_the_validation(plugins, keys, message):
    with pytest.raises(ValueError, match=message):
        config(**keys)


def test_signatures_equal_those_of_the_originals():
    from axolotl.core.trainers.mixins import activation_checkpointing as theirs

    def parameters(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    ours = compat.get_lora_act_offloading_ctx_manager
    assert parameters(ours) == parameters(theirs.get_lora_act_offloading_ctx_manager)
    home = importlib.import_module("axolotl.monkeypatch.checkpoint_activation_offload")
    assert parameters(axolotl.CheckpointHiddenStatesOffload) == parameters(home.CheckpointHiddenStatesOffload)
    get = home.get_checkpoint_hidden_states_offloading_ctx_manager
    assert parameters(axolotl.checkpoint_hidden_states_offload) == parameters(get)


ALL_MOVES = {"mode": "all", "store": "mock", "min_bytes": 1, "window": "1KiB"}
ADAPTER = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj"]}
ADAPTER |= {
    f"lora_{of}_kernel": False for of in ("qkv", "o", "mlp")
}  # Axolotl puts the arguments into a class, for good


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the files of a config. Datasets are prepared once, in a separate process."""
    folder = tmp_path_factory.mktemp("axolotl")
    language_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows("text")))
    yield folder
    from axolotl.utils.tee import close_debug_log

    close_debug_log()


@pytest.fixture
def interrupts():
    """Axolotl saves the model at an interrupt: pytest's handler is restored."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def config_file(home, has_adapter, **keys):
    """The example, with the files in `home`."""
    example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "axolotl.yml").read_text())
    here = {
        "base_model": str(home / "model"),
        "datasets": [{"path": str(home / "rows.jsonl"), "ds_type": "json", "type": "completion", "field": "text"}],
        "dataset_prepared_path": str(home / "prepared"),
        "dataset_num_proc": 1,
        "output_dir": str(home / "outputs"),
        "sequence_len": 16,
        "micro_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "fp16": False,
        "attn_implementation": "sdpa",
    }
    adapter = ADAPTER if has_adapter else {}
    file = home / "config.yml"
    file.write_text(yaml.safe_dump({**example, **here, **adapter, **keys}))
    return str(file)


def axolotl_train(file):
    """The calls of Axolotl's own command."""
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    cfg = load_cfg(file)
    _, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    return trainer, losses_of(trainer)


@pytest.fixture(scope="module")
def twins(home):
    """Without ebbtide, trained once per setting."""
    handler = signal.getsignal(signal.SIGINT)
    trained = [axolotl_train(config_file(home, has, plugins=[], ebbtide=None)) for has in (False, True)]
    signal.signal(signal.SIGINT, handler)
    return trained


@pytest.mark.usefixtures("plugins", "interrupts")
@pytest.mark.parametrize("activation_offloading", [True, "disk", "hidden_states"])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_its_command_with_its_switch(monkeypatch, tmp_path, home, twins, activation_offloading, has_adapter):
    monkeypatch.setitem(axolotl._OnDisk.settings, "store", f"disk:{tmp_path}")
    keys = {"activation_offloading": activation_offloading, "gradient_checkpointing": True}
    with compat.install("axolotl"):
        trained = axolotl_train(config_file(home, has_adapter, plugins=[], ebbtide=None, **keys))
    context = trained[0].activation_offload_context
    assert context.stats().out.nbytes > 0
    assert (activation_offloading == "disk") == (stats().parcels.count == 0)
    assert_same(trained, twins[has_adapter])


@pytest.mark.usefixtures("plugins", "interrupts")
@pytest.mark.parametrize("has_adapter", [False, True])
def test_its_command_with_the_plugin(home, twins, has_adapter):
    trained = axolotl_train(config_file(home, has_adapter, ebbtide=ALL_MOVES))
    moved = [entry["ebbtide/moved_gib"] for entry in trained[0].state.log_history if "loss" in entry]
    assert len(moved) == 3
    assert all(moved)
    assert_same(trained, twins[has_adapter])


@pytest.mark.usefixtures("plugins", "interrupts")
def test_the_command_line_saves_the_same_model(monkeypatch, tmp_path, home, twins):
    from axolotl.cli.train import do_cli

    monkeypatch.setattr("sys.argv", ["axolotl"])
    do_cli(config_file(home, False, ebbtide=ALL_MOVES, output_dir=str(tmp_path)))
    saved = load_file(tmp_path / "model.safetensors")
    expected = twins[0][0].model.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
