"""Models of many kinds for plans, with random weights: full size for an accelerator, and tiny for a CPU.

No plan, threshold or option of ebbtide may be chosen for one of these models.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Inputs = dict[str, Any]


@dataclass(frozen=True)
class ZooModel:
    """A model and its training step.

    Attributes:
        make: makes the model.
        inputs: makes the keyword arguments of a forward on a device, floating-point tensors in the given dtype.
        blocks: patterns of the modules that checkpointing recomputes one by one.
    """

    make: Callable[[], torch.nn.Module]
    inputs: Callable[[torch.device, torch.dtype], Inputs]
    blocks: tuple[str, ...]

    def losses(self, model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        """A function that runs a forward, of `model` or of the model it is called with, and returns the loss."""
        inputs = self.inputs(device, dtype)
        target = inputs.pop("target", None)

        def loss_of(called: torch.nn.Module = model) -> torch.Tensor:
            if target is None:
                return called(**inputs).loss
            return functional.mse_loss(called(**inputs, return_dict=False)[0].float(), target)

        return loss_of


Zoo = Callable[[bool], ZooModel]


def _tokens(vocab: int, batch: int, tokens: int, device: torch.device, _: torch.dtype) -> Inputs:
    ids = torch.randint(vocab, (batch, tokens), device=device)
    return {"input_ids": ids, "labels": ids}


def _attention(hidden: int, heads: int, kv_heads: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": 32000,
        "attn_implementation": "sdpa",
        "use_cache": False,
        **more,
    }


def _llama(sizes: dict[str, Any], batch: int, tokens: int, tiny: bool) -> ZooModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = _attention(32, 4, 2, 4, intermediate_size=64)
    config = LlamaConfig(**(small if tiny else sizes), max_position_embeddings=tokens)
    batch, tokens = (2, 16) if tiny else (batch, tokens)
    return ZooModel(
        lambda: LlamaForCausalLM(config), functools.partial(_tokens, 32000, batch, tokens), ("model.layers.*",)
    )


_A = _attention(2048, 32, 8, 16, intermediate_size=8192)
_B = _attention(4096, 32, 8, 16, intermediate_size=14336)


def _mixtral(tiny: bool) -> ZooModel:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = _attention(1024, 16, 8, 12, intermediate_size=3584, num_local_experts=8)
    small = _attention(32, 4, 2, 3, intermediate_size=48, num_local_experts=4)
    config = MixtralConfig(**(small if tiny else sizes), num_experts_per_tok=2, max_position_embeddings=4096)
    inputs = functools.partial(_tokens, 32000, *((2, 16) if tiny else (4, 4096)))
    return ZooModel(lambda: MixtralForCausalLM(config), inputs, ("model.layers.*",))


def _qwen3_moe(tiny: bool) -> ZooModel:
    """Sparse: 8 of 32 experts per token, so routing changes the bytes from step to step."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = _attention(2048, 32, 4, 10, moe_intermediate_size=768, num_experts=32, num_experts_per_tok=8, head_dim=64)
    small = _attention(32, 4, 2, 3, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=4, head_dim=8)
    config = Qwen3MoeConfig(**(small if tiny else sizes), max_position_embeddings=4096)
    inputs = functools.partial(_tokens, 32000, *((2, 16) if tiny else (4, 4096)))
    return ZooModel(lambda: Qwen3MoeForCausalLM(config), inputs, ("model.layers.*",))


def _images(batch: int, pixels: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    images = torch.randn(batch, 3, pixels, pixels, device=device, dtype=dtype)
    return {"pixel_values": images, "labels": torch.randint(10, (batch,), device=device)}


def _vit(tiny: bool) -> ZooModel:
    """ViT-L/16, 128 images of 224 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    pixels, batch = (16, 2) if tiny else (224, 128)
    config = ViTConfig(
        hidden_size=32 if tiny else 1024,
        intermediate_size=48 if tiny else 4096,
        num_hidden_layers=3 if tiny else 24,
        num_attention_heads=4 if tiny else 16,
        patch_size=4 if tiny else 16,
        image_size=pixels,
        num_labels=10,
        attn_implementation="sdpa",
    )
    inputs = functools.partial(_images, batch, pixels)
    return ZooModel(lambda: ViTForImageClassification(config), inputs, ("vit.encoder.layer.*", "vit.layers.*"))


def _swin(tiny: bool) -> ZooModel:
    """Swin-L, 96 images of 224 pixels: stages of two to eighteen blocks, downsampling between them, many small kernels."""
    from transformers import SwinConfig, SwinForImageClassification

    small = {"embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 1, 2, 2], "window_size": 2, "image_size": 64}
    large = {"embed_dim": 192, "depths": [2, 2, 18, 2], "num_heads": [6, 12, 24, 48], "window_size": 7}
    config = SwinConfig(**(small if tiny else large), num_labels=10)
    inputs = functools.partial(_images, *((2, 64) if tiny else (96, 224)))
    return ZooModel(lambda: SwinForImageClassification(config), inputs, ("swin.encoder.layers.*.blocks.*",))


def _convnext(tiny: bool) -> ZooModel:
    """ConvNeXt-L, 96 images of 224 pixels: convolutions, and stages of three to twenty-seven blocks."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    small = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
    large = {"hidden_sizes": [192, 384, 768, 1536], "depths": [3, 3, 27, 3]}
    config = ConvNextConfig(**(small if tiny else large), num_labels=10)
    inputs = functools.partial(_images, *((2, 64) if tiny else (96, 224)))
    blocks = ("convnext.encoder.stages.*.layers.*",)
    return ZooModel(lambda: ConvNextForImageClassification(config), inputs, blocks)


def _resnet(tiny: bool) -> ZooModel:
    """ResNet-152, 192 images of 224 pixels: batch norm, whose buffers each forward changes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 2, 2, 1]}
    config = ResNetConfig(**(small if tiny else {"depths": [3, 8, 36, 3]}), num_labels=10)
    inputs = functools.partial(_images, *((2, 64) if tiny else (192, 224)))
    return ZooModel(lambda: ResNetForImageClassification(config), inputs, ("resnet.encoder.stages.*.layers.*",))


def _wav2vec2(tiny: bool) -> ZooModel:
    """wav2vec 2.0 large, 16 clips of 10 seconds: one convolution holds most of the memory."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "conv_dim": (16,) * 7}
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    config = Wav2Vec2Config(
        **(small if tiny else large),
        num_attention_heads=4 if tiny else 16,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conv_bias=True,
        layerdrop=0.0,
        mask_time_prob=0.0,
        attn_implementation="sdpa",
    )
    batch, samples, labels = (2, 4000, 4) if tiny else (16, 160_000, 60)

    def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "input_values": torch.randn(batch, samples, device=device, dtype=dtype),
            "labels": torch.randint(1, 32, (batch, labels), device=device),
        }

    blocks = ("wav2vec2.feature_extractor.conv_layers.*", "wav2vec2.encoder.layers.*")
    return ZooModel(lambda: Wav2Vec2ForCTC(config), inputs, blocks)


def _whisper(tiny: bool) -> ZooModel:
    """Whisper-large, 16 clips of 30 seconds: bound by the host."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers, heads, ffn, frames, batch, tokens = (2, 4, 48, 32, 2, 8) if tiny else (32, 20, 5120, 1500, 16, 128)
    config = WhisperConfig(
        d_model=32 if tiny else 1280,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=ffn,
        decoder_ffn_dim=ffn,
        max_source_positions=frames,
        num_mel_bins=80,
        vocab_size=64 if tiny else 51866,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation="sdpa",
    )

    def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
        features = torch.randn(batch, 80, 2 * frames, device=device, dtype=dtype)
        return {
            "input_features": features,
            "labels": torch.randint(config.vocab_size, (batch, tokens), device=device),
        }

    blocks = ("model.encoder.layers.*", "model.decoder.layers.*")
    return ZooModel(lambda: WhisperForConditionalGeneration(config), inputs, blocks)


def _t5(tiny: bool) -> ZooModel:
    """T5-large with dropout, 8 sequences of 512 tokens to 512 tokens."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32 if tiny else 1024,
        d_kv=8 if tiny else 64,
        d_ff=48 if tiny else 4096,
        num_layers=2 if tiny else 24,
        num_heads=4 if tiny else 16,
        vocab_size=64 if tiny else 32128,
        decoder_start_token_id=0,
        use_cache=False,
    )
    inputs = functools.partial(_tokens, config.vocab_size, *((2, 16) if tiny else (8, 512)))
    return ZooModel(lambda: T5ForConditionalGeneration(config), inputs, ("encoder.block.*", "decoder.block.*"))


def _mamba2(tiny: bool) -> ZooModel:
    """Twelve layers on the slow path, of many small kernels."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    hidden = 32 if tiny else 1024
    config = Mamba2Config(
        hidden_size=hidden,
        num_heads=8 if tiny else 32,
        head_dim=8 if tiny else 64,
        state_size=16 if tiny else 128,
        n_groups=1,
        chunk_size=16 if tiny else 256,
        num_hidden_layers=3 if tiny else 12,
        vocab_size=32000,
        use_cache=False,
    )
    inputs = functools.partial(_tokens, 32000, *((2, 16) if tiny else (2, 2048)))
    return ZooModel(lambda: Mamba2ForCausalLM(config), inputs, ("backbone.layers.*",))


def _sd3(tiny: bool) -> ZooModel:
    """The transformer of Stable Diffusion 3: 24 blocks, 4 images of 4096 tokens."""
    from diffusers import SD3Transformer2DModel

    size, batch, text_dim, pooled = (8, 2, 32, 16) if tiny else (128, 4, 4096, 2048)
    sizes = {
        "sample_size": size,
        "num_layers": 3 if tiny else 24,
        "attention_head_dim": 8 if tiny else 64,
        "num_attention_heads": 4 if tiny else 24,
        "caption_projection_dim": 32 if tiny else 1536,
        "joint_attention_dim": text_dim,
        "pooled_projection_dim": pooled,
        "pos_embed_max_size": 16 if tiny else 192,
    }

    def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        return {
            "hidden_states": torch.randn(batch, 16, size, size, **like),
            "encoder_hidden_states": torch.randn(batch, 6 if tiny else 154, text_dim, **like),
            "pooled_projections": torch.randn(batch, pooled, **like),
            "timestep": torch.full((batch,), 500.0, **like),
            "target": torch.randn(batch, 16, size, size, device=device),
        }

    return ZooModel(lambda: SD3Transformer2DModel(**sizes), inputs, ("transformer_blocks.*",))


def _unet(tiny: bool) -> ZooModel:
    """The U-Net of Stable Diffusion 1.5, 32 latents of 64 x 64: a few blocks of several GiB each."""
    from diffusers import UNet2DConditionModel

    size, batch, text_dim = (16, 2, 32) if tiny else (64, 32, 768)
    sizes = {
        "sample_size": size,
        "cross_attention_dim": text_dim,
        "block_out_channels": (16, 32, 32, 32) if tiny else (320, 640, 1280, 1280),
        "attention_head_dim": 4 if tiny else 8,
        "norm_num_groups": 8 if tiny else 32,
    }

    def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        return {
            "sample": torch.randn(batch, 4, size, size, **like),
            "timestep": torch.full((batch,), 500, device=device),
            "encoder_hidden_states": torch.randn(batch, 7 if tiny else 77, text_dim, **like),
            "target": torch.randn(batch, 4, size, size, device=device),
        }

    return ZooModel(
        lambda: UNet2DConditionModel(**sizes), inputs, ("down_blocks.*.resnets.*", "down_blocks.*.attentions.*",
        "mid_block.resnets.*", "mid_block.attentions.*", "up_blocks.*.resnets.*", "up_blocks.*.attentions.*"),
    )  # fmt: skip


def _wan(tiny: bool) -> ZooModel:
    """The transformer of a video model with the shapes of Wan 1.3B, 16384 tokens."""
    from diffusers import WanTransformer3DModel

    size, text_dim = ((1, 16, 2, 8, 8), 32) if tiny else ((1, 16, 16, 64, 64), 4096)
    sizes = {
        "num_attention_heads": 2 if tiny else 12,
        "attention_head_dim": 16 if tiny else 128,
        "text_dim": text_dim,
        "freq_dim": 256,
        "ffn_dim": 64 if tiny else 8960,
        "num_layers": 3 if tiny else 30,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
    }

    def inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        return {
            "hidden_states": torch.randn(size, **like),
            "timestep": torch.full((1,), 700.0, **like),
            "encoder_hidden_states": torch.randn(1, 8 if tiny else 512, text_dim, **like),
            "target": torch.randn(size, device=device),
        }

    return ZooModel(lambda: WanTransformer3DModel(in_channels=16, out_channels=16, **sizes), inputs, ("blocks.*",))


def _lora(in_4_bits: bool, tiny: bool) -> ZooModel:
    """Adapters of rank 16 on the frozen Llama A, in 4 bits or not."""
    from peft import LoraConfig, get_peft_model

    base = _llama(_A, 4, 4096, tiny)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

    def make() -> torch.nn.Module:
        model: Any = base.make()
        if in_4_bits:
            _quantise(model, linear)
        return get_peft_model(model, LoraConfig(r=4 if tiny else 16, target_modules=linear))

    return ZooModel(make, base.inputs, ("base_model.model.model.layers.*",))


def _quantise(model: torch.nn.Module, names: list[str]) -> None:
    """Replace the linear layers `names` by layers in 4 bits of bitsandbytes, which quantise when moved to a device."""
    import bitsandbytes

    for module in list(model.modules()):
        for name in names:
            linear = getattr(module, name, None)
            if isinstance(linear, torch.nn.Linear):
                four = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
                four.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, four.to(linear.weight.device))


ZOO: dict[str, Zoo] = {
    "Llama A": functools.partial(_llama, _A, 4, 4096),
    "Llama B-32k": functools.partial(_llama, _B, 1, 32768),
    "Mixtral": _mixtral,
    "Qwen3-MoE": _qwen3_moe,
    "ViT-L": _vit,
    "Swin-L": _swin,
    "ConvNeXt-L": _convnext,
    "ResNet-152": _resnet,
    "wav2vec 2.0": _wav2vec2,
    "Whisper-large": _whisper,
    "T5-large": _t5,
    "Mamba2": _mamba2,
    "SD3": _sd3,
    "SD1.5 U-Net": _unet,
    "Wan": _wan,
    "LoRA": functools.partial(_lora, False),
    "LoRA in 4 bits": functools.partial(_lora, True),
}
"""Models by name; called with True for the tiny version."""


def built(name: str, device: torch.device, *, tiny: bool) -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    """A model in training mode and its loss, as by `ZooModel.losses`: bf16 and full size, or float32 and tiny."""
    dtype = torch.float32 if tiny else torch.bfloat16
    zoo = ZOO[name](tiny)
    torch.manual_seed(0)
    with torch.device(device):
        model = zoo.make()
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    for b in model.buffers():
        if b.is_floating_point() and not tiny:
            b.data = b.data.to(dtype)
    return model.train(), zoo.losses(model, device, dtype)
