"""Lossless speculative decoding with DFlash and DFlash 2 on MLX.

import dflash_mlx
pair = dflash_mlx.load("tiny")
print(dflash_mlx.generate("Write a haiku", pair=pair))
"""

from typing import TYPE_CHECKING, Any

from dflash_mlx.errors import CheckpointError, DFlashError, OptionError, PairError, PromptError, ResourceError
from dflash_mlx.types import Chunk, Completion, Cycle, Options, Sampling, Stats

if TYPE_CHECKING:
    from dflash_mlx.api import Check, Pair, check, generate, load, stream

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "Check", "CheckpointError", "Chunk", "Completion", "Cycle", "DFlashError", "OptionError", "Options", "Pair",
    "PairError", "PromptError", "ResourceError", "Sampling", "Stats", "check", "generate", "load", "stream",
]
# fmt: on


def __getattr__(name: str) -> Any:
    """Import the engine on first use, so that importing the package alone stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dflash_mlx import api

    return getattr(api, name)
