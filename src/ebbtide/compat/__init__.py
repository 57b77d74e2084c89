"""The names that TRL, torchtune and Axolotl have for offloading activations, with what ebbtide does behind them.

Swap one import::

    from ebbtide.compat import get_act_offloading_ctx_manager  # from trl.models import ...

or leave the script as it is, and have its trainer find ours::

    import ebbtide.compat
    ebbtide.compat.install("trl")  # SFTConfig(activation_offloading=True), DPOConfig(...), ... as before

Names, keywords, their order and their defaults are TRL's here, torchtune's in `ebbtide.compat.torchtune`. What they
mean is the engine's: each storage travels once, in the order that backward was seen to need, with memory that is
bounded in bytes; a graph may be kept, run backward twice or dropped; in-place changes raise.
"""

from ebbtide.compat._context import NoOpManager, OffloadActivations
from ebbtide.compat._heads import get_act_offloading_ctx_manager, get_lora_act_offloading_ctx_manager
from ebbtide.compat._install import Installed, install

__all__ = [
    "Installed",
    "NoOpManager",
    "OffloadActivations",
    "get_act_offloading_ctx_manager",
    "get_lora_act_offloading_ctx_manager",
    "install",
]
