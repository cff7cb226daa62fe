"""Kernels for verifying a block of rows, each with a twin of plain MLX ops that serves where the kernel does not."""

from dflash_mlx.metal.gate import enable, notify, report, switch_off
from dflash_mlx.metal.launch import backend
from dflash_mlx.metal.linear import head_argmax, quantized_linear
from dflash_mlx.metal.recurrent import Tape, gated_delta, replay

__all__ = [
    "Tape",
    "backend",
    "enable",
    "gated_delta",
    "head_argmax",
    "notify",
    "quantized_linear",
    "replay",
    "report",
    "switch_off",
]
