"""Whole models with random weights: three steps under each entry point equal three plain steps, bit for bit."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from cases import make
from planner.test_norm import tight
from support import Rig, assert_equal
from torch import nn
from torch.nn import functional

import ebbtide
from ebbtide._control.controller import Phase
from ebbtide._dry_run import measure
from ebbtide._model.regions import find_norm, find_regions

CPU = torch.device("cpu")

# transformers and torch warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning")


@pytest.fixture(autouse=True)
def _fresh_process():
    yield
    ebbtide.release_memory()


class Workload(NamedTuple):
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], torch.Tensor]
    regions: int
    norm: str | None = None


# -- language models ---------------------------------------------------------------------------------------------------


def _llama(layers=3):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        )
    )  # fmt: skip


def _gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4, use_cache=False, bos_token_id=0,
            eos_token_id=0,
        )
    )  # fmt: skip


def _mixtral(layers=2):
    transformers = pytest.importorskip("transformers")
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
            use_cache=False, output_router_logits=True,
        )
    )  # fmt: skip


def _t5(layers=2):
    transformers = pytest.importorskip("transformers")
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_decoder_layers=layers, num_heads=4,
            use_cache=False, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _language_loss(model, generator):
    batch = torch.randint(64, (2, 16), generator=generator)
    return model(input_ids=batch, labels=batch).loss


# -- models of images and of sequences ---------------------------------------------------------------------------------


def _vit():
    transformers = pytest.importorskip("transformers")
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=16,
            patch_size=4, num_labels=5,
        )
    )  # fmt: skip


def _vit_loss(model, generator):
    images = torch.randn(2, 3, 16, 16, generator=generator)
    return model(pixel_values=images, labels=torch.randint(5, (2,), generator=generator)).loss


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu_(self.body(x) + x)


def _resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Sequential(*(Residual(8) for _ in range(3))),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, 5),
    ).to(memory_format=torch.channels_last)


def _resnet_loss(model, generator):
    images = torch.randn(2, 3, 12, 12, generator=generator).contiguous(memory_format=torch.channels_last)
    return functional.cross_entropy(model(images), torch.randint(5, (2,), generator=generator))


def _lstm():
    return nn.LSTM(8, 16, num_layers=2, dropout=0.1, bidirectional=True)


def _lstm_loss(model, generator):
    out, (hidden, cell) = model(torch.randn(5, 3, 8, generator=generator))
    return out.square().mean() + (hidden * cell).sin().mean()


WORKLOADS = {
    "Llama": Workload(_llama, _language_loss, 3, "model.norm"),
    "GPT-2": Workload(_gpt2, _language_loss, 3, "transformer.ln_f"),
    "Llama of one layer": Workload(partial(_llama, 1), _language_loss, 1, "model.norm"),
    "Mixtral": Workload(_mixtral, _language_loss, 2, "model.norm"),
    "Mixtral of one layer": Workload(partial(_mixtral, 1), _language_loss, 1, "model.norm"),
    "T5": Workload(_t5, _language_loss, 4, "decoder.final_layer_norm"),
    "T5 of one layer each": Workload(partial(_t5, 1), _language_loss, 2, "decoder.final_layer_norm"),
    "ViT": Workload(_vit, _vit_loss, 3, "vit.layernorm"),
    "ResNet in channels_last": Workload(_resnet, _resnet_loss, 3, None),
    "LSTM": Workload(_lstm, _lstm_loss, 0, None),
}


def three_steps(work, model, context=None):
    torch.manual_seed(1)  # of dropout
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    results = []
    for _ in range(3):
        with context or contextlib.nullcontext():
            loss = work.loss(model, generator)
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(t.clone() for t in model.state_dict().values())]


@pytest.fixture(scope="module")
def plain():
    runs = {}

    def run(name):
        if name not in runs:
            work = WORKLOADS[name]
            runs[name] = three_steps(work, make(work.make, CPU))
        return runs[name]

    return run


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("window", [1, 20_000])
def test_context(name, window, plain):
    work = WORKLOADS[name]
    rig = Rig(window=window, prefetch=10_000)
    assert_equal(three_steps(work, make(work.make, CPU), rig.context), plain(name))
    assert rig.stats.out.nbytes > 10_000
    assert rig.stats.inbound.count > 0 or window > 1
    rig.check_at_rest()


@pytest.mark.parametrize("name", WORKLOADS)
def test_module(name, plain):
    work = WORKLOADS[name]
    model = make(work.make, CPU)
    handle = ebbtide.offload(model, store="mock", window=1, prefetch=10_000, min_bytes=256)
    assert len(handle.regions) == work.regions
    assert_equal(three_steps(work, model), plain(name))
    assert handle.stats().inbound.nbytes > 10_000
    assert handle.stats().host_bytes == 0


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_module_with_gradient_checkpointing(name, plain):
    """The checkpointing of the model itself: inputs of blocks move, the rest is recomputed."""
    work = WORKLOADS[name]
    model = make(work.make, CPU)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    handle = ebbtide.offload(model, store="mock", window=1, prefetch=10_000, min_bytes=256)
    twin = make(work.make, CPU)
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal(three_steps(work, model), three_steps(work, twin))
    assert handle.stats().inbound.count > 0
    assert handle.stats().host_bytes == 0


# -- planned -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_norm_after_the_blocks(name):
    model = make(WORKLOADS[name].make, CPU)
    norm = WORKLOADS[name].norm
    assert list(find_norm(model, find_regions(model))) == ([] if norm is None else [norm])


@pytest.mark.parametrize("settings", [{}, {"budget": "64GiB"}])
@pytest.mark.parametrize("name", [name for name, work in WORKLOADS.items() if work.norm])
def test_planned_with_the_norm_after_the_blocks(name, settings):
    work = WORKLOADS[name]
    model, twin = make(work.make, CPU), make(work.make, CPU)
    handle = ebbtide.offload(model, store="disk", min_bytes=256, **settings)
    for _ in range(2):
        assert_equal(three_steps(work, model), three_steps(work, twin))
    assert handle._planning.controller.phase is Phase.PLANNED
    assert work.norm in handle.plan.regions
    assert len(handle.plan.regions) == work.regions + 1


def test_llama_with_its_last_norm_recomputed(plain):
    work = WORKLOADS["Llama"]
    model = make(work.make, CPU)
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2))
    profile = measure(model, {"input_ids": ids, "labels": ids}, store="disk", min_bytes=256)
    handle = ebbtide.offload(model, plan=tight(profile), store="disk", min_bytes=256)
    assert str(handle.recipes["model.norm"]) == "recompute, inputs kept"
    assert_equal(three_steps(work, model), plain("Llama"))
    assert handle.stats().recomputed.count > 0
