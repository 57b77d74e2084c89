"""torchtitan's own Trainer on the llama3 debug model, made and stepped as torchtitan does; in `make test-trainers`.

examples/torchtitan_debug.py selects the CPU. With several ranks the file is the script of each rank.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import run_blocks
from scripts import ROOT, check_example

pytest.importorskip("torchtitan", reason="make test-trainers installs it", exc_type=ImportError)

import ebbtide
from ebbtide import ConfigError
from examples import torchtitan_debug as example

MOVES = {"store": "mock", "min_bytes": 1}
OURS = {
    "everything": {"mode": "all", "window": "1KiB"},
    "recipe": {"recipe": {"layers.*": "selective", "layers.0": "recompute"}},
    "budget": {"budget": "16GiB"},
}
IN_PIPELINES = {"everything": OURS["everything"], "recipe": {"recipe": {"layers.*": "selective"}}}
# With spmd_types, the default of torchtitan 0.3, fully_shard of torch 2.13 refuses its parameters on several ranks.
LAYOUTS = {
    "sharded": {},
    "tensor": {"tensor_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    "parts": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
}

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


def ours(layout):
    return IN_PIPELINES if "pipeline_parallel_degree" in LAYOUTS[layout] else OURS


def policy(name, settings=OURS):
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from ebbtide.integrations.torchtitan import OffloadAC

    theirs = {"none": lambda: None, "full": FullAC.Config, "selective": SelectiveAC.Config}
    return theirs[name]() if name in theirs else OffloadAC.Config(**MOVES, **settings[name])


def configured(folder, activation_checkpoint, is_compiled=False, **parallelism):
    from torchtitan.components.metrics import MetricsProcessor

    class Losses(MetricsProcessor):
        """Keeps the Trainer's logs of each step."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config):
            pass

        def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
            self.seen = [*getattr(self, "seen", []), (global_avg_loss, grad_norm)]
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    config = example.debug_config(folder)
    config.activation_checkpoint = activation_checkpoint
    config.metrics = Losses.Config(log_freq=1)
    config.parallelism = dataclasses.replace(config.parallelism, **parallelism)
    config.training.disable_cuda_graphs = True
    config.compile = dataclasses.replace(config.compile, enable=is_compiled, components=["model"], backend="aot_eager")
    return config


def outcome(trainer):
    """Losses and norms of gradients of all steps, and all weights: of sharded weights the part of the rank."""
    weights = {}
    for part in trainer.model_parts:
        for name, value in part.state_dict().items():
            weights[name] = value.to_local() if hasattr(value, "to_local") else value
    return trainer.metrics_processor.seen, weights


def assert_same(one, other):
    assert one[0] == other[0]
    assert len(one[0]) == 3
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


def counts(trainer):
    """Moved bytes and recomputed tensors of each model part."""
    from ebbtide.integrations.torchtitan import handles

    stats = [handle.stats() for handle in handles(trainer.model_parts)]
    return [(each.out.nbytes, each.recomputed.count) for each in stats]


@pytest.fixture(scope="module", autouse=True)
def assets(tmp_path_factory):
    example.use_cpu()
    folder = tmp_path_factory.mktemp("assets")
    example.write_assets(folder)
    return folder


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    """One rank; the Trainer's settings of the process are reset."""
    for name, value in example.ONE_RANK.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_multithreading_enabled(True)
    gc.enable()


def train(config):
    from torch.distributed.fsdp import FSDPModule

    trainer = config.build()
    for module in [inner for part in trainer.model_parts for inner in part.modules()]:
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # the only reduction of gloo's
    if trainer.parallel_dims.pp_enabled:
        train_pipeline(trainer)
    else:
        example.train(trainer)
    trainer.close()
    return trainer


def train_pipeline(trainer):
    """As the Trainer, but for the step of the schedule, which needs a later torch than 2.13."""
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.metrics_processor.seen = []
    for _ in range(trainer.config.training.steps):
        pairs = [next(batches) for _ in range(trainer.num_pipeline_parallel_microbatches)]
        processed = [trainer.post_dataloading_process(*pair) for pair in pairs]
        inputs, labels = (torch.cat([each[k] for each in processed]) for k in range(2))
        kwargs = {name: torch.cat([each[2][name] for each in processed]) for name in processed[0][2]}
        losses = []
        with trainer.train_context():
            trainer.pp_schedule.step(
                *([inputs] if trainer.pp_has_first_stage else []),
                target=labels if trainer.pp_has_last_stage else None,
                losses=losses,
                loss_kwargs={"global_valid_tokens": torch.tensor(labels.numel())},
                return_outputs=False,
                **kwargs,
            )
        trainer.metrics_processor.seen.append(tuple(loss.item() for loss in losses))
        trainer.optimizers.step()
        trainer.optimizers.zero_grad()


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_training_computes_the_same_as_with_their_policies(assets, is_compiled):
    results = {}
    for name in ["none", "full", "selective", *OURS]:
        trainer = train(configured(assets, policy(name), is_compiled))
        results[name] = outcome(trainer)
        assert_same(results[name], results["none"])
        assert len(counts(trainer)) == (name in OURS)
        for nbytes, again in counts(trainer):
            assert nbytes > 0
            assert is_compiled or (again > 0) == (name != "everything")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_compute_the_same(assets, tmp_path, layout):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    run_python(*command, str(assets), str(tmp_path), layout)
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert list(results) == ["none", *ours(layout)]
        for name in ours(layout):
            assert_same(results[name][:2], results["none"][:2])
            moved = results[name][2]
            assert len(moved) == (2 if layout == "parts" else 1)
            assert all(nbytes > 0 for nbytes, _ in moved)
            assert all((again > 0) == (name != "everything") for _, again in moved)


def run_python(*arguments):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for name in example.ONE_RANK:
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def rank_main(assets, folder, layout):
    example.use_cpu()
    results = {}
    for name in ["none", *ours(layout)]:
        config = configured(Path(assets), policy(name, ours(layout)), spmd_backend="partial_dtensor", **LAYOUTS[layout])
        trainer = train(config)
        results[name] = (*outcome(trainer), counts(trainer))
    torch.save(results, Path(folder) / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


def test_the_example_trains_and_moves(monkeypatch, tmp_path):
    for name in example.ONE_RANK:
        monkeypatch.delenv(name, raising=False)
    check_example(ROOT / "examples" / "torchtitan_debug.py", tmp_path)


def test_the_lines_of_the_page(assets):
    names = {"llama3_8b": lambda: configured(assets, None)}
    run_blocks("docs/trainers/torchtitan.md", names)
    config = names["llama3_8b_offloaded"]()
    assert config.training.disable_cuda_graphs
    (handle,) = names["handles"](train(config).model_parts)
    assert "budget 40GiB" in repr(handle)
    assert handle.stats().recomputed.count > 0  # the training ends with the measured steps


def model_part(**changes):
    from torchtitan.models.llama3 import model_registry

    with torch.device("meta"):
        model = model_registry("debugmodel").model.build()
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def apply(model, **settings):
    from ebbtide.integrations.torchtitan import OffloadAC

    OffloadAC.Config(**settings).build(dump_folder="").apply(model)


@pytest.mark.parametrize("kind", ["FullAC", "SelectiveAC"])
def test_their_checkpointing_besides_is_refused(kind):
    from torchtitan.distributed import activation_checkpoint

    model = model_part()
    getattr(activation_checkpoint, kind).Config().build(dump_folder="").apply(model)
    with pytest.raises(ConfigError, match=r"layers\.0 is recomputed by torchtitan's own checkpointing"):
        apply(model)


def test_their_budget_of_the_compiler_besides_is_refused():
    import torch._functorch.config as partitioner
    from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

    with partitioner.patch(activation_memory_budget=1.0):  # put back at the end
        MemoryBudgetAC.Config(memory_budget=0.4).build(dump_folder="").apply(model_part())
        with pytest.raises(ConfigError, match=r"activation_memory_budget=0.4, as MemoryBudgetAC sets it"):
            apply(model_part())


@pytest.mark.parametrize("part", [{"tok_embeddings": None}, {"norm": None, "lm_head": None}])
def test_a_profile_is_refused_in_a_pipeline(part):
    with pytest.raises(ConfigError, match="profile= names one file"):
        apply(model_part(**part), profile="profile.json")


@pytest.mark.parametrize("theirs", [{"preserve_rng_state": False}, {"determinism_check": "none"}, {"debug": True}])
def test_fields_of_their_checkpointing_are_refused(theirs):
    with pytest.raises(ConfigError, match=f"{next(iter(theirs))}= is of torchtitan's checkpointing"):
        apply(model_part(), **theirs)


def test_wrong_settings_raise_when_the_trainer_is_made():
    with pytest.raises(ebbtide.ConfigError, match="budget= asks for a plan"):
        apply(model_part(), mode="all", budget="1GiB")
    with pytest.raises(ebbtide.ModuleError, match="matches no module of Llama3Model"):
        apply(model_part(), include=["layers.*.mixer"])


def test_modules_inside_of_a_model_part_are_offloaded_once():
    from ebbtide.integrations.torchtitan import OffloadAC, handles

    encoder, model = model_part(), torch.nn.Module()
    model.layers, model.vision_encoder = model_part().layers, encoder
    policy = OffloadAC.Config(recipe="recompute").build(dump_folder="")
    policy.apply(model)
    policy.apply(encoder)
    assert len(handles([model, encoder])) == 1
    assert "vision_encoder.layers.0" in handles([model])[0].recipes


def test_configs_are_read_by_their_command_line(monkeypatch, assets):
    """A user's registry, and further settings on the command line."""
    from torchtitan.config import ConfigManager

    from ebbtide.integrations.torchtitan import OffloadAC

    registry = type(sys)("titan_registry")
    registry.offloaded = lambda: configured(assets, OffloadAC.Config(budget="40GiB"))
    monkeypatch.setitem(sys.modules, "titan_registry", registry)
    config = ConfigManager().parse_args(
        ["--module", "titan_registry", "--config", "offloaded", "--training.steps", "7"]
    )
    assert config.activation_checkpoint == OffloadAC.Config(budget="40GiB")
    assert config.training.steps == 7
    assert json.loads(json.dumps(config.activation_checkpoint.to_dict()))["budget"] == "40GiB"


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
