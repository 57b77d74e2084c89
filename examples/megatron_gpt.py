"""Megatron-Core's GPT in an interleaved pipeline: ebbtide moves the modules that --offload-modules names.

torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py

Needs megatron-core; without TransformerEngine, by the layers of Megatron's local specification. On GPUs.
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ebbtide.integrations.megatron import offload

WORDS, LENGTH, MICROBATCHES, CHUNKS = 128, 32, 4, 2
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
# Leave these out for a large model.
tiny = {"min_bytes": 1, "window": "1KiB", "store": "host" if torch.accelerator.is_available() else "mock"}

if torch.accelerator.is_available():
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
ranks = dist.get_world_size()
parallel_state.initialize_model_parallel(
    pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=CHUNKS
)
model_parallel_cuda_manual_seed(0)
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=2 * ranks * CHUNKS, hidden_size=64, num_attention_heads=4, normalization="RMSNorm",
    pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=CHUNKS, pipeline_dtype=torch.bfloat16,
    finalize_model_grads_func=finalize_model_grads, deallocate_pipeline_outputs=True, batch_p2p_comm=False,
    use_cpu_initialization=True, persist_layer_norm=False, gradient_accumulation_fusion=False,
    bias_dropout_fusion=False, masked_softmax_fusion=False, **BF16,
)  # fmt: skip


def chunk(number):
    """A part of the model, in Megatron's wrappers."""
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=number)
    module = GPTModel(
        config, layers, vocab_size=WORDS, max_sequence_length=LENGTH, position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        share_embeddings_and_output_weights=False, vp_stage=number,
    )  # fmt: skip
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return DistributedDataParallel(config, settings, Float16Module(config, module.cuda()))


def forward(batches, model):
    words = next(batches).cuda()
    positions = torch.arange(LENGTH, device=words.device).unsqueeze(0)
    future = torch.ones(1, 1, LENGTH, LENGTH, device=words.device).tril() < 0.5
    losses = model(words, positions, future, labels=words)
    return losses, lambda each: (each.mean(), {"loss": each.detach().mean()})


model = [chunk(number) for number in range(CHUNKS)]
settings = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, **BF16)
optimizer = get_megatron_optimizer(settings, model)
# Without modules=, the modules and sizes of Megatron's own arguments; or recipe="selective" for all layers.
offloaded = offload(model, modules=["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"], **tiny)

for step in range(4):
    seed = torch.Generator().manual_seed(step)
    batches = torch.randint(WORDS, (MICROBATCHES, 1, LENGTH), generator=seed)
    for each in model:
        each.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=[iter(batches) for _ in model], model=model,
        num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    optimizer.step()
    if losses:
        print(f"step {step}: loss {torch.stack([each['loss'] for each in losses]).mean().item():.4f}")

moved_bytes = sum(handle.stats().out.nbytes for handle in offloaded.handles)
print(f"rank {dist.get_rank()}: {moved_bytes / 2**20:.2f} MiB moved out")
offloaded.remove()
dist.destroy_process_group()
