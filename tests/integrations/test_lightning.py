"""Lightning's own Trainer with the callback, and Fabric with one line."""

import csv
import json

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import ebbtide
from ebbtide import ConfigError, EbbtideWarning, ModuleError
from ebbtide._engine.stats import TOTALS
from ebbtide._reports.run import Run
from ebbtide.integrations.lightning import OffloadCallback

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")

MOVES = {"store": "mock", "min_bytes": 1}
ALL = {**MOVES, "mode": "all", "window": "1KiB"}  # a small window in comparison, as on a large model
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(self.up(x).relu()))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Steps:
    """`way`: the step calls the task ("self"), or a part of the task ("part"), or steps the optimizer ("manual")."""

    def __init__(self, way="self"):
        super().__init__()
        self.net = Net()
        self.way = way
        self.automatic_optimization = way != "manual"
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def loss(self, x):
        return ((self(x) if self.way == "self" else self.net(x)) - x.roll(1, -1)).square().mean()

    def training_step(self, batch, index):
        for part in batch.chunk(2) if self.way == "manual" else [batch]:
            loss = self.loss(part)
            if self.way == "manual":
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Task(Steps, lightning.pytorch.LightningModule):
    pass


class OtherTask(Steps, pytorch_lightning.LightningModule):
    pass


class Distilled(Task):
    def __init__(self):
        super().__init__()
        self.teacher = Net().requires_grad_(False)

    def loss(self, x):
        return (self.net(x) - self.teacher(x)).square().mean()


class Watcher(lightning.pytorch.Callback):
    """Moved parcels, step by step; `fails_at`: a step that raises."""

    def __init__(self, callback, fails_at=None):
        self.callback, self.fails_at = callback, fails_at
        self.parcels = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.parcels.append(self.callback.handle.stats().parcels.count)
        if batch_idx == self.fails_at:
            raise RuntimeError("this step")


def trained(*callbacks, make=Task, package=lightning.pytorch, ckpt_path=None, **settings):
    package.seed_everything(0, verbose=False)
    task = make()
    data = torch.utils.data.DataLoader(torch.randn(16, 4, 16), batch_size=2)
    trainer = package.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": list(callbacks), **settings})
    trainer.fit(task, data, data, ckpt_path=ckpt_path)
    return task, trainer


def same(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return one.losses == other.losses and len(one.losses) > 0 and all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize(
    "settings",
    [{"mode": "all", "window": "1KiB"}, {"recipe": "selective"}, {"budget": "16GiB"}, {}],
    ids=["everything", "recipe", "budget", "auto"],
)
@pytest.mark.parametrize("way", ["self", "part", "manual"])
def test_a_training_computes_the_same(settings, way):
    callback = OffloadCallback(**MOVES, **settings)
    ours, trainer = trained(callback, make=lambda: Task(way))
    twin, _ = trained(make=lambda: Task(way))
    assert same(ours, twin)
    assert callback.handle is None
    assert trainer.model is ours
    assert vars(ours).keys() == vars(twin).keys()
    assert not any(module._forward_pre_hooks for module in ours.modules())


@pytest.mark.parametrize("way", ["self", "part", "manual"])
def test_saved_tensors_of_a_step_move(way):
    callback = OffloadCallback(**ALL)
    watcher = Watcher(callback)
    _, trainer = trained(watcher, callback, make=lambda: Task(way))
    assert watcher.parcels[0] > 0
    assert all(then > before for before, then in zip(watcher.parcels, watcher.parcels[1:], strict=False))
    assert trainer.callback_metrics["ebbtide/moved_gib"] > 0
    assert trainer.callback_metrics["ebbtide/stall_ms"] >= 0
    assert trainer.callback_metrics["ebbtide/host_gib"] == 0  # between steps no parcel is on its way
    _, trainer = trained(OffloadCallback(**ALL, logs=False))
    assert not any(name.startswith("ebbtide") for name in trainer.callback_metrics)


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"val_check_interval": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_other_features_of_the_trainer(settings):
    assert same(trained(OffloadCallback(**ALL), **settings)[0], trained(**settings)[0])


def test_checkpoints_are_those_of_the_twin(tmp_path):
    def saved(name, *callbacks, **settings):
        keeps = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=4, save_top_k=-1)
        return trained(keeps, *callbacks, enable_checkpointing=True, **settings)[0]

    twin, ours = saved("twin"), saved("ours", OffloadCallback(**ALL))
    names = sorted(path.name for path in (tmp_path / "twin").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "ours").iterdir())
    states = [torch.load(tmp_path / who / names[0], weights_only=False) for who in ("twin", "ours")]
    assert states[0]["state_dict"].keys() == states[1]["state_dict"].keys()
    assert all(torch.equal(states[0]["state_dict"][name], states[1]["state_dict"][name]) for name in ours.state_dict())
    resumed = [
        trained(*callbacks, ckpt_path=tmp_path / "ours" / names[0])[0] for callbacks in ([], [OffloadCallback(**ALL)])
    ]
    assert same(*resumed)
    assert same(ours, twin)


def test_a_submodule_by_name():
    callback = OffloadCallback("net", **ALL)
    watcher = Watcher(callback)
    ours, _ = trained(watcher, callback, make=Distilled)
    assert watcher.parcels[-1] > 0
    assert same(ours, trained(make=Distilled)[0])
    with pytest.warns(EbbtideWarning, match=r"offload\(Net\) moved nothing"):
        trained(OffloadCallback("teacher", **ALL), make=Distilled)
    with pytest.raises(ModuleError, match=r"no submodule of this name\. It has 'net', 'teacher'"):
        trained(OffloadCallback("student", **MOVES), make=Distilled)


@pytest.mark.parametrize(
    ("wrapper", "settings", "message"),
    [
        (offload_wrapper, {"mode": "all"}, "in offload_wrapper.*: leave one of them out"),
        (checkpoint_wrapper, {"budget": "8GiB"}, "and the blocks of Task are checkpointed"),
    ],
)
def test_another_offload_or_checkpointing_is_refused(wrapper, settings, message):
    def make():
        task = Task()
        task.net.layers[1] = wrapper(task.net.layers[1])
        return task

    with pytest.raises(ConfigError, match=message):
        trained(OffloadCallback(**MOVES, **settings), make=make)


@pytest.mark.parametrize("settings", [{**MOVES, "budget": "16GiB"}, ALL], ids=["budget", "everything"])
def test_the_result_lives_on(settings, tmp_path):
    callback = OffloadCallback(**settings)
    assert callback.result is None
    watcher = Watcher(callback)
    trained(watcher, callback)
    result = callback.result
    assert result.stats().parcels.count == watcher.parcels[-1] > 0
    assert result.report() in str(result)
    assert (result.plan.predicted is not None) == (result.profile is not None) == ("budget" in settings)
    json.dumps(result.stats().to_dict())
    result.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json").report == result.report()


def test_the_result_of_a_fit_that_failed():
    callback = OffloadCallback(**ALL)
    with pytest.raises(RuntimeError, match="this step"):
        trained(callback, Watcher(callback, fails_at=2))
    assert callback.result.stats().parcels.count > 0


def test_metrics_reach_the_loggers(tmp_path):
    """Also metrics known from the first planned step on only."""
    callback = OffloadCallback(**MOVES, budget="16GiB")
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    trained(callback, logger=logger, log_every_n_steps=1)
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["ebbtide/moved_gib"]]
    assert len(logged) == 8
    assert all(row[name] for row in logged for name in (*TOTALS, "ebbtide/host_gib", "ebbtide/budget_gib"))
    assert not logged[0]["ebbtide/predicted_peak_gib"]
    assert float(logged[-1]["ebbtide/predicted_peak_gib"]) > 0
    whole = callback.result.stats().metrics()
    assert sum(float(row["ebbtide/moved_gib"]) for row in logged) == pytest.approx(whole["ebbtide/moved_gib"])


def test_a_fit_that_failed_leaves_the_module_to_the_next():
    callback = OffloadCallback(**ALL)
    with pytest.raises(RuntimeError, match="this step"):
        trained(callback, Watcher(callback, fails_at=2))
    assert callback.handle is None
    assert same(trained(callback)[0], trained()[0])


@pytest.mark.filterwarnings("ignore:.*max_epochs=0.*")
@pytest.mark.parametrize("nothing", [{"max_epochs": 0}, {"limit_train_batches": 0}], ids=["no epoch", "no batch"])
def test_a_fit_without_a_step_leaves_nothing_behind(nothing):
    callback = OffloadCallback(**ALL)
    task, trainer = trained(callback, **nothing)
    assert callback.handle is None
    assert trainer.strategy.model is task
    ebbtide.offload(task, **ALL).remove()  # the only handle


def test_a_forward_of_the_modules_own_stays():
    class Own(Task):
        def __init__(self):
            super().__init__()
            self.forward = lambda x: self.net(x) * 2.0

    ours = trained(OffloadCallback(**ALL), make=Own)[0]
    assert "forward" in vars(ours)
    x = torch.ones(2, 16)
    assert torch.equal(ours.eval()(x), ours.net(x) * 2.0)
    assert same(ours, trained(make=Own)[0])


def test_the_other_package():
    ours, trainer = trained(OffloadCallback(**ALL), make=OtherTask, package=pytorch_lightning)
    assert trainer.callback_metrics["ebbtide/moved_gib"] > 0
    assert same(ours, trained(make=OtherTask, package=pytorch_lightning)[0])


@pytest.mark.long(cases=0)
def test_two_processes(monkeypatch):
    """DDP; the parent has the results of the first rank."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    results = [
        trained(*callbacks, strategy="ddp_spawn", devices=2, num_sanity_val_steps=1)
        for callbacks in ([], [OffloadCallback(**ALL)])
    ]
    (twin, plain), (ours, trainer) = results
    assert trainer.callback_metrics["ebbtide/moved_gib"] > 0
    assert torch.equal(trainer.callback_metrics["loss"], plain.callback_metrics["loss"])
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("line", ["before", "behind", "wrapper"])
def test_fabric(line):
    def losses(is_offloaded):
        torch.manual_seed(0)
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        net = Net()
        handle = ebbtide.offload(net, **ALL) if is_offloaded and line == "before" else None
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        if is_offloaded and line != "before":
            handle = ebbtide.offload(model.module if line == "behind" else model, **ALL)
        found = []
        for _ in range(4):
            x = torch.randn(4, 16)
            loss = (model(x) - x.roll(1, -1)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if handle is not None:
            assert handle.stats().out.nbytes > 0
            assert list(handle.regions) == ["layers.0", "layers.1", "layers.2"]
        return found, list(net.parameters())

    (ours, weights), (theirs, expected) = losses(True), losses(False)
    assert ours == theirs
    assert all(torch.equal(p, q) for p, q in zip(weights, expected, strict=True))
