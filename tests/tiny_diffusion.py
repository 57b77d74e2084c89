"""Tiny diffusion transformers of diffusers with random weights, and a training loop like the scripts of diffusers."""

import diffusers
import torch

WIDTH = {"num_attention_heads": 2, "attention_head_dim": 16}


def wan(layers=2):
    return diffusers.WanTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=64,
        num_layers=layers,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )


def flux():
    return diffusers.FluxTransformer2DModel(
        **WIDTH,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 6, 6],
    )


def cogvideox():
    return diffusers.CogVideoXTransformer3DModel(
        **WIDTH,
        in_channels=4,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=6,
    )


def ltx():
    return diffusers.LTXVideoTransformer3DModel(
        **WIDTH, in_channels=4, out_channels=4, cross_attention_dim=32, num_layers=2, caption_channels=16
    )


MAKES = {"wan": wan, "flux": flux, "cogvideox": cogvideox, "ltx": ltx}


def seeded(kind):
    torch.manual_seed(0)
    return MAKES[kind]().train()


def batch(kind, seed):
    """Return keyword arguments of the transformer; the first is the noisy latents."""
    torch.manual_seed(seed)
    text, timestep = torch.randn(2, 6, 16), torch.rand(2)
    if kind == "flux":
        ids = {"txt_ids": torch.zeros(6, 3), "img_ids": torch.randint(4, (16, 3)).float()}
        return {
            "hidden_states": torch.randn(2, 16, 4),
            "pooled_projections": torch.randn(2, 16),
            "encoder_hidden_states": text,
            "timestep": timestep,
            **ids,
        }
    if kind == "ltx":
        size = {"num_frames": 2, "height": 4, "width": 4, "encoder_attention_mask": torch.ones(2, 6)}
        latents = torch.randn(2, 32, 4)
        return {"hidden_states": latents, "encoder_hidden_states": text, "timestep": timestep * 1000, **size}
    frames = (2, 4) if kind == "cogvideox" else (4, 2)  # frames and channels, in the order of the model
    return {
        "hidden_states": torch.randn(2, *frames, 8, 8),
        "encoder_hidden_states": text,
        "timestep": (timestep * 1000).long(),
    }


def train(model, kind, steps=5, transformer=None):
    """Return losses of a few steps of flow matching. `transformer`: a wrapper to call instead of `model`."""
    call = transformer or model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for seed in range(steps):
        inputs = batch(kind, seed)
        prediction = call(**inputs, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(prediction.float(), torch.ones_like(inputs["hidden_states"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert all(p.grad.device == p.device for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(model, twin):
    pairs = zip(model.state_dict().items(), twin.state_dict().items(), strict=True)
    return all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)
