"""Megatron-Core: `offload` in the words of `--offload-modules`, and routing maps without host synchronisation."""

import contextlib
from collections.abc import Generator, Iterable, Sequence
from importlib import import_module
from typing import Any, cast

import torch

import ebbtide
from ebbtide._errors import ConfigError
from ebbtide._utils.packages import extra
from ebbtide._utils.torch_private import modules_of
from ebbtide.integrations._conflicts import check_megatron, plans_with_others
from ebbtide.integrations._megatron_modules import by_words

with extra("megatron"):
    _parallel_state: Any = import_module("megatron.core.parallel_state")
    _dispatchers: Any = import_module("megatron.core.transformer.moe.token_dispatcher")
    _Config: Any = import_module("megatron.core.transformer.transformer_config").TransformerConfig

__all__ = ["OffloadedChunks", "indices_to_multihot", "offload"]


class OffloadedChunks:
    """The handles of a model's chunks; `offload` returns one. Also a context manager that ends with `remove`."""

    def __init__(self, handles: list[ebbtide.OffloadHandle], undo: contextlib.ExitStack) -> None:
        self.handles = handles
        """Of each chunk, in order; none of a chunk without a module to move."""
        self._undo = undo

    def __enter__(self) -> "OffloadedChunks":
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()

    def report(self) -> str:
        """The figures of all handles as tables."""
        return "\n".join(handle.report() for handle in self.handles)

    def remove(self) -> None:
        """Undo `offload`; Megatron's own offloading is on again if it was. Graphs in flight still run backward."""
        self._undo.close()


def offload(
    model: torch.nn.Module | Sequence[torch.nn.Module], modules: Sequence[str] | None = None, **options: Any
) -> OffloadedChunks:
    """`ebbtide.offload` for a Megatron-Core model:

        model = get_model(model_provider)  # a list of chunks
        offloaded = offload(model, modules=["core_attn", "expert_fc1", "moe_act"])
        offloaded = offload(model)  # with --fine-grained-activation-offloading --offload-modules core_attn expert_fc1
        offloaded = offload(model, budget="40GiB")
        ...  # train
        print(offloaded.report())
        offloaded.remove()

    Without `modules=`, and with `fine_grained_activation_offloading` in the model's config, ebbtide moves what
    `offload_modules` names, by Megatron's minimum size and fraction, and Megatron's own offloading is off until
    `remove`. With neither, `options` decide as for `ebbtide.offload`.

    Args:
        model: a model, or the chunks of a virtual pipeline on this rank; in Megatron's wrappers or not.
        modules: words for the modules whose saved tensors move: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm,
            expert_fc1 (or router_fc1), router_fc2, moe_act, fused_group_mlp, shared_fc1, shared_fc2; dense is the whole
            MLP of layers without experts.
        options: of `ebbtide.offload`, for each chunk. `process_group=` beside a goal in a pipeline is by default the
            ranks of this stage.

    Raises:
        ConfigError: an unknown word, or a word without a module in this model (in a pipeline, other ranks may have the
            experts or the dense layers); words beside a goal or `include=`; `modules=` beside Megatron's own
            offloading; a goal for several chunks; a setting of Megatron without a counterpart.
        EbbtideError: as `ebbtide.offload` raises.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    config = _config_of(chunks)
    check_megatron(config, modules, options, len(chunks))
    fraction = 1.0
    if config.fine_grained_activation_offloading:
        modules, fraction = config.offload_modules, getattr(config, "activation_offload_fraction", 1.0)  # from 0.17 on
        elements = max(1, config.min_offloaded_tensor_size)
        options = {"min_bytes": elements * config.params_dtype.itemsize, **options}
    settings: list[dict[str, Any] | None] = [options] * len(chunks)
    if modules is not None:
        settings = by_words(chunks, config, modules, fraction, options)
    elif config.pipeline_model_parallel_size > 1 and plans_with_others(options):
        ranks = _parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        settings = [{"process_group": ranks, **options}]
    with contextlib.ExitStack() as undo:
        undo.enter_context(_SYNC_FREE)
        undo.enter_context(_switched_off(chunks))
        handles: list[ebbtide.OffloadHandle] = []
        for chunk, each in zip(chunks, settings, strict=True):
            if each is not None:
                handles.append(undo.enter_context(ebbtide.offload(chunk, **each)))
        return OffloadedChunks(handles, undo.pop_all())


def indices_to_multihot(
    indices: torch.Tensor, probs: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The map of tokens to experts and its probabilities: equal to Megatron's bit for bit, and so are gradients.

    Megatron selects by a mask, and the host waits three times for the number of selected entries. Here all shapes are
    known: masked entries are written to a spare element behind the map. `offload` puts the function in the place of
    Megatron's method until `remove`.

    Args:
        indices: experts of each token, integers [tokens, top k], all different in a row; -1: masked out.
        probs: float32 [tokens, top k].
        num_experts: experts on this rank.

    Returns:
        Booleans [tokens, num_experts], and float32 [tokens, num_experts].
    """
    shape, spare = (indices.shape[0], num_experts), indices.shape[0] * num_experts
    rows = torch.arange(indices.shape[0], device=indices.device).unsqueeze(1) * num_experts
    places = (rows + indices).masked_fill(indices == -1, spare).flatten()
    routing = torch.zeros(spare + 1, dtype=torch.bool, device=indices.device).scatter(0, places, True)
    chosen = torch.zeros(spare + 1, dtype=torch.float, device=indices.device).scatter(0, places, probs.flatten())
    return routing[:spare].view(shape), chosen[:spare].view(shape)


def _config_of(chunks: list[torch.nn.Module]) -> Any:
    for each in (module for chunk in chunks for module in modules_of(chunk)):
        if isinstance(vars(each).get("config"), _Config):
            return vars(each)["config"]
    raise ConfigError("no module has a TransformerConfig: give a model of Megatron-Core, or call ebbtide.offload()")


@contextlib.contextmanager
def _switched_off(chunks: Iterable[torch.nn.Module]) -> Generator[None]:
    """Megatron's own offloading is off: in configs, and in layers, which have copies of the setting."""
    modules = [module for chunk in chunks for module in modules_of(chunk)]
    configs = {id(config): config for each in modules if isinstance(config := vars(each).get("config"), _Config)}
    switches = [(config, "fine_grained_activation_offloading") for config in configs.values()]
    switches += [(each, name) for each in modules for name in vars(each) if name.startswith("offload_")]
    are_on = [(owner, name) for owner, name in switches if vars(owner)[name] is True]
    for owner, name in are_on:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in are_on:
            setattr(owner, name, True)


class _SyncFree:
    """Puts `indices_to_multihot` in the place of Megatron's method while any model is offloaded."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._originals: dict[Any, Any] = {}
        self._users = 0

    def __enter__(self) -> None:
        if self._users == 0:
            found = cast("dict[str, Any]", vars(_dispatchers))
            self._originals = {
                each: vars(each)[self._name]
                for each in found.values()
                if isinstance(each, type) and self._name in vars(each)
            }
            for each in self._originals:
                setattr(each, self._name, _multihot)
        self._users += 1

    def __exit__(self, *_error: object) -> None:
        self._users -= 1
        if self._users == 0:
            for each, original in self._originals.items():
                setattr(each, self._name, original)


def _multihot(manager: Any, indices: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return indices_to_multihot(indices, probs, manager.num_local_experts)


_SYNC_FREE = _SyncFree("_indices_to_multihot")
