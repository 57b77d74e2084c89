"""Adapters on frozen and on quantised weights: training is unchanged, and no weight moves."""

import contextlib

import peft
import pytest
import torch
import trl
from tiny_language import few_steps, language_model, losses_of, rows, tokenizer
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, to_nf4
from transformers import BitsAndBytesConfig, LlamaForCausalLM, TorchAoConfig

import ebbtide
from ebbtide import compat
from ebbtide._engine.engine import Engine
from ebbtide._engine.parcel import Ticket
from ebbtide._types import Reason

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore", "error::ebbtide.EbbtideWarning"),
]

MOVES = {"store": "mock", "min_bytes": 1}
ALL = {**MOVES, "mode": "all", "window": "1KiB"}  # little waits, as on a large model
STEPS = 5  # a planner measures two

QUANTISED = {
    "bitsandbytes nf4": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    "bitsandbytes int8": BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao int4": TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4)),
}
KINDS = ["lora", "dora", *QUANTISED, "torchao nf4", "bitsandbytes nf4 with dora"]
SELECTIVE = {**MOVES, "recipe": "selective"}
OTHERS = {"recompute": {**MOVES, "recipe": "recompute"}, "budget": {**MOVES, "budget": "16GiB"}, "auto": MOVES}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model to load."""
    folder = tmp_path_factory.mktemp("model")
    language_model().save_pretrained(folder)
    return folder


def adapted(kind, folder):
    """A model with adapters of some effect, loaded in the manner of users."""
    quantised = QUANTISED.get(kind.removesuffix(" with dora"))
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=quantised)
    if quantised is not None:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if kind == "torchao nf4":
        for module in model.model.modules():
            if isinstance(module, torch.nn.Linear):
                nf4 = to_nf4(module.weight.detach(), block_size=32, scaler_block_size=16)
                module.weight = torch.nn.Parameter(nf4, requires_grad=False)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        use_dora=kind.endswith("dora"),
    )
    torch.manual_seed(0)
    return peft.get_peft_model(model, config).train()


def train(model, context=contextlib.nullcontext):
    """Losses and gradients of every step, and the adapters at the end."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    results = []
    for step in range(STEPS):
        tokens = torch.arange(step, step + 16).remainder(22).reshape(2, 8)
        with context():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in trained.values())]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(p.detach() for p in trained.values())]


def same(ours, plain):
    return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


class Spy:
    """Inspects tensors that leave: storages of weights, and copies of weights without quantisation."""

    def __init__(self, model):
        weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
        self._storages = {t.untyped_storage()._cdata for t in tensors_in(model)}
        self._copies = [copy.detach() for weight in weights for copy in copies_of(weight)]
        self.moved = 0
        self.weights = []
        self.copies = 0

    def look(self, t):
        self.moved += 1
        if t.untyped_storage()._cdata in self._storages:
            self.weights.append((t.shape, t.dtype))
        self.copies += any(t.shape == copy.shape and torch.equal(t, copy) for copy in self._copies)


def copies_of(weight):
    """The weight as an operand of a product, in either orientation."""
    if not type(weight).__module__.startswith("torchao"):
        return
    plain = [weight.get_original_weight() if hasattr(weight, "get_original_weight") else weight.dequantize()]
    plain += [weight.qdata.float()] if hasattr(weight, "qdata") else []
    yield from plain
    yield from (copy.t() for copy in plain)


def tensors_in(thing):
    """All tensors of a model: parameters and buffers, their inner tensors, and the state of quantisation."""
    if isinstance(thing, torch.nn.Module):
        for module in thing.modules():
            own = {key: value for key, value in vars(module).items() if key != "_modules"}
            yield from tensors_in(own)
    elif isinstance(thing, torch.Tensor):
        if hasattr(thing, "__tensor_flatten__"):
            yield from tensors_in([getattr(thing, name) for name in thing.__tensor_flatten__()[0]])
        else:
            yield thing
        yield from tensors_in(getattr(thing, "quant_state", None))
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors_in(part)
    elif isinstance(thing, dict):
        yield from tensors_in(list(thing.values()))
    elif type(thing).__module__.startswith("bitsandbytes"):
        yield from tensors_in(vars(thing))


@pytest.fixture
def spy_on(monkeypatch):
    def spy_on(model):
        spy = Spy(model)
        pack = Engine.pack

        def look(engine, t, region_call, index):
            packed = pack(engine, t, region_call, index)
            if isinstance(packed, Ticket):
                spy.look(t)
            return packed

        monkeypatch.setattr(Engine, "pack", look)
        return spy

    return spy_on


def check_trains_the_same(folder, kind, settings, spy_on):
    """No weight moves. Returns the moved tensors, and the statistics."""
    plain = train(adapted(kind, folder))
    model = adapted(kind, folder)
    handle = ebbtide.offload(model, **settings)
    spy = spy_on(model)
    assert same(train(model), plain)
    assert spy.weights == []
    stats = handle.stats()
    handle.remove()
    return spy, stats


@pytest.mark.parametrize("settings", [ALL, SELECTIVE], ids=["everything", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_unchanged_and_no_weight_moves(saved, spy_on, kind, settings):
    spy, stats = check_trains_the_same(saved, kind, settings, spy_on)
    assert spy.moved > 0
    assert stats.out.nbytes > 0
    assert stats.kept[Reason.PARAMETER].count > 0


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("kind", ["dora", "bitsandbytes nf4", "torchao int8"])
def test_adapters_train_unchanged_with_a_planner(saved, spy_on, kind, settings):
    check_trains_the_same(saved, kind, settings, spy_on)


@pytest.mark.parametrize("kind", ["torchao int8", "torchao int4"])
def test_weights_expanded_by_torchao_are_expanded_again_in_a_recomputation(saved, spy_on, kind):
    """Only the graph keeps the expanded weights, so mode "all" moves them too."""
    everything, stats = check_trains_the_same(saved, kind, ALL, spy_on)
    assert everything.copies > 0
    assert Reason.HELD not in stats.kept
    selective, _ = check_trains_the_same(saved, kind, SELECTIVE, spy_on)
    assert selective.copies == 0


def test_inputs_that_bitsandbytes_keeps_itself_are_learned_to_stay(saved, spy_on):
    """The 8-bit product holds on to inputs where no hook sees them; the 4-bit product does not."""
    _, stats = check_trains_the_same(saved, "bitsandbytes int8", ALL, spy_on)
    assert stats.kept[Reason.HELD].count > 0
    _, stats = check_trains_the_same(saved, "bitsandbytes nf4", ALL, spy_on)
    assert Reason.HELD not in stats.kept


@pytest.mark.parametrize("make", [compat.get_lora_act_offloading_ctx_manager, ebbtide.offload_activations])
@pytest.mark.parametrize("kind", ["lora", "bitsandbytes nf4", "torchao int8"])
def test_adapters_train_unchanged_in_contexts(monkeypatch, saved, spy_on, kind, make):
    monkeypatch.setattr(compat.OffloadActivations, "settings", {"store": "mock"})
    plain = train(adapted(kind, saved))
    model = adapted(kind, saved)
    if make is ebbtide.offload_activations:
        context = ebbtide.offload_activations(**ALL)
        context.register_weights(model)
    else:
        context = make(model, min_offload_size=1, max_fwd_stash_size=1)
    spy = spy_on(model)
    assert same(train(model, lambda: context), plain)
    assert spy.weights == []
    assert spy.moved > 0


@pytest.mark.parametrize("kind", ["bitsandbytes nf4", "bitsandbytes int8"])
def test_trls_switch_with_qlora(monkeypatch, tmp_path, saved, spy_on, kind):
    def trained(activation_offloading):
        arguments = trl.SFTConfig(
            **few_steps(tmp_path),
            max_length=64,
            gradient_checkpointing=False,
            activation_offloading=activation_offloading,
        )
        trainer = trl.SFTTrainer(
            adapted(kind, saved), arguments, train_dataset=rows("text"), processing_class=tokenizer()
        )
        spy = spy_on(trainer.model)
        trainer.train()
        return trainer, spy

    monkeypatch.setattr(compat.OffloadActivations, "settings", {"store": "mock"})
    with compat.install("trl"):
        ours, spy = trained(True)
    plain, _ = trained(False)
    assert spy.weights == []
    assert spy.moved > 0
    assert len(losses_of(ours)) == 3
    assert losses_of(ours) == losses_of(plain)
    assert same(*([p for p in each.model.parameters() if p.requires_grad] for each in (ours, plain)))
