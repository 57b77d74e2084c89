"""Training a video transformer with the shapes of Wan 1.3B, all modes in one process on one model.

Modes: plain, planned without a budget, and planned for three quarters of the plain peak, by blocks and by parts of blocks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.measure import steps
from benchmarks.modes import prepared
from benchmarks.planning import about, planned, settle
from benchmarks.turns import in_turns
from benchmarks.workloads import training
from ebbtide._utils.sizes import GIB

_ROUNDS = 2
_BUDGET = 0.749  # share of the plain peak, including parameters and gradients
# Only some parts of a block are cheap to recompute: as regions they are recomputed without the rest of the block.
_PARTS = ("blocks.*.attn1", "blocks.*.ffn")


@dataclass(frozen=True)
class Shape:
    """Sizes of a video transformer and its latents; patches are 1 x 2 x 2."""

    layers: int
    heads: int
    head_dim: int
    ffn: int
    text_dim: int
    text_tokens: int
    frames: int
    height: int
    width: int


WAN_1B = Shape(30, 12, 128, 8960, 4096, 512, frames=16, height=64, width=64)  # 16384 tokens
TINY = Shape(3, 2, 16, 64, 32, 8, frames=2, height=8, width=8)
_CHANNELS = 16


def _wan(shape: Shape, device: torch.device) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Make Wan's transformer of diffusers and the loss of flow matching, without a pipeline."""
    from diffusers import WanTransformer3DModel

    make = functools.partial(
        WanTransformer3DModel,
        num_attention_heads=shape.heads,
        attention_head_dim=shape.head_dim,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        text_dim=shape.text_dim,
        freq_dim=256,
        ffn_dim=shape.ffn,
        num_layers=shape.layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    model = training(make, device)
    like = {"device": device, "dtype": torch.bfloat16}
    size = (1, _CHANNELS, shape.frames, shape.height, shape.width)
    latents, noise = torch.randn(size, **like), torch.randn(size, **like)
    sigma = torch.full((1,), 0.7, **like)
    noisy, target = (1 - sigma) * latents + sigma * noise, (noise - latents).float()
    text = torch.randn(1, shape.text_tokens, shape.text_dim, **like)

    def loss_of() -> torch.Tensor:
        prediction = model(hidden_states=noisy, timestep=sigma * 1000, encoder_hidden_states=text, return_dict=False)[0]
        return torch.nn.functional.mse_loss(prediction.float(), target)

    return model, loss_of


def measure_wan(shape: Shape, device: torch.device, count: int, **settings: object) -> dict[str, object]:
    """Measure all modes in turns, with the final plans of the planner.

    Args:
        count: half the number of timed steps of each mode.
        settings: settings of `ebbtide.offload`.
    """
    model, loss_of = _wan(shape, device)
    with prepared("nothing", model) as context:
        steps(model, loss_of, context, 1)  # allocates gradients
        plain_bytes = steps(model, loss_of, context, 1).steps[0].act_peak_bytes
    plans = {"auto": settle(model, loss_of, None, **settings)}
    base_bytes = plans["auto"].profile.base_bytes
    if plain_bytes > 0:
        budget_bytes = int(_BUDGET * (base_bytes + plain_bytes))
        plans["three quarters"] = settle(model, loss_of, budget_bytes, **settings)
        plans["three quarters, by parts"] = settle(model, loss_of, budget_bytes, regions=_PARTS, **settings)
    modes = {"nothing": functools.partial(prepared, "nothing", model)}
    modes |= {key: functools.partial(planned, model, settled.plan, **settings) for key, settled in plans.items()}
    measured = in_turns(model, loss_of, modes, count, _ROUNDS)
    for key, settled in plans.items():
        print("Wan", key, settled.plan, flush=True)
    return {
        "modes": measured,
        "base_gib": base_bytes / GIB,
        "plans": {key: about(settled, base_bytes) for key, settled in plans.items()},
        "memory": str(plans["auto"].profile).splitlines(),
    }
