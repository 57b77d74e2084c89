"""Tiny models of Megatron-Core on the CPU, trained by Megatron's schedules, optimizers and wrappers."""

import contextlib
import importlib.util
import sys
import types
from unittest import mock

import torch

if importlib.util.find_spec("triton") is None:
    # From 0.19 on Megatron's kernels for a stash of experts' activations, which no test uses, import triton at once.
    sys.modules.setdefault("megatron.core.transformer.moe.ops.paged_stash", mock.MagicMock())

TOKENS, WIDTH, WORDS = 12, 32, 64
MICROBATCHES = 4


class NoStream:
    """A stream and an event of the CPU, which does everything in order."""

    def wait_stream(self, *_):
        """Nothing to wait for."""

    wait_event = record = wait = synchronize = wait_stream

    def record_event(self, *_):
        return self


@contextlib.contextmanager
def megatron_on_the_cpu():
    """The CPU stands in for CUDA: for the state of the default generator, for streams, and the device of new tensors.

    Megatron asks for CUDA by literals; no file of Megatron is changed.
    """
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def state(*args, **kwargs):
        return torch.get_rng_state()

    def set_state(state, *args, **kwargs):
        torch.default_generator.set_state(state)

    def norm(cls, config, hidden_size, eps=1e-5, **_):
        """As Megatron's, which refuses parts of a sequence: the gradients of the weights have to be summed there."""
        made = torch.nn.RMSNorm(hidden_size, eps)
        for weight in made.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return made

    type_of = torch.Tensor.type

    def cuda_type_of(self, *args, **kwargs):
        """The distributed optimizer takes names of CUDA's types only."""
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    def moved(t, as_numpy=False, **_):
        return t.numpy() if as_numpy and t is not None else t

    def on_cpu(make):
        def made(*args, **kwargs):
            device = kwargs.get("device")
            if isinstance(device, int) or str(device).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    with contextlib.ExitStack() as patches:

        def patch(owner, **names):
            for name, value in names.items():
                patches.enter_context(mock.patch.object(owner, name, value, create=True))

        patch(megatron_random, _get_cuda_rng_state=state, _set_cuda_rng_state=set_state)
        patch(
            torch.cuda, get_rng_state=state, set_rng_state=set_state,
            manual_seed=torch.default_generator.manual_seed, current_device=lambda: torch.device("cpu"),
            synchronize=lambda *_: None, current_stream=lambda *_: NoStream(), Stream=lambda *_, **__: NoStream(),
            Event=lambda *_, **__: NoStream(),
            stream=lambda _: contextlib.nullcontext(),
        )  # fmt: skip
        patch(torch.Tensor, type=cuda_type_of, cuda=lambda self, *_, **__: self, record_stream=lambda *_: None)
        for name in ("zeros", "ones", "empty", "tensor", "full", "arange", "rand", "randn"):
            patch(torch, **{name: on_cpu(getattr(torch, name))})
        # 0.16 asks TransformerEngine for its state of fp8 without fp8 too, when it recomputes norms.
        patch(
            megatron_random, FP8GlobalStateManager=types.SimpleNamespace(is_fp8_enabled=lambda: False),
            activation_recompute_forward=lambda **_: contextlib.nullcontext(),
            fp8_autocast=lambda **_: contextlib.nullcontext(),
        )  # fmt: skip
        patch(torch_norm.WrappedTorchNorm, __new__=norm)
        for owner in (moe_utils, token_dispatcher):  # the sizes of the parts that experts exchange
            patch(owner, maybe_move_tensor_to_cpu=moved)
        if not hasattr(moe_utils, "te_general_gemm"):
            patch(moe_utils, te_general_gemm=None)  # 0.16 reads the name without TransformerEngine too
        yield


def chunks_of(layers=4, moe=False, **settings):
    """The rank's chunks of a GPT with weights by seed."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    mixture = {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": WIDTH, "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.01,
        "moe_router_load_balancing_type": "aux_loss",
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }  # fmt: skip
    config = TransformerConfig(
        **{
            "num_layers": layers, "hidden_size": WIDTH, "num_attention_heads": 4, "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False, "persist_layer_norm": False, "bias_dropout_fusion": False,
            "masked_softmax_fusion": False, "apply_rope_fusion": False, "normalization": "RMSNorm",
            "batch_p2p_comm": False, "pipeline_dtype": torch.float32, "deallocate_pipeline_outputs": True,
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual,
            **(mixture if moe else {}), **settings,
        }
    )  # fmt: skip
    specs = {
        stage: get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
        for stage in (range(virtual) if virtual else [None])
    }
    return [
        GPTModel(
            config, specs[stage], vocab_size=WORDS, max_sequence_length=TOKENS, position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False, vp_stage=stage,
        )
        for stage in specs
    ]  # fmt: skip


def wrapped(chunks):
    """The chunks in Float16Module and DDP, and Megatron's distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    inner = [Float16Module(config, chunk) for chunk in chunks]
    outer = [DistributedDataParallel(config, settings, chunk) for chunk in inner]
    kind = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    return outer, get_megatron_optimizer(kind, outer)


def train_chunks(chunks, optimizer=None, steps=5):
    """Losses on the last stage, and gradients of each step, or weights after each step of `optimizer`, as bytes."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from support import bits

    def forward_step(batches, model):
        words = next(batches)
        positions = torch.arange(TOKENS)[None]
        mask = torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5
        return model(words, positions, mask, labels=words), lambda losses: (
            losses.mean(),
            {"loss": losses.detach().mean()},
        )

    found = []
    for step in range(steps):
        batches = [
            torch.randint(WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(MICROBATCHES * step + number))
            for number in range(MICROBATCHES)
        ]
        for chunk in chunks:
            chunk.zero_grad_buffer() if optimizer else chunk.zero_grad()
        if optimizer:
            optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=[iter(batches) for _ in chunks],
            model=chunks if len(chunks) > 1 else chunks[0], num_microbatches=MICROBATCHES, seq_length=TOKENS,
            micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        if optimizer:
            optimizer.step()
        found += [bits(each["loss"]) for each in losses]
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            found.append(bits(parameter if optimizer else parameter.grad))
    return found
