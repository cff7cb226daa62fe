"""The drafter net, and targets as explicit forwards."""

from dflash_mlx.models.config import DraftConfig, TargetConfig, is_draft
from dflash_mlx.models.context import Context
from dflash_mlx.models.draft import DraftNet
from dflash_mlx.models.host import to_host
from dflash_mlx.models.target import Forward, Target, build_target
from dflash_mlx.models.weights import load_draft

__all__ = [
    "Context",
    "DraftConfig",
    "DraftNet",
    "Forward",
    "Target",
    "TargetConfig",
    "build_target",
    "is_draft",
    "load_draft",
    "to_host",
]
