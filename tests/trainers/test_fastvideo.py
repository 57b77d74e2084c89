"""FastVideo's own Trainer and checkpointing with the callback from YAML; in `make test-trainers`.

The transformer is diffusers' Wan: FastVideo's own has kernels for CUDA.
"""

import importlib.util
import json
import logging
from types import SimpleNamespace

import pytest
import tiny_diffusion as tiny
import torch

from ebbtide import ConfigError, ModuleError

if importlib.util.find_spec("fastvideo") is None:
    pytest.skip("make test-trainers installs it", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 5
ALL = {"store": "mock", "min_bytes": 1, "mode": "all", "window": "1KiB"}

if torch.version.cuda is None:
    # torchvision's wheel is linked to CUDA, and imports these operators by name. No operator is called.
    _TORCHVISION = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory):
    from fastvideo.distributed import cleanup_dist_env_and_memory, maybe_init_distributed_environment_and_model_parallel

    path = tmp_path_factory.mktemp("group") / "store"
    maybe_init_distributed_environment_and_model_parallel(1, 1, distributed_init_method=f"file://{path}")
    yield
    cleanup_dist_env_and_memory()


class Role:
    """A model as FastVideo's methods use models."""

    def __init__(self, transformer, trainable=True):
        from fastvideo.train.utils.module_state import apply_trainable

        self._trainable = trainable
        self.transformer = apply_trainable(transformer, trainable=trainable)


def method_of(config, **roles):
    from fastvideo.train.methods.base import TrainingMethod

    class Method(TrainingMethod):
        """A student that learns from a teacher, if any."""

        def on_train_start(self):
            self.losses, self.logged = [], []
            self.optimizer = torch.optim.AdamW(self.student.transformer.parameters(), lr=1e-2)
            self.tracker = SimpleNamespace(log=lambda metrics, step: self.logged.append(metrics))

        def single_train_step(self, batch, iteration):
            target = torch.ones_like(batch["hidden_states"])
            for role, model in self._role_models.items():
                if role == "teacher":
                    with torch.no_grad():
                        target = model.transformer(**batch, return_dict=False)[0]
            prediction = self.student.transformer(**batch, return_dict=False)[0]
            loss = torch.nn.functional.mse_loss(prediction, target)
            self.losses.append(loss.item())
            return {"total_loss": loss}, {}, {}

        def get_optimizers(self, iteration):
            return [self.optimizer]

        def get_lr_schedulers(self, iteration):
            return []

        _optimizer_dict = _lr_scheduler_dict = None  # for checkpoints on disk

    return Method(cfg=SimpleNamespace(training=config, method={}), role_models=roles)


def trained(offload=None, checkpointing=None, with_teacher=False, accumulation=1):
    from fastvideo.train import Trainer
    from fastvideo.train.utils.training_config import TrackerConfig, TrainingConfig, TrainingLoopConfig
    from fastvideo.training.activation_checkpoint import apply_activation_checkpointing

    transformer = tiny.seeded("wan")
    if checkpointing is not None:
        transformer = apply_activation_checkpointing(transformer, checkpointing_type=checkpointing)
    roles = {"student": Role(transformer)}
    if with_teacher:
        roles["teacher"] = Role(tiny.wan(layers=3), trainable=False)
    loop = TrainingLoopConfig(max_train_steps=STEPS, gradient_accumulation_steps=accumulation)
    config = TrainingConfig(loop=loop, tracker=TrackerConfig(project_name=""))
    callbacks = {"offload": {"_target_": "ebbtide.integrations.fastvideo.OffloadCallback", **(offload or {})}}
    trainer = Trainer(config, callback_configs=callbacks if offload is not None else {})
    method = method_of(config, **roles)
    batches = [tiny.batch("wan", seed) for seed in range(STEPS * accumulation)]
    trainer.run(method, dataloader=batches, max_steps=STEPS)
    return method, trainer.callbacks._callbacks.get("offload")


def check_same(method, twin):
    assert len(method.losses) >= STEPS
    assert method.losses == twin.losses
    assert tiny.same(method.student.transformer, twin.student.transformer)


@pytest.mark.parametrize(
    "offload",
    [
        ALL,
        *({"store": "mock", "min_bytes": 1, **one} for one in ({"recipe": "selective"}, {"budget": "64GiB"}, {})),
    ],
    ids=["everything", "selective", "budget", "auto"],
)
@pytest.mark.parametrize("training", [{}, {"with_teacher": True}, {"accumulation": 2}], ids=str)
def test_a_training_computes_the_same(offload, training):
    method, callback = trained(offload, **training)
    check_same(method, trained(**training)[0])
    assert list(callback.offloaded.handles) == ["role_modules.student.transformer"]
    moved = [metrics["ebbtide/moved_gib"] > 0 for metrics in method.logged if "ebbtide/moved_gib" in metrics]
    assert len(moved) == STEPS
    assert callback.result.keys() == callback.offloaded.handles.keys()
    (result,) = callback.result.values()
    assert json.loads(json.dumps(result.stats().to_dict()))["out"]["count"] == result.stats().out.count
    assert result.report() in str(result)
    assert any(moved) == ("budget" in offload or offload.keys() > {"store", "min_bytes"})
    assert not any(module._forward_pre_hooks for module in method.modules())


@pytest.mark.parametrize("checkpointing", ["full", "ops"])
def test_its_checkpointing_computes_the_same(checkpointing):
    method, callback = trained(ALL, checkpointing=checkpointing)
    check_same(method, trained(checkpointing=checkpointing)[0])
    (stats,) = callback.offloaded.stats().values()
    assert stats.out.nbytes > 0


def test_a_budget_and_its_checkpointing_are_refused():
    with pytest.raises(ConfigError, match="a budget decides what is recomputed"):
        trained({"budget": "8GiB"}, checkpointing="full")


def test_reports_are_logged_at_the_end(caplog):
    shown = logging.getLogger("fastvideo")
    shown.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "fastvideo.ebbtide"):
            trained({"store": "mock", "min_bytes": 1})
    finally:
        shown.removeHandler(caplog.handler)
    assert "role_modules.student.transformer: profile of WanTransformer3DModel" in caplog.text


def test_a_method_in_which_nothing_trains_is_refused():
    from ebbtide.integrations.fastvideo import OffloadCallback

    method = method_of(None, student=Role(tiny.wan(), trainable=False))
    with pytest.raises(ModuleError, match=r"none of the arguments \(role_modules.student.transformer\) trains"):
        OffloadCallback(**ALL).on_train_start(method)
