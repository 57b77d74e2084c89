"""torchtitan: `OffloadAC`, a policy for `activation_checkpoint` in the configs, and the `handles` of a Trainer."""

from ebbtide.integrations._torchtitan import OffloadAC, handles

__all__ = ["OffloadAC", "handles"]
