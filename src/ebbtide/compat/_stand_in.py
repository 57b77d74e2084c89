"""Attributes of the contexts of TRL, torchtune and Axolotl, as ebbtide's classes answer."""

from typing import TYPE_CHECKING, Any

from ebbtide._errors import ForeignAttributeError

_ARGUMENT = "pass the argument of this name when the context is made"
_NO_TABLE = "the autograd graph owns every saved tensor, and no table lists them. Read stats(), or call subscribe()"
_HOOKS = (
    "every entry makes its own hooks. Enter NoOpManager() or torch.autograd.graph.saved_tensors_hooks(...) inside of "
    "the context where tensors are to be saved differently; for Axolotl, call ebbtide.compat.install('axolotl')"
)
_STREAMS = (
    "every device has its own streams, and copies are ordered with the stream that is current at the save; for "
    "Axolotl, call ebbtide.compat.install('axolotl')"
)

_FOREIGN = {
    **dict.fromkeys(("use_pin_memory", "use_streams", "max_fwd_stash_size", "max_cpu_buffer_pool_size"), _ARGUMENT),
    "min_tensor_size_bytes": "pass min_offload_size when the context is made",
    **dict.fromkeys(("tracker", "tensor_id", "storage_to_tensor_id"), _NO_TABLE),
    **dict.fromkeys(("fwd_stash", "bwd_tensor_stash", "bwd_ev_stash"), _NO_TABLE),
    **dict.fromkeys(("is_first_forward_call", "is_first_backward_call", "is_first_forward_pass"), _NO_TABLE),
    **dict.fromkeys(("curr_graph_id", "curr_autograd_node"), _NO_TABLE),
    **dict.fromkeys(("pack_hook", "unpack_hook"), _HOOKS),
    **dict.fromkeys(("s0", "s1", "accelerator_type", "device_module"), _STREAMS),
    "param_storages": "call update_model_params(model), and the weights of the model stay on the device",
    "virtual_memory_safe_pct": "pass host_limit to ebbtide.offload_activations",
    "mark": "every tensor that a checkpointed layer is given is offloaded",
}
"""Advice by attribute."""


class _StandInType(type):
    """Type of classes that trainers patch: Axolotl sets attributes of TRL's class."""

    def __setattr__(cls, name: str, value: object) -> None:
        _refuse_to_set(cls, name)
        super().__setattr__(name, value)


class StandIn(metaclass=_StandInType):
    """A context instead of a trainer's, shown under `name`: every attribute of the trainer's class answers or raises.

    Arguments can be read. Further attributes raise ForeignAttributeError, an AttributeError: hasattr() is false, and
    getattr() returns the default. Setting an attribute raises too.
    """

    def __init_subclass__(cls, name: str = "") -> None:
        super().__init_subclass__()
        if name:
            cls.__name__ = cls.__qualname__ = name

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            found = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _FOREIGN:
                raise ForeignAttributeError(f"{found}: {_FOREIGN[name]}")
            raise AttributeError(found)

    def __setattr__(self, name: str, value: object) -> None:
        _refuse_to_set(type(self), name)
        super().__setattr__(name, value)

    def _answer(self, use_streams: bool, min_offload_size: int, max_fwd_stash_size: int) -> None:
        """Make the arguments readable, under the trainer's names."""
        answers = {"use_pin_memory": True, "use_streams": use_streams, "min_tensor_size_bytes": min_offload_size}
        vars(self).update(answers, max_fwd_stash_size=max_fwd_stash_size)


def _refuse_to_set(cls: type, name: str) -> None:
    if name in _FOREIGN:
        raise ForeignAttributeError(f"{name} of {cls.__name__!r} cannot be set: {_FOREIGN[name]}")
