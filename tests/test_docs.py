"""Pages of the site and of the repository: every Python block runs, every link leads somewhere, nothing is missing."""

import argparse
import copy
import functools
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
import tiny_diffusion as tiny
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from nbclient import NotebookClient
from pages import PAGES, anchors_of, blocks_of, links_of, run_blocks, text_of
from scripts import ROOT
from support import assert_equal
from tiny_language import few_steps, language_model
from torch import nn
from transformers import TrainingArguments

import ebbtide
from ebbtide._config import SETTINGS
from ebbtide._offload import handle_of

APART = {"docs/trainers/torchtitan.md", "docs/trainers/megatron.md"}  # run in tests/trainers
TRAINER = ("trainer = ",)  # blocks that run in tests/integrations/test_transformers.py
WIDTH = 64

pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


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
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [loss.detach(), *grads]


def model_and_batch():
    torch.manual_seed(0)
    return Model(), torch.randn(8, 1024, WIDTH)  # saved tensors of 2 MiB, more than min_bytes


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    ebbtide.release_memory()


def run_page(page, leave_out=(), steps=4, **names):
    """Run a page with a model, and compare `steps` steps of the model as the page leaves it with a twin's."""
    model, batch = model_and_batch()
    twin = copy.deepcopy(model)
    names = {"model": model, "batch": batch, **names}
    run_blocks(page, names, leave_out=leave_out)
    for _ in range(steps):
        assert_equal(loss_and_gradients(names["model"], batch), loss_and_gradients(twin, batch))
    return names


# -- blocks of Python ------------------------------------------------------------------------------------------------


def test_the_readme(capsys):
    model, batch = model_and_batch()
    twin = copy.deepcopy(model)
    names = {"model": model, "batch": batch}
    run_blocks("README.md", names, leave_out=TRAINER)
    for _ in range(11):  # ten steps of the handle, and the context's
        twin(batch).loss.backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert names["handle"].stats().recomputed.count > 0
    printed = capsys.readouterr().out
    assert "plan within 40GiB: step" in printed
    assert re.search(r"budget +40.00 GiB", printed)
    assert "'ebbtide/predicted_peak_gib': " in printed
    assert re.search(r"ebbtide: \d+ saved tensors, [1-9][\d.]* \w+ moved out", printed)


def test_five_minutes(capsys):
    model, batch = model_and_batch()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, twin)]
    names = {"model": model, "batches": [batch] * 6, "optimizer": optimizers[0]}
    run_blocks("docs/start.md", names, leave_out=TRAINER)
    for _ in range(6):
        twin(batch).loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_equal(list(model.parameters()), list(twin.parameters()))
    assert "plan within 40GiB: step" in capsys.readouterr().out


MOVED_OR_RECOMPUTED = {
    "docs/index.md": "recomputed",
    "docs/concepts/plans.md": "recomputed",
    "docs/howto/disk.md": "out",
    "docs/howto/recipes.md": "out",
    "docs/internals/extending.md": "out",
}
"""Pages about one model and its handle, with the figure of the handle's stats that shows the last block at work."""


@pytest.mark.parametrize("page", MOVED_OR_RECOMPUTED)
def test_pages_about_a_handle(page):
    handle = run_page(page)["handle"]
    assert getattr(handle.stats(), MOVED_OR_RECOMPUTED[page]).count > 0
    handle.remove()


def test_recipes_by_hand_end_with_the_plan_of_the_page():
    handle = run_page("docs/howto/recipes.md")["handle"]
    assert {name: recipe.action for name, recipe in handle.recipes.items()} == {"layers.1": "offload"}
    handle.remove()


def test_out_of_memory():
    names = run_page("docs/howto/out_of_memory.md")
    assert names["handle"].stats().out.count == 0
    assert handle_of(names["model"]) is None
    assert names["loss"].requires_grad


def test_which_budget_leaves_a_profile():
    run_page("docs/howto/budget.md")
    assert ebbtide.Profile.load("profile.json").has_recomputation


def test_which_batch_size_is_answered_from_two_profiles(capsys):
    found = run_page("docs/howto/batch_size.md")["found"]
    assert f"{found.largest.batch} {found.fastest.batch} " in capsys.readouterr().out
    assert [row.batch for row in found.rows if row.is_measured] == [4, 8]
    assert ebbtide.Profile.load("profile-1.json").tokens == 2 * ebbtide.Profile.load("profile-0.json").tokens


def test_slower_than_expected(capsys):
    model, batch = model_and_batch()
    handle = ebbtide.offload(model, mode="all", store="mock")
    model(batch).loss.backward()
    run_blocks("docs/howto/slower.md", {"handle": handle})
    assert re.search(r"moved out +[1-9]", capsys.readouterr().out)


def test_compiled_blocks(monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager"))
    names = run_page("docs/howto/compile.md")
    assert all(layer._compiled_call_impl is not None for layer in names["model"].layers)
    assert names["handle"].stats().recomputed.count > 0
    names["handle"].remove()


def test_planning_ahead_leaves_a_profile(capsys):
    run_page("docs/howto/plan_ahead.md")
    assert "plan within 40GiB: step" in capsys.readouterr().out


def test_a_profile_is_kept_for_the_next_run():
    model, batch = model_and_batch()
    names = {"model": model, "batch": batch}
    exec(blocks_of("docs/howto/plan_ahead.md")[0], names)
    for _ in range(4):
        model(batch).loss.backward()
    assert names["handle"].plan.predicted is not None
    assert ebbtide.Profile.load("profile.json").regions


def test_several_gpus_shard_and_offload(process_group):
    names = run_page("docs/howto/several_gpus.md")
    assert all(type(p).__name__ == "DTensor" for p in names["model"].parameters())
    assert names["handle"].stats().recomputed.count > 0
    names["handle"].remove()


def test_pipelines_attach(process_group):
    module, x = nn.Sequential(Block(), Block()), torch.randn(8, 1024, WIDTH)
    twin = copy.deepcopy(module)
    names = {"module": module, "rank": 0, "ranks": 1, "device": torch.device("cpu"), "loss_of": nn.functional.mse_loss}
    run_blocks("docs/howto/pipelines.md", names)
    names["schedule"].step(x, target=x)
    for rows in x.chunk(4):
        (nn.functional.mse_loss(twin(rows), rows) / 4).backward()
    assert_equal([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])
    assert names["handle"].stats().out.count > 0
    names["handle"].remove()


def test_reports_name_the_logger():
    logger = logging.getLogger("ebbtide")
    before = logger.level
    run_blocks("docs/reference/report.md", {})
    assert logger.level == logging.INFO
    logger.setLevel(before)


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


def for_lightning(folder):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fabric = Fabric(accelerator="cpu", devices=1)
    return {"task": Task(), "loader": loader(), "fabric": fabric, "model": model, "optimizer": optimizer}


def for_accelerate(folder):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"accelerator": Accelerator(cpu=True), "model": model, "optimizer": optimizer, "loader": loader()}


TRAINERS = {"transformers": for_transformers, "lightning": for_lightning, "accelerate": for_accelerate}


@pytest.mark.parametrize("name", TRAINERS)
def test_pages_of_trainers(name, tmp_path, capsys):
    torch.manual_seed(0)
    names = TRAINERS[name](tmp_path)
    run_blocks(f"docs/trainers/{name}.md", names, leave_out=("SFTTrainer",))
    if "callback" in names:
        assert names["callback"].result.plan.predicted.peak_bytes > 0
        assert str(names["callback"].result) in capsys.readouterr().out
    if "handle" in names:
        batch = next(iter(names["loader"]))
        twin = copy.deepcopy(Model())
        twin.load_state_dict(names["model"].state_dict())
        assert_equal(loss_and_gradients(names["model"], batch), loss_and_gradients(twin, batch))
        assert names["handle"].stats().recomputed.count > 0


def test_the_page_of_diffusers_leaves_a_profile(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--activation-offloading"])
    transformer = tiny.seeded("wan")
    names = {"parser": argparse.ArgumentParser(), "transformer": transformer}
    run_blocks("docs/trainers/diffusers.md", names, train=lambda: tiny.train(transformer, "wan"))
    assert "WanTransformer3DModel: ebbtide:" in capsys.readouterr().out
    assert ebbtide.Profile.load("profile.json").regions
    assert not any(module._forward_pre_hooks for module in transformer.modules())


def test_the_page_about_other_packages_names(monkeypatch):
    monkeypatch.setattr(ebbtide.compat.OffloadActivations, "settings", {"store": "mock"})
    with pytest.warns(ebbtide.EbbtideWarning, match="no output head was found in Model"):
        names = run_page("docs/trainers/compat.md")
    names["installed"].remove()


def test_every_page_with_python_has_its_test():
    tested = {f"docs/trainers/{name}.md" for name in (*TRAINERS, "diffusers", "compat")} | set(MOVED_OR_RECOMPUTED)
    tested |= {f"docs/howto/{name}.md" for name in ("out_of_memory", "budget", "slower", "compile", "plan_ahead")}
    tested.add("docs/howto/batch_size.md")
    tested |= {"docs/howto/several_gpus.md", "docs/howto/pipelines.md", "docs/reference/report.md"}
    assert {page for page in PAGES if blocks_of(page)} == tested | APART | {"README.md", "docs/start.md"}


@pytest.mark.long
def test_the_notebook():
    """Asserts inside the notebook compare memory and gradients of both runs."""
    notebook = nbformat.read(ROOT / "docs" / "first_steps.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed with outputs"
    with_src = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    NotebookClient(notebook, kernel_name="python3").execute(env=with_src)


# -- links and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        if path.startswith(("https:", "http:", "mailto:")):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors_of(str(file.resolve().relative_to(ROOT))), target


@pytest.mark.parametrize("page", PAGES)
def test_files_named_on_a_page_exist(page):
    named = re.findall(r"`((?:benchmarks|docs|examples|src|tests)/[\w./-]+)`", text_of(page))
    if page != "benchmarks/NOTES.md":  # a history
        assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_reference_has_every_public_name():
    text = "".join(text_of(page) for page in PAGES if page.startswith("docs/reference/"))
    shown = set(re.findall(r"^::: ebbtide\.(\S+)$", text, re.MULTILINE))
    assert set(ebbtide.__all__) - shown == set()
    assert {f"types.{name}" for name in ebbtide.types.__all__} - shown == set()


def test_the_reference_has_every_option_variable_and_argument():
    options = set(re.findall(r"`(\w+)`", text_of("docs/reference/options.md")))
    assert SETTINGS.keys() - options == set()
    variables = set(re.findall(r"EBBTIDE_\w+", (ROOT / "src" / "ebbtide" / "_utils" / "env.py").read_text()))
    assert variables - set(re.findall(r"\w+", text_of("docs/reference/environment.md"))) == set()
    commands = text_of("docs/reference/command_line.md")
    for command in re.findall(r"^## `ebbtide ([\w-]+)`$", commands, re.MULTILINE):
        code = f"from ebbtide._cli import main; main([{command!r}, '--help'])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        arguments = set(re.findall(r"--[a-z-]+", done.stdout)) - {"--help", "--script-arguments", "--"}
        assert {each for each in arguments if f"`{each}" not in commands} == set()
