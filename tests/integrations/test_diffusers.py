"""diffusers' own transformers with `offload_transformers` and its flags, against un-offloaded twins."""

import argparse
import functools
from types import SimpleNamespace

import diffusers
import peft
import pytest
import tiny_diffusion as tiny
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import ebbtide
from ebbtide import ConfigError, ModuleError
from ebbtide._offload import handle_of
from ebbtide.integrations.diffusers import add_arguments, offload_transformers, settings_of
from examples import diffusers_wan

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

MOVES = {"store": "mock", "min_bytes": 1}
ALL = {**MOVES, "mode": "all", "window": "1KiB"}  # a small window in comparison, as on a large model
SETTINGS = {
    "everything": ALL,
    "selective": {**MOVES, "recipe": "selective"},
    "recompute": {**MOVES, "recipe": "recompute"},
    "budget": {**MOVES, "budget": "64GiB"},
    "auto": MOVES,
}
MOVING = ("everything", "selective", "recompute", "budget")  # within a budget, the measured steps
PLANNED = ("budget", "auto")


def with_adapter(model):
    model.requires_grad_(False)
    torch.manual_seed(1)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return model


def wrapped(model):
    """Each block by torch's checkpoint_wrapper, as FastVideo does."""
    for blocks in (child for child in model.children() if isinstance(child, torch.nn.ModuleList)):
        for name, block in list(blocks.named_children()):
            blocks.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
    return model


def checkpointed(model):
    model.enable_gradient_checkpointing()
    return model


def plain(model):
    return model


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", tiny.MAKES)
def test_a_training_computes_the_same(kind, name):
    model, twin = tiny.seeded(kind), tiny.seeded(kind)
    offloaded = offload_transformers(model, **SETTINGS[name])
    assert tiny.train(model, kind) == tiny.train(twin, kind)
    (stats,) = offloaded.stats().values()
    assert (stats.out.nbytes > 0) == (name in MOVING)
    assert (len(offloaded.profiles()) == 1) == (name in PLANNED)
    offloaded.remove()
    assert tiny.same(model, twin)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_training_in_which_nothing_moves_warns():
    model = tiny.seeded("wan")
    offload_transformers(model, store="mock", mode="all")
    with pytest.warns(ebbtide.EbbtideWarning, match=r"moved nothing in its first forward: .* smaller than min_bytes"):
        tiny.train(model, "wan")


@pytest.mark.parametrize("name", SETTINGS)
def test_adapters_train_the_same(name):
    model, twin = with_adapter(tiny.seeded("wan")), with_adapter(tiny.seeded("wan"))
    offloaded = offload_transformers(model, **SETTINGS[name])
    assert tiny.train(model, "wan") == tiny.train(twin, "wan")
    assert (offloaded.stats()["WanTransformer3DModel"].parcels.count > 0) == (name in MOVING)
    assert tiny.same(model, twin)


@pytest.mark.parametrize("name", SETTINGS)
def test_adapters_that_a_forward_scales_train_the_same(name):
    """The transformer sets the scale of its adapters in forward, and resets the scale before the end."""
    model, twin = with_adapter(tiny.seeded("wan")), with_adapter(tiny.seeded("wan"))
    offloaded = offload_transformers(model, **SETTINGS[name])
    losses = [
        tiny.train(each, "wan", transformer=functools.partial(each, attention_kwargs={"scale": 0.25}))
        for each in (model, twin)
    ]
    assert losses[0] == losses[1]
    assert (offloaded.stats()["WanTransformer3DModel"].parcels.count > 0) == (name in MOVING)
    assert tiny.same(model, twin)


@pytest.mark.parametrize("prepare", [checkpointed, wrapped])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("kind", ["wan", "flux"])
@pytest.mark.parametrize("name", ["everything", "auto"])
def test_checkpointed_blocks_train_the_same(prepare, is_before, kind, name):
    """Only the inputs of the checkpoints can move."""
    model, twin = tiny.seeded(kind), prepare(tiny.seeded(kind))
    if is_before:
        prepare(model)
    offloaded = offload_transformers(model, **SETTINGS[name])
    if not is_before:
        prepare(model)
    assert tiny.train(model, kind) == tiny.train(twin, kind)
    (stats,) = offloaded.stats().values()
    assert (stats.out.nbytes > 0) == (name in MOVING)
    offloaded.remove()
    assert tiny.same(model, twin)


@pytest.mark.parametrize("prepare", [checkpointed, wrapped])
def test_a_budget_and_checkpoints_are_refused(prepare):
    model = prepare(tiny.seeded("wan"))
    with pytest.raises(ConfigError, match="decides what is recomputed, and the blocks of WanTransformer3DModel"):
        offload_transformers(model, **MOVES, budget="8GiB")
    assert tiny.train(model, "wan", steps=1)


NAMES = [
    "layers",
    "blocks",
    "double_blocks",
    "single_blocks",
    "transformer_blocks",
    "single_transformer_blocks",
    "temporal_transformer_blocks",
    "transformer_double_blocks",
    "transformer_single_blocks",
    "text_transformer_blocks",
    "visual_transformer_blocks",
    "refiner_blocks",
    "vace_blocks",
    "joint_transformer_blocks",
    "transformer_layers",
]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Named(torch.nn.Module):
    """Blocks under any names."""

    def __init__(self, *names, depth=2):
        super().__init__()
        self.names = names
        for name in names:
            setattr(self, name, torch.nn.ModuleList([Block() for _ in range(depth)]))

    def forward(self, x):
        for name in self.names:
            for block in getattr(self, name):
                x = block(x)
        return x


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_found_by_any_name(name):
    model = Named(name)
    offloaded = offload_transformers(model, **MOVES, recipe="recompute")
    assert list(offloaded.handles["Named"].regions) == [f"{name}.0", f"{name}.1"]
    model(torch.randn(2, 8)).sum().backward()
    assert offloaded.stats()["Named"].out.nbytes > 0


def test_one_block_is_found():
    offloaded = offload_transformers(Named("blocks", depth=1), **MOVES, recipe="recompute")
    assert list(offloaded.handles["Named"].regions) == ["blocks.0"]


def test_a_model_without_blocks_is_refused():
    for model in (torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8))):
        with pytest.raises(ModuleError, match=r"trains and has no repeated blocks \(a ModuleList of two or more"):
            offload_transformers(Named("blocks"), model, **ALL)


def pipeline(**modules):
    """A pipeline of diffusers."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    vae.requires_grad_(False)
    return SimpleNamespace(components={"scheduler": scheduler, "vae": vae, "tokenizer": None, **modules})


def test_frozen_transformers_are_left_alone():
    transformer, frozen, adapted = tiny.wan(), tiny.wan().requires_grad_(False), with_adapter(tiny.wan())
    given = pipeline(transformer=transformer, transformer_2=frozen, transformer_3=adapted)
    offloaded = offload_transformers(given, **ALL)
    assert list(offloaded.handles) == ["transformer", "transformer_3"]
    tiny.train(transformer, "wan", steps=1)
    tiny.train(adapted, "wan", steps=1)
    assert all(stats.out.nbytes > 0 for stats in offloaded.stats().values())
    assert handle_of(frozen) is None
    assert not any(module._forward_pre_hooks for module in frozen.modules())
    with pytest.raises(ModuleError, match=r"none of the arguments \(vae, transformer\) trains"):
        offload_transformers(pipeline(transformer=frozen), **ALL)


def test_a_pipeline_of_diffusers():
    model = tiny.seeded("wan")
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "transformer": model}
    whole = diffusers.WanPipeline(**parts, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    assert list(offload_transformers(whole, **ALL).handles) == ["transformer"]


def test_repeated_arguments_are_offloaded_once():
    first, second = tiny.wan(), tiny.wan()
    fastvideos = SimpleNamespace(trainable_transformer_modules={"transformer": first, "transformer_2": second})
    parallel = torch.nn.Sequential(first)  # a wrapper, like DDP
    roles = torch.nn.ModuleDict({"student": torch.nn.ModuleDict({"transformer": second})})
    offloaded = offload_transformers(fastvideos, first, roles, **ALL)
    assert list(offloaded.handles) == ["transformer", "transformer_2"]
    with pytest.raises(ModuleError, match=r"offload\(\) is already applied"):
        offload_transformers(first, **ALL)
    offloaded.remove()
    assert list(offload_transformers(parallel, first, roles, **ALL).handles) == ["Sequential", "student.transformer"]


def test_two_of_one_class_have_names_of_their_own():
    offloaded = offload_transformers(tiny.wan(), tiny.wan(), **ALL)
    assert list(offloaded.handles) == ["WanTransformer3DModel", "WanTransformer3DModel-2"]
    assert offloaded.report().count("WanTransformer3DModel") == 2


@pytest.mark.parametrize("name", SETTINGS)
def test_two_that_train_in_turns(name):
    """As the two of Wan 2.2, each for a part of the noise."""
    models, twins = ([tiny.seeded("wan"), tiny.seeded("wan")] for _ in range(2))
    offloaded = offload_transformers(*models, **SETTINGS[name])
    for _ in range(2):
        for model, twin in zip(models, twins, strict=True):
            assert tiny.train(model, "wan") == tiny.train(twin, "wan")
    assert len(offloaded.handles) == 2
    assert all((stats.out.nbytes > 0) == (name in MOVING) for stats in offloaded.stats().values())
    offloaded.remove()
    assert all(map(tiny.same, models, twins))


def test_one_that_fails_leaves_none_offloaded():
    first, second = tiny.wan(), tiny.wan()
    handle = ebbtide.offload(second, **ALL)
    with pytest.raises(ModuleError, match=r"offload\(\) is already applied"):
        offload_transformers(first, second, **ALL)
    handle.remove()
    assert len(offload_transformers(first, second, **ALL).handles) == 2


def test_one_file_is_for_one_transformer(tmp_path):
    with pytest.raises(ConfigError, match="is the file of one transformer, and 2 train"):
        offload_transformers(tiny.wan(), tiny.flux(), profile=str(tmp_path / "profile.json"))


def test_other_things_are_refused():
    with pytest.raises(ConfigError, match="dict is no module and no pipeline of diffusers or FastVideo"):
        offload_transformers({"transformer": tiny.wan()})


def parsed(*line):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(line)


@pytest.mark.parametrize("of", [str, lambda option: option.replace("-", "_").replace("__", "--")])
def test_flags_come_from_a_parser(of):
    line = of("--activation-offloading"), of("--offload-budget"), "0.8", of("--offload-host-limit"), "8GiB"
    assert settings_of(parsed(*line)) == {"budget": 0.8, "host_limit": "8GiB"}
    assert settings_of(parsed(of("--activation-offloading"))) == {}
    line = of("--activation-offloading"), of("--offload-keep-last"), "1", of("--offload-include"), "blocks.*", "norm"
    assert settings_of(parsed(*line)) == {"keep_last": 1, "include": ["blocks.*", "norm"]}


def test_without_the_flag_nothing_is_done():
    assert settings_of(parsed()) == {"mode": "off"}
    model, frozen = tiny.seeded("wan"), torch.nn.Linear(4, 4).requires_grad_(False)
    offloaded = offload_transformers(model, frozen, **settings_of(parsed()))
    assert tiny.train(model, "wan", steps=1)
    assert offloaded.stats()["WanTransformer3DModel"].saved_tensors == 0
    with pytest.raises(ConfigError, match="--offload-host-limit does nothing without --activation-offloading: add it"):
        settings_of(parsed("--offload-host-limit", "8GiB"))


def test_the_memory_profile_has_every_block():
    model = tiny.wan(layers=3)
    offloaded = offload_transformers(model, **MOVES)
    assert offloaded.memory_profile().startswith("no profile")
    tiny.train(model, "wan")
    profile = offloaded.profiles()["WanTransformer3DModel"]
    blocks = [region for region in profile.regions if region.name.startswith("blocks.")]
    assert [region.name for region in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(sum(save.nbytes for save in region.saved_tensors) > 0 for region in blocks)
    text = offloaded.memory_profile()
    assert str(profile) in text
    assert str(offloaded.handles["WanTransformer3DModel"].plan) in text
    assert offloaded.handles["WanTransformer3DModel"].plan.predicted.peak_bytes > 0


def test_the_example_measures(monkeypatch, tmp_path, capsys):
    path = tmp_path / "profile.json"
    monkeypatch.setattr("sys.argv", ["diffusers_wan.py", "--profile", str(path), "--steps", "1"])
    diffusers_wan.main()
    assert "saved in regions" in capsys.readouterr().out
    assert {region.name for region in ebbtide.Profile.load(path).regions} >= {"blocks.0", "blocks.1"}


def test_blocks_that_offload_are_refused():
    model = tiny.wan()
    model.blocks = torch.nn.ModuleList(map(offload_wrapper, model.blocks))
    with pytest.raises(ConfigError, match=r"in offload_wrapper, .* and offload_transformers\(\) moves the same"):
        offload_transformers(model, **ALL)
