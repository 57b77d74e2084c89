"""Workloads: random weights and random tokens with the shapes of well-known models."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Workload:
    """Sizes of a Llama and of a batch. `tiny` is for a trial without an accelerator."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    batch: int
    tokens: int
    is_compiled: bool = False

    @property
    def is_long(self) -> bool:
        """Whether the link has time to carry most outputs of expensive operators."""
        return self.batch * self.tokens >= 32768

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs of all blocks."""
        return self.layers * self.batch * self.tokens * self.hidden * 2


A = Workload("A", 2048, 8192, 16, 32, 8, 32000, batch=4, tokens=4096)
A_COMPILED = Workload("A-compiled", 2048, 8192, 16, 32, 8, 32000, batch=4, tokens=4096, is_compiled=True)
B = Workload("B", 4096, 14336, 16, 32, 8, 32000, batch=1, tokens=8192)
B_LONG = Workload("B-32k", 4096, 14336, 16, 32, 8, 32000, batch=1, tokens=32768)
TINY = Workload("tiny", 64, 128, 4, 4, 2, 97, batch=2, tokens=64)

WORKLOADS = {workload.name: workload for workload in (A, A_COMPILED, B, B_LONG, TINY)}


def build(workload: Workload, device: torch.device) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Make the model in training mode (bf16), and a function that runs forward and returns the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=workload.hidden,
        intermediate_size=workload.ffn,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        num_key_value_heads=workload.kv_heads,
        vocab_size=workload.vocab,
        max_position_embeddings=workload.tokens,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = training(lambda: LlamaForCausalLM(config), device)
    if workload.is_compiled:
        for layer in model.model.layers:
            layer.compile()
    ids = torch.randint(workload.vocab, (workload.batch, workload.tokens), device=device)
    return model, lambda: model(input_ids=ids, labels=ids).loss


def training(make: Callable[[], torch.nn.Module], device: torch.device) -> torch.nn.Module:
    """Call `make` with a fixed seed. Returns the model in bf16 and in training mode."""
    torch.manual_seed(0)
    with torch.device(device):
        return make().to(torch.bfloat16).train()


Losses = Callable[[float], Callable[[], torch.Tensor]]
"""Function of a share of the full batch that returns a function for the loss of the smaller batch."""


@dataclass(frozen=True)
class PlannedWorkload:
    """A workload for plans.

    Attributes:
        build: makes the model in training mode on a device, and the losses of its batches.
        neighbours: modes without ebbtide that fit the device.
        budgets_gib: budgets for activations, besides the peak of checkpointing.
        predictions: number of plans on the Pareto curve to compare with measured steps.
        rounds: rounds in which the modes take turns.
        precise: plans that a bar compares with plain steps to the thousandth.
    """

    build: Callable[[torch.device], tuple[torch.nn.Module, Losses]]
    neighbours: tuple[str, ...] = ("nothing", "checkpoint")
    budgets_gib: tuple[int, ...] = ()
    predictions: int = 6
    rounds: int = 5
    precise: tuple[str, ...] = ()

    @property
    def fits_plain(self) -> bool:
        return "nothing" in self.neighbours


def _llama(workload: Workload, device: torch.device) -> tuple[torch.nn.Module, Losses]:
    model, _ = build(workload, device)
    return model, _token_losses(model, workload.vocab, workload.batch, workload.tokens, device)


def _token_losses(model: torch.nn.Module, vocab: int, batch: int, tokens: int, device: torch.device) -> Losses:
    def loss_of(share: float) -> Callable[[], torch.Tensor]:
        ids = torch.randint(vocab, (batch, int(tokens * share)), device=device)
        return lambda: model(input_ids=ids, labels=ids).loss

    return loss_of


def _moe(device: torch.device) -> tuple[torch.nn.Module, Losses]:
    """Make a Mixtral of 12 layers with 8 experts, 2 per token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = training(lambda: MixtralForCausalLM(config), device)
    return model, _token_losses(model, 32000, 4, 4096, device)


def _vit(device: torch.device) -> tuple[torch.nn.Module, Losses]:
    """Make a ViT-L/16 for 128 images of 224 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_labels=1000,
        attn_implementation="sdpa",
    )
    model = training(lambda: ViTForImageClassification(config), device)

    def loss_of(share: float) -> Callable[[], torch.Tensor]:
        count = int(128 * share)
        pixels = torch.randn(count, 3, 224, 224, device=device, dtype=torch.bfloat16)
        labels = torch.randint(1000, (count,), device=device)
        return lambda: model(pixel_values=pixels, labels=labels).loss

    return model, loss_of


PLANNED = {
    "A": PlannedWorkload(functools.partial(_llama, A), budgets_gib=(17, 24, 40), precise=("40 GiB",)),
    "A-compiled": PlannedWorkload(functools.partial(_llama, A_COMPILED)),
    "B-32k": PlannedWorkload(functools.partial(_llama, B_LONG), neighbours=("checkpoint",), predictions=5, rounds=3),
    "MoE": PlannedWorkload(_moe),
    "ViT": PlannedWorkload(_vit),
    "tiny": PlannedWorkload(functools.partial(_llama, TINY), budgets_gib=(1,)),
}
