"""The workloads of the figures: random weights, random tokens, the shapes of well-known models."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Workload:
    """A model's shape and a batch. `tiny` is the same with sizes for trying the scripts without an accelerator."""

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
        """Long enough for the link to carry most of what is dear."""
        return self.batch * self.tokens >= 32768

    @property
    def input_bytes(self) -> int:
        """Of all blocks together."""
        return self.layers * self.batch * self.tokens * self.hidden * 2


A = Workload("A", 2048, 8192, 16, 32, 8, 32000, batch=4, tokens=4096)
A_COMPILED = Workload("A-compiled", 2048, 8192, 16, 32, 8, 32000, batch=4, tokens=4096, is_compiled=True)
B = Workload("B", 4096, 14336, 16, 32, 8, 32000, batch=1, tokens=8192)
B_LONG = Workload("B-32k", 4096, 14336, 16, 32, 8, 32000, batch=1, tokens=32768)
TINY = Workload("tiny", 64, 128, 4, 4, 2, 97, batch=2, tokens=64)

WORKLOADS = {workload.name: workload for workload in (A, A_COMPILED, B, B_LONG, TINY)}


def build(workload: Workload, device: torch.device) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The model in training mode (bf16), and a function that runs its forward and returns the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
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
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    if workload.is_compiled:
        for layer in model.model.layers:
            layer.compile()
    ids = torch.randint(workload.vocab, (workload.batch, workload.tokens), device=device)
    return model, lambda: model(input_ids=ids, labels=ids).loss
