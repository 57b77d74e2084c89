"""The names of TRL, torchtune and Axolotl for offloading activations, with ebbtide behind them.

Change one import:

    from ebbtide.compat import get_act_offloading_ctx_manager  # from trl.models import ...

or leave the script unchanged, and replace the names in its trainer:

    import ebbtide.compat
    ebbtide.compat.install("trl")  # SFTConfig(activation_offloading=True), DPOConfig(...), ... as before

Names, keywords, order and defaults are TRL's in `ebbtide.compat`, torchtune's in `ebbtide.compat.torchtune`. The
engine is ebbtide's: each storage travels once, in the order that backward needed before, with memory bounded in bytes;
a graph may be kept, run backward twice or dropped; in-place changes raise.
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
