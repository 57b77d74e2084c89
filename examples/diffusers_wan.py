"""A few steps of flow matching on a tiny Wan transformer of diffusers, with and without offloaded activations.

python examples/diffusers_wan.py --activation-offloading
python examples/diffusers_wan.py --activation-offloading --offload-budget 0.8
python examples/diffusers_wan.py --profile profile.json && ebbtide plan profile.json --pareto

Without the flag the script trains without ebbtide.
"""

import argparse

import torch
from diffusers import WanTransformer3DModel

import ebbtide
from ebbtide.integrations.diffusers import add_arguments, offload_transformers, settings_of

FRAMES, SIZE, TOKENS = 5, 16, 32

# No settings are needed on a GPU: a planner moves as much as costs no time. A tiny model on the CPU needs some.
ANYWHERE = {} if torch.accelerator.is_available() else {"store": "mock", "mode": "all", "window": "1KiB"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", help="measure the memory of a step before training, and write it here")
    add_arguments(parser)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transformer = _transformer().to(device).train()
    if args.profile is not None:
        profile = ebbtide.measure(transformer, _batch(device)[0], store="mock", min_bytes=1)
        profile.save(args.profile)
        print(profile)

    settings = settings_of(args) or ANYWHERE
    offloaded = offload_transformers(
        transformer, **settings, min_bytes="16KiB"
    )  # saved tensors of a small model are small
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3)
    for step in range(args.steps):
        given, target = _batch(device)
        loss = torch.nn.functional.mse_loss(transformer(**given, return_dict=False)[0], target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(offloaded.report())
    print(offloaded.memory_profile())
    offloaded.remove()


def _transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=32,
        ffn_dim=128,
        num_layers=4,
        rope_max_seq_len=64,
    )


def _batch(device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of the transformer, and its target: the direction from latents to noise."""
    latents, noise = (torch.randn(1, 4, FRAMES, SIZE, SIZE, device=device) for _ in range(2))
    sigma = torch.rand(1, device=device)
    noisy = (1 - sigma) * latents + sigma * noise
    text = torch.randn(1, TOKENS, 64, device=device)
    return {"hidden_states": noisy, "timestep": sigma * 1000, "encoder_hidden_states": text}, noise - latents


if __name__ == "__main__":
    main()
