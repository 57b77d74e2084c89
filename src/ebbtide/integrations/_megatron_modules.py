"""Modules of a Megatron-Core model by the words of `--offload-modules`."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ebbtide._config import as_names
from ebbtide._errors import ConfigError
from ebbtide._model.regions import clean_name
from ebbtide._utils.torch_private import named_children, named_modules

# Routed experts are grouped or one by one.
_FC1 = ("mlp.experts.linear_fc1", "mlp.experts.local_experts.*.linear_fc1")
_FC2 = ("mlp.experts.linear_fc2", "mlp.experts.local_experts.*.linear_fc2")
_IN_ALL_LAYERS = {
    "attn_norm": ("input_layernorm",),
    # Megatron's own context around the projections covers the norms of q and k.
    "qkv_linear": ("*_attention.linear_q*", "*_attention.linear_kv*", "*_attention.[qk]*_layernorm"),
    "core_attn": ("*_attention.core_attention",),
    "attn_proj": ("*_attention.linear_proj",),
    "mlp_norm": ("pre_mlp_layernorm",),
}
_IN_SOME_LAYERS: Mapping[str, tuple[str, ...]] = {
    "dense": ("mlp",),
    "shared_fc1": ("mlp.shared_experts.linear_fc1",),
    "shared_fc2": ("mlp.shared_experts.linear_fc2",),
    "fused_group_mlp": ("mlp.experts",),
    "expert_fc1": _FC1,
    "router_fc1": _FC1,
    "moe_act": _FC1,  # a function between two modules: the module around, without the two
    "router_fc2": _FC2,
}
"""Patterns of modules in a layer, for words that have none in a layer of another kind."""
_WORDS: Mapping[str, tuple[str, ...]] = {**_IN_ALL_LAYERS, **_IN_SOME_LAYERS}
"""Patterns of modules in a layer, by word, in the order of forward."""


def by_words(
    chunks: list[torch.nn.Module], config: Any, modules: Sequence[str], fraction: float, options: dict[str, Any]
) -> list[dict[str, Any] | None]:
    """Options of `offload` for each chunk, by words; None for a chunk without a module to move.

    Args:
        config: Megatron's TransformerConfig.
        fraction: of the modules of each chunk, the first in the order of forward.
        options: for all chunks.

    Raises:
        ConfigError: an unknown word, or a word without a module.
    """
    words = [modules] if isinstance(modules, str) else list(modules)
    unknown = [word for word in words if word not in _WORDS]
    if unknown or not words:
        found = f"{unknown[0]!r} is no word for modules" if unknown else "no module is named"
        raise ConfigError(f"modules={modules!r}: {found}: write some of {', '.join(_WORDS)}")
    groups = [_Groups(chunk) for chunk in chunks]
    here = set[str]().union(*(each.words for each in groups))
    for word in words:
        # An error on one rank of a pipeline would leave the others waiting.
        is_elsewhere = not here or (word in _IN_SOME_LAYERS and config.num_moe_experts)
        if word not in here and not (is_elsewhere and config.pipeline_model_parallel_size > 1):
            raise ConfigError(
                f"modules={modules!r}: {type(chunks[0]).__name__} has no module for {word!r}: write some of "
                f"{', '.join(each for each in _WORDS if each in here)} (with TransformerEngine, norms are parts of "
                "linear modules: qkv_linear, dense)"
            )
    settings: list[dict[str, Any] | None] = []
    for each in groups:
        include, exclude = each.names(words, fraction)
        exclude += as_names("exclude", options.get("exclude"))
        settings.append({**options, "include": include, "exclude": exclude} if include else None)
    return settings


class _Groups:
    """Modules of `chunk` for each layer and word, as patterns, in the order of forward."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._patterns: dict[tuple[str, str], list[str]] = {}
        found: dict[tuple[str, str], dict[str, None]] = {}
        for fqn, module in named_modules(chunk):
            for layer, word, pattern in _matches(clean_name(fqn), module):
                found.setdefault((layer, word), {})[pattern] = None
        for layer in dict.fromkeys(layer for layer, _ in found):
            self._patterns.update(
                {(layer, word): list(found[layer, word]) for word in _WORDS if (layer, word) in found}
            )

    @property
    def words(self) -> set[str]:
        """Words with a module."""
        return {word for _, word in self._patterns}

    def names(self, words: list[str], fraction: float) -> tuple[list[Any], list[Any]]:
        """Names to include and to exclude, as for `offload`, for the first `fraction` of the groups of `words`."""
        chosen = [key for key in self._patterns if key[1] in words]
        include: list[Any] = []
        around: list[str] = []  # modules inside of included ones, whose saved tensors stay
        for layer, word in chosen[: len(chosen) - int(len(chosen) * (1 - fraction))]:
            patterns = [f"{layer}.{pattern}" for pattern in self._patterns[layer, word]]
            if word == "moe_act":
                experts = [pattern.rpartition(".")[0] for pattern in patterns]
                include += experts
                around += [f"{each}.{linear}" for each in experts for linear in ("linear_fc1", "linear_fc2")]
            else:
                include += patterns
        return include, [name for name in dict.fromkeys(around) if name not in include]


def _matches(name: str, module: torch.nn.Module) -> Iterator[tuple[str, str, str]]:
    """The layer around `module`, and word and pattern for `module` in the layer."""
    if "Identity" in type(module).__name__:  # stands for a part that the layer does not have
        return
    parts = name.split(".")
    for word, patterns in _WORDS.items():
        for pattern in patterns:
            expected = pattern.split(".")
            layer, last = parts[: -len(expected)], parts[-len(expected) :]
            is_match = bool(layer) and all(map(fnmatchcase, last, expected))
            if is_match and (word != "dense" or "linear_fc1" in dict(named_children(module))):
                yield ".".join(layer), word, pattern
