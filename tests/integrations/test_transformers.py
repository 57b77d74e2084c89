"""transformers' own Trainer with the callback, the mixin and the arguments; TRL's trainers without a switch."""

import gc
import inspect
import json
import pickle
import re
import weakref
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
from accelerate.state import AcceleratorState
from tiny_language import few_steps, language_model, losses_of, rows, tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ebbtide
from ebbtide import ConfigError, EbbtideWarning, ModuleError, Plan, PlanError, compat
from ebbtide._engine.stats import TOTALS
from ebbtide._offload import handle_of
from ebbtide._plans import Recipe, RegionPlan
from ebbtide._reports.run import Run
from ebbtide.integrations.transformers import ActivationOffloadingMixin, OffloadArguments, OffloadCallback

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

MOVES = {"store": "mock", "min_bytes": 1}
ALL = {**MOVES, "mode": "all", "window": "1KiB"}  # a small window in comparison, as on a large model


def arguments(tmp_path, **settings):
    return TrainingArguments(**{**few_steps(tmp_path), "max_steps": 6, "logging_steps": 2, **settings})


def trained(tmp_path, *callbacks, make=Trainer, offload=None, **settings):
    words = tokenizer()
    data = rows("text").map(lambda row: words(row["text"]), remove_columns=["text"])
    extra = {} if offload is None else {"offload": offload}
    trainer = make(
        language_model(),
        arguments(tmp_path, **settings),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
        callbacks=list(callbacks),
        **extra,
    )
    trainer.train()
    return trainer


def same(one, other):
    pairs = zip(one.model.named_parameters(), other.model.parameters(), strict=True)
    return losses_of(one) == losses_of(other) and all(torch.equal(p, q) for (_, p), q in pairs)


class OffloadingTrainer(ActivationOffloadingMixin, Trainer):
    pass


@pytest.mark.parametrize(
    "settings",
    [{"mode": "all", "window": "1KiB"}, {"recipe": "selective"}, {"budget": "16GiB"}, {}],
    ids=["everything", "recipe", "budget", "auto"],
)
@pytest.mark.parametrize(
    "training",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 2},
        {"max_grad_norm": 0.1, "optim": "sgd"},
    ],
    ids=["plain", "accumulated", "evaluated", "clipped"],
)
def test_a_training_computes_the_same(tmp_path, settings, training):
    callback = OffloadCallback(**MOVES, **settings)
    ours = trained(tmp_path, callback, **training)
    assert same(ours, trained(tmp_path, **training))
    assert callback.handle is None
    assert not any(module._forward_pre_hooks for module in ours.model.modules())


def test_metrics_join_the_logs(tmp_path):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    ours = trained(tmp_path, OffloadCallback(**ALL), Reporter())
    entries = [entry for entry in ours.state.log_history if "loss" in entry]
    for entry in [*entries, *(logs for logs in seen if "loss" in logs)]:
        assert entry["ebbtide/moved_gib"] > 0
        assert entry["ebbtide/stall_ms"] >= 0
        assert entry["ebbtide/host_gib"] == 0  # between steps no parcel is on its way
    assert "train_runtime" in ours.state.log_history[-1]
    assert ours.state.log_history[-1]["ebbtide/moved_gib"] == 0  # since the previous log


def test_the_mixins_metrics_reach_reporters_that_come_first(tmp_path):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    ours = trained(tmp_path, Reporter(), make=OffloadingTrainer, offload=ALL)
    assert [logs["ebbtide/moved_gib"] > 0 for logs in seen if "loss" in logs] == [True] * 3
    assert same(ours, trained(tmp_path))
    assert same(trained(tmp_path, make=OffloadingTrainer), ours)


def test_arguments_come_from_a_parser(tmp_path):
    line = ["--output_dir", str(tmp_path), "--offload_budget", "0.8", "--offload_store", "mock"]
    _, given = HfArgumentParser((TrainingArguments, OffloadArguments)).parse_args_into_dataclasses(line)
    assert given.settings() == {"budget": 0.8, "store": "mock"}
    assert OffloadArguments(offload_budget="40GiB").settings() == {"budget": "40GiB"}
    assert OffloadArguments(offload_budget="42949672960").settings() == {"budget": "42949672960"}
    with pytest.raises(ConfigError, match="For bytes write text like '40GiB'"):
        ebbtide.offload(language_model(), **OffloadArguments(offload_budget="40").settings())
    assert OffloadArguments().settings() == {}
    ours = trained(
        tmp_path, make=OffloadingTrainer, offload=OffloadArguments(offload_recipe="recompute", offload_store="mock")
    )
    assert same(ours, trained(tmp_path))


def test_arguments_reach_offload_unchanged(tmp_path):
    given = {
        "mode": "all",
        "include": ["layers.*.mlp", "norm"],
        "exclude": ["lm_head"],
        "keep_last": 1,
        "regions": ["layers.0"],
        "on_oom": "replan",
        "window": "1KiB",
        "prefetch": "2KiB",
        "min_bytes": "1",
    }
    line = ["--output_dir", str(tmp_path)]
    for name, value in given.items():
        line += [f"--offload_{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    _, parsed = HfArgumentParser((TrainingArguments, OffloadArguments)).parse_args_into_dataclasses(line)
    assert parsed.settings() == given
    settable = inspect.signature(ebbtide.offload).parameters.keys() - {
        "module",
        "process_group",
    }  # a process group has no text
    assert {each.name for each in fields(OffloadArguments)} == {f"offload_{name}" for name in settable}


def test_a_plan_is_read_from_its_file(tmp_path):
    file = tmp_path / "plan.json"
    plan = Plan({"model.layers.0": RegionPlan(Recipe("recompute"))})
    plan.save(file)
    assert OffloadArguments(offload_plan=str(file)).settings() == {"plan": plan}
    with pytest.raises(PlanError):
        OffloadArguments(offload_plan=str(tmp_path / "nothing.json")).settings()


@pytest.fixture
def compiles():
    """Arguments of a training with accelerate's compiler."""
    yield {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [Trainer, OffloadingTrainer])
def test_a_copy_that_accelerate_compiles_is_refused(tmp_path, monkeypatch, compiles, make):
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "True")
    callbacks, about = ([OffloadCallback(**ALL)], {}) if make is Trainer else ([], {"offload": ALL})
    with pytest.raises(ConfigError, match=r"leave torch_compile=True .* block.compile\(\)"):
        trained(tmp_path, *callbacks, make=make, **about, **compiles)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")  # as accelerate launch does
    with pytest.raises(ConfigError, match="accelerate's dynamo backend out"):
        trained(tmp_path, *callbacks, make=make, **about)


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_model_that_accelerate_compiles_is_planned_as_a_whole(tmp_path, monkeypatch, compiles, is_launched):
    if is_launched:  # by accelerate launch, without the arguments
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
        compiles = {}
    steps = {"max_steps": 16}
    callback = OffloadCallback(store="mock", min_bytes=1, budget="64GiB")
    ours = trained(tmp_path, callback, **compiles, **steps)
    assert list(callback.result.plan.regions) == ["(the model)"]
    assert callback.result.plan.predicted is not None
    torch._dynamo.reset()
    assert same(ours, trained(tmp_path, **compiles, **steps))


def test_a_model_that_accelerate_compiles_moves(tmp_path, compiles):
    with pytest.warns(EbbtideWarning, match="graphs larger than its blocks"):
        ours = trained(tmp_path, OffloadCallback(**ALL), **compiles)
    torch._dynamo.reset()
    assert same(ours, trained(tmp_path, **compiles))
    assert all(entry["ebbtide/moved_gib"] > 0 for entry in ours.state.log_history if "loss" in entry)


def test_a_compiled_model_that_is_not_offloaded_is_not_refused(tmp_path, compiles):
    ours = trained(tmp_path, OffloadCallback(mode="off"), **compiles)
    assert len(losses_of(ours)) == 3


class BlocksCompiled(Trainer):
    def __init__(self, model, *args, **kwargs):
        for block in model.model.layers:
            block.compile(backend="aot_eager")
        super().__init__(model, *args, **kwargs)


def test_blocks_compiled_beforehand_move(tmp_path, compiles):
    ours = trained(tmp_path, OffloadCallback(**ALL), make=BlocksCompiled)
    assert same(ours, trained(tmp_path, make=BlocksCompiled))
    assert all(entry["ebbtide/moved_gib"] > 0 for entry in ours.state.log_history if "loss" in entry)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpoints_that_offload_are_refused_or_taken_over(tmp_path, name):
    offloading = {name: True, f"{name}_kwargs": {"use_reentrant": False, "offload": True}}
    with pytest.raises(ConfigError, match="move the same: leave one of them out, or write takes_over=True"):
        trained(tmp_path, OffloadCallback(**ALL), **offloading)
    callback = OffloadCallback(**ALL, takes_over=True)
    figures = []

    class Reporter(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            figures.append(callback.handle.stats().parcels.count)

    ours = trained(tmp_path, callback, Reporter(), **offloading)
    assert figures[-1] > 0
    assert same(ours, trained(tmp_path, **{name: True}))


def test_a_budget_and_checkpoints_of_the_models_own_are_refused(tmp_path):
    class Checkpointed(Trainer):
        def __init__(self, model, *args, **kwargs):
            model.activation_checkpointing_enable()
            super().__init__(model, *args, **kwargs)

    with pytest.raises(ConfigError, match="the blocks of LlamaForCausalLM are checkpointed"):
        trained(tmp_path, OffloadCallback(**MOVES, budget="8GiB"), make=Checkpointed)
    trained(tmp_path, OffloadCallback(**MOVES, budget=None, mode="all"), make=Checkpointed)


def test_deepspeeds_offload_and_the_callback_are_refused(tmp_path):
    """The plugin as made by TrainingArguments from `deepspeed=`, with the configuration as read."""
    given = TrainingArguments(**few_steps(tmp_path))
    model, callback = language_model(), OffloadCallback(**MOVES)
    given.deepspeed_plugin = SimpleNamespace(deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True}})
    with pytest.raises(ConfigError, match=r'"cpu_checkpointing": true .* and OffloadCallback move the same'):
        callback.on_train_begin(given, None, None, model=model)
    assert callback.handle is None
    for config in ({}, {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False}}):
        given.deepspeed_plugin = SimpleNamespace(deepspeed_config=config)
        callback.on_train_begin(given, None, None, model=model)
        callback.on_train_end(given, None, None)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_a_budget_and_checkpoints_are_refused(tmp_path, name):
    expected_text = (
        r"decides what is recomputed.*write gradient_checkpointing=False in TrainingArguments.*takes_over=True"
    )
    with pytest.raises(ConfigError, match=expected_text):
        trained(tmp_path, OffloadCallback(**MOVES, budget="8GiB"), **{name: True})


class Watched(TrainerCallback):
    """Whether any block is checkpointed at the end of each step, and the plan."""

    def __init__(self, callback):
        self.callback, self.checkpointed, self.plans = callback, [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.checkpointed.append(any(getattr(each, "gradient_checkpointing", False) for each in model.modules()))
        self.plans.append(self.callback.handle.plan)


@pytest.mark.parametrize(
    "checkpoints",
    [
        {"activation_checkpointing": True},
        {"gradient_checkpointing": True},
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"offload": True},
        },
    ],
    ids=["new name", "old name", "that offload"],
)
def test_a_budget_takes_checkpoints_over(tmp_path, checkpoints):
    callback = OffloadCallback(**MOVES, budget="8GiB", takes_over=True)
    watched = Watched(callback)
    ours = trained(tmp_path, callback, watched, **checkpoints)
    assert watched.checkpointed == [False] * 6
    assert watched.plans[2].recipe_of("model.layers.0").action == "recompute"
    assert watched.plans[5].predicted is not None
    assert same(ours, trained(tmp_path, activation_checkpointing=True))


def test_a_budget_takes_over_checkpointing_by_hand(tmp_path):
    class Checkpointed(Trainer):
        def __init__(self, model, *args, **kwargs):
            model.activation_checkpointing_enable()
            super().__init__(model, *args, **kwargs)

    callback = OffloadCallback(**MOVES, budget="8GiB", takes_over=True)
    watched = Watched(callback)
    assert same(trained(tmp_path, callback, watched, make=Checkpointed), trained(tmp_path))
    assert watched.checkpointed == [False] * 6


def test_without_a_budget_checkpoints_stay_on(tmp_path):
    callback = OffloadCallback(**ALL, takes_over=True)
    watched = Watched(callback)
    trained(tmp_path, callback, watched, activation_checkpointing=True)
    assert watched.checkpointed == [True] * 6


def default_script(tmp_path, make, *callbacks):
    """Defaults of TRL and transformers, but for the length."""
    config, extra = (trl.SFTConfig, {"processing_class": tokenizer()}) if make is trl.SFTTrainer else (None, {})
    given = {**few_steps(tmp_path), "max_steps": 5}
    words = tokenizer()
    data = rows("text")
    if config is None:
        data = data.map(lambda row: words(row["text"]), remove_columns=["text"])
        extra = {"data_collator": DataCollatorForLanguageModeling(words, mlm=False)}
    args = (config or TrainingArguments)(**given)
    trainer = make(language_model(), args, train_dataset=data, callbacks=list(callbacks), **extra)
    trainer.train()
    return trainer


@pytest.mark.parametrize("page", ["README.md", "docs/start.md", "docs/trainers/transformers.md"])
def test_the_first_lines_of_the_documentation_use_their_budget_in_a_default_script(tmp_path, page):
    text = (Path(__file__).parents[2] / page).read_text()
    lines = re.findall(
        r"^callback = (.*)\ntrainer = (\w+)\(model, args=args, train_dataset=dataset, callbacks=\[callback\]\)$",
        text,
        re.MULTILINE,
    )
    assert "SFTTrainer" in [name for _, name in lines]
    assert len(lines) == text.count("trainer = ")
    for line, name in lines:
        make = {"SFTTrainer": trl.SFTTrainer, "Trainer": Trainer}[name]
        callback = eval(line, {"OffloadCallback": OffloadCallback})
        watched = Watched(callback)
        ours = default_script(tmp_path, make, callback, watched)
        assert str(watched.plans[-1]).startswith("plan within 40GiB: step ")
        assert not any(watched.checkpointed)
        assert same(ours, default_script(tmp_path, make))


def test_a_callback_that_moves_nothing_under_checkpoints_warns(tmp_path):
    with pytest.warns(ebbtide.EbbtideWarning, match="moved nothing in its first planned forward .* smaller than min_b"):
        default_script(tmp_path, trl.SFTTrainer, OffloadCallback(store="mock"))


def test_trls_switch_and_the_callback_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compat.OffloadActivations, "settings", {"store": "mock"})
    given = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], activation_offloading=True, max_steps=1)
    callback = OffloadCallback(**MOVES)
    with compat.install("trl"):  # transformers' own class needs an accelerator
        trainer = trl.SFTTrainer(
            language_model(), given, train_dataset=rows("text"), processing_class=tokenizer(), callbacks=[callback]
        )
    with pytest.raises(ConfigError, match="activation_offloading= and OffloadCallback move the same"):
        trainer.train()


class Seen(TrainerCallback):
    """A stand-in for reporters, which come before the callbacks of the user."""

    def __init__(self, callback):
        self.callback = callback
        self.logs = []
        self.packed = 0
        self.begun = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))

    def on_step_end(self, args, state, control, **kwargs):
        self.packed = self.callback.result.stats().parcels.count


STATES = {"ebbtide/budget_gib", "ebbtide/predicted_peak_gib", "ebbtide/predicted_step_ms"}


@pytest.mark.parametrize("settings", [ALL, {**MOVES, "budget": "16GiB"}], ids=["everything", "budget"])
def test_reporters_that_come_first_see_the_metrics(tmp_path, settings):
    callback = OffloadCallback(**settings)
    before, behind = Seen(callback), Seen(callback)
    ours = trained(tmp_path, before, callback, behind)
    assert same(ours, trained(tmp_path))
    assert (before.begun, behind.begun) == (1, 1)
    metrics = {name for name in before.logs[0] if name.startswith("ebbtide/")}
    assert metrics >= TOTALS | {"ebbtide/host_gib"}
    assert all(metrics <= entry.keys() for entry in [*before.logs, *ours.state.log_history])
    assert behind.logs == before.logs
    last = ours.state.log_history[-1]
    assert (last.keys() >= STATES) == ("budget" in settings)
    assert last.get("ebbtide/budget_gib", 16) == 16
    json.dumps(ours.state.log_history)


@pytest.mark.parametrize("make", [Trainer, OffloadingTrainer])
def test_logs_add_up_to_the_metrics_of_the_whole_training(tmp_path, make):
    given = {"offload": ALL} if make is OffloadingTrainer else {}
    callbacks = [] if given else [OffloadCallback(**ALL)]
    ours = trained(tmp_path, *callbacks, make=make, **given)
    callback = ours.offload_callback if given else callbacks[0]
    whole = callback.result.stats().metrics()
    assert whole["ebbtide/moved_gib"] > 0
    for name in ("moved_gib", "kept_gib", "recomputed_gib", "misses"):
        added = sum(entry[f"ebbtide/{name}"] for entry in ours.state.log_history)
        assert added == whole[f"ebbtide/{name}"]


@pytest.mark.parametrize("settings", [{**MOVES, "budget": "16GiB"}, ALL], ids=["budget", "everything"])
def test_the_result_lives_on(tmp_path, settings):
    callback = OffloadCallback(**settings)
    assert callback.result is None
    seen = Seen(callback)
    ours = trained(tmp_path, callback, seen)
    assert seen.packed > 0  # of the running training
    result = callback.result
    assert result.stats().parcels.count >= seen.packed
    assert result.report() in str(result)
    assert "moved out" in result.report()
    assert str(result.plan) in str(result)
    assert (result.plan.predicted is not None) == (result.profile is not None) == ("budget" in settings)
    assert json.loads(json.dumps(result.stats().to_dict()))["parcels"]["count"] == result.stats().parcels.count
    assert pickle.loads(pickle.dumps(result)) == result
    result.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json").plan == result.plan
    model = weakref.ref(ours.model)
    del ours
    gc.collect()
    assert model() is None


def test_the_result_of_a_training_that_failed(tmp_path):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("the first step")

    callback = OffloadCallback(**ALL)
    with pytest.raises(RuntimeError, match="the first step"):
        trained(tmp_path, callback, Failing())
    assert callback.result.stats().parcels.count > 0
    callback.handle.remove()


def test_a_training_that_failed_leaves_the_model_to_the_next(tmp_path):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("the second step")

    callback = OffloadCallback(**ALL)
    words = tokenizer()
    data = rows("text").map(lambda row: words(row["text"]), remove_columns=["text"])
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    trainer = Trainer(
        language_model(),
        arguments(tmp_path),
        train_dataset=data,
        data_collator=collate,
        callbacks=[callback, Failing()],
    )
    with pytest.raises(RuntimeError, match="the second step"):
        trainer.train()
    trainer.remove_callback(Failing)
    trainer.train()
    assert callback.handle is None


def test_a_handle_that_a_failed_training_left_can_be_removed(tmp_path):
    model = language_model()
    given = arguments(tmp_path)
    OffloadCallback(**ALL).on_train_begin(given, None, None, model=model)  # without on_train_end
    after = OffloadCallback(**ALL)
    with pytest.raises(ModuleError, match="already applied"):
        after.on_train_begin(given, None, None, model=model)
    handle_of(model).remove()
    after.on_train_begin(given, None, None, model=model)
    assert after.handle is handle_of(model)


def rewarded(kind, tmp_path, *callbacks, checkpoints=False):
    """Trainers that generate completions, without a switch for offloading."""
    config, make = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[kind]
    given = config(
        **few_steps(tmp_path),
        num_generations=2,
        max_completion_length=8,
        gradient_checkpointing=checkpoints,
        beta=0.0,  # no model to compare with
    )
    trainer = make(
        language_model(),
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=given,
        train_dataset=rows("pairs").select_columns(["prompt"]),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )
    torch.manual_seed(0)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_trainers_without_a_switch_compute_the_same(tmp_path, kind):
    moved = []

    class Reporter(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            moved.append(callback.handle.stats().parcels.count)

    callback = OffloadCallback(**ALL)
    assert same(rewarded(kind, tmp_path, callback, Reporter()), rewarded(kind, tmp_path))
    assert moved[-1] > 0


def test_a_trainer_that_switches_checkpoints_on_and_off_leaves_them_to_the_budget(tmp_path):
    """GRPO generates without checkpointing, and switches checkpointing on again if it was on before."""
    callback = OffloadCallback(**MOVES, budget="8GiB", takes_over=True)
    watched = Watched(callback)
    ours = rewarded("grpo", tmp_path, callback, watched, checkpoints=True)
    assert same(ours, rewarded("grpo", tmp_path, checkpoints=True))
    assert len(watched.checkpointed) == 3
    assert not any(watched.checkpointed)
