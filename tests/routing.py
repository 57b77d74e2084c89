"""A mixture of experts, with maps of tokens to experts that make the host wait for the device, and with ebbtide's."""

import importlib
import sys
from unittest import mock

import torch
from torch import nn

MEGATRON = [
    "megatron",
    "megatron.core",
    "megatron.core.parallel_state",
    "megatron.core.transformer",
    "megatron.core.transformer.moe",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.transformer_config",
]


def sync_free_maps():
    """`indices_to_multihot` of the adapter for Megatron, which the function itself does not need."""
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in MEGATRON}):
        return importlib.import_module("ebbtide.integrations.megatron").indices_to_multihot


def maps_by_masks(indices, probs, num_experts):
    """Equal maps, by selections as in Megatron."""
    shape, is_routed = (len(indices), num_experts), indices != -1
    experts = indices[is_routed]
    tokens = torch.arange(len(indices), device=indices.device).repeat_interleave(is_routed.sum(1))
    routing = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    routing[tokens, experts] = True
    chosen = torch.zeros(shape, device=indices.device)
    chosen[tokens, experts] = probs[is_routed]
    return routing, chosen


class Routed(nn.Module):
    """Each token goes to two experts at most, by the function `maps`."""

    def __init__(self, maps, width=64, count=4):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.maps = maps

    def route(self, x):
        probs, indices = self.router(x).softmax(-1).topk(2)
        return self.maps(indices.masked_fill(probs < 0.25, -1), probs, len(self.experts))

    def forward(self, x):
        routing, chosen = self.route(x)
        outputs = [expert(x) * chosen[:, k, None] for k, expert in enumerate(self.experts)]
        return torch.stack(outputs).sum(0).masked_fill(~routing.any(-1, keepdim=True), 0)


class Waiting(Routed):
    """Reads the device in further lines."""

    def forward(self, x):
        routing, chosen = self.route(x)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = routing[:, k].nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]) * chosen[rows, k, None])
        tokens = routing.sum(0).tolist()
        share = tokens[0] / sum(tokens)
        if chosen.max() > 2:
            raise AssertionError
        likely = y[chosen.max(-1).values > 0.5]
        scales = torch.tensor([share, 1.0], device=x.device)
        return y * scales.sum() + likely.sum() * chosen.detach().mean().item()
