"""Runs the text that MLX would hand to Metal on a CPU, checking every access: see docs/kernels.md."""

from emulator.build import Mode, toolchain
from emulator.record import metal_text
from emulator.run import Report, launcher, run

__all__ = ["Mode", "Report", "launcher", "metal_text", "run", "toolchain"]
