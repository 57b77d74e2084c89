"""Python blocks of README.md, options.md, planning.md, and of each trainer in trainers.md, run as written."""

import argparse
import copy
import logging
import re
from types import SimpleNamespace

import pytest
import tiny_diffusion as tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch import LightningModule
from scripts import ROOT
from support import assert_equal
from tiny_language import few_steps, language_model
from torch import nn
from transformers import TrainingArguments

import ebbtide

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
APART = {"torchtitan", "Megatron-Core"}  # tested in separate environments, with equal lines
WIDTH = 64

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


def blocks_of(path):
    """Python blocks by section, in order."""
    found = {}
    for section in re.split(r"^## ", (ROOT / path).read_text(), flags=re.MULTILINE):
        title, _, text = section.partition("\n")
        if BLOCK.search(text):
            found[title] = BLOCK.findall(text)
    return found


SECTIONS = blocks_of("docs/trainers.md")


def run(code, name, given):
    exec(compile(code, name, "exec"), given)
    return given


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(nn.functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    """Names as in models of transformers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, batch):
        x = batch
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=(x - batch).square().mean())


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(batch).loss
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters()]]


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    ebbtide.release_memory()


def run_page(path, given):
    """Every block from top to bottom; blocks for a trainer run in tests/integrations/test_transformers.py."""
    blocks = [block for section in blocks_of(path).values() for block in section]
    blocks = [block for block in blocks if "trainer = " not in block]
    assert blocks
    for block in blocks:
        run(block, path, given)
    return given["handle"]


def model_and_batch():
    torch.manual_seed(0)
    return Model(), torch.randn(8, 1024, WIDTH)  # saved tensors of 2 MiB, more than min_bytes


def test_the_readme_runs_from_top_to_bottom(capsys):
    model, batch = model_and_batch()
    twin = copy.deepcopy(model)
    handle = run_page("README.md", {"model": model, "batch": batch})
    for _ in range(11):  # the context's step, and the ten of the handle
        twin(batch).loss.backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert handle.stats().recomputed.count > 0
    printed = capsys.readouterr().out
    assert "plan within 40GiB: step" in printed
    assert re.search(r"budget +40.00 GiB", printed)
    assert "'ebbtide/predicted_peak_gib': " in printed
    assert re.search(r"ebbtide: \d+ saved tensors, [1-9][\d.]* \w+ moved out", printed)


def test_the_options_run_from_top_to_bottom(caplog):
    caplog.set_level("WARNING", "ebbtide")  # the page sets the level, the fixture restores it
    model, batch = model_and_batch()
    twin = copy.deepcopy(model)
    handle = run_page("docs/options.md", {"model": model})
    assert_equal(loss_and_gradients(model, batch), loss_and_gradients(twin, batch))
    assert handle.stats().recomputed.count > 0
    assert handle.recipes["layers.0"].action == "keep"
    assert logging.getLogger("ebbtide").level == logging.INFO


def test_the_page_about_planning_leaves_a_profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, batch = model_and_batch()
    twin = copy.deepcopy(model)
    handle = run_page("docs/planning.md", {"model": model})
    for _ in range(4):
        assert_equal(loss_and_gradients(model, batch), loss_and_gradients(twin, batch))
    assert handle.plan.predicted is not None
    assert ebbtide.Profile.load("profile.json").regions


class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, index):
        return self.model(batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader():
    return torch.utils.data.DataLoader(torch.randn(24, 512, WIDTH), batch_size=4)


def for_transformers(folder):
    rows = torch.randint(3, 20, (16, 32))
    return {
        "model": language_model(),
        "args": TrainingArguments(**{**few_steps(folder), "max_steps": 6}),
        "dataset": [{"input_ids": row, "labels": row} for row in rows],
    }


def for_diffusers(folder):
    return {"parser": argparse.ArgumentParser(), "transformer": tiny.seeded("wan")}


def for_lightning(folder):
    return {"task": Task(), "loader": loader()}


def for_accelerate(folder):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"accelerator": Accelerator(cpu=True), "model": model, "optimizer": optimizer, "loader": loader()}


GIVEN = {
    "transformers": for_transformers,
    "Diffusion transformers": for_diffusers,
    "Lightning": for_lightning,
    "accelerate": for_accelerate,
}


def test_every_trainer_with_lines_in_python_has_its_test():
    assert SECTIONS.keys() == GIVEN.keys() | APART


@pytest.mark.parametrize("title", SECTIONS)
def test_all_lines_are_python(title):
    for block in SECTIONS[title]:
        compile(block, title, "exec")


@pytest.mark.parametrize("title", GIVEN)
def test_the_first_lines_of_a_trainer_run(title, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "--activation-offloading"])
    torch.manual_seed(0)
    given = run(SECTIONS[title][0], title, GIVEN[title](tmp_path))
    printed = capsys.readouterr().out
    if "callback" in given:
        assert given["callback"].result.plan.predicted.peak_bytes > 0
        assert str(given["callback"].result) in printed
    elif "handle" in given:
        batch = next(iter(given["loader"]))
        twin = copy.deepcopy(Model())
        twin.load_state_dict(given["model"].state_dict())
        assert_equal(loss_and_gradients(given["model"], batch), loss_and_gradients(twin, batch))
        assert given["handle"].stats().recomputed.count > 0
    else:
        assert "WanTransformer3DModel: ebbtide:" in printed
        assert not any(module._forward_pre_hooks for module in given["transformer"].modules())
