"""The drafter net, and one explicit forward per target family."""

import mlx.nn as nn

from dflash_mlx.models.config import DraftConfig, TargetConfig, is_draft
from dflash_mlx.models.context import Context
from dflash_mlx.models.dense import DenseTarget
from dflash_mlx.models.draft import DraftNet
from dflash_mlx.models.qwen3_5 import HybridTarget
from dflash_mlx.models.target import Forward, Target
from dflash_mlx.models.weights import load_draft

__all__ = [
    "Context", "DraftConfig", "DraftNet", "Forward", "Target", "TargetConfig", "build_target", "is_draft", "load_draft",
]  # fmt: skip


def build_target(model: nn.Module, config: TargetConfig) -> Target:
    """Wrap a model loaded by mlx-lm; `config.family` was checked when it was read."""
    return HybridTarget(model, config) if config.family == "qwen3_5" else DenseTarget(model, config)
