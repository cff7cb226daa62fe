"""Lossless speculative decoding with DFlash and DFlash 2 on MLX."""

__version__ = "0.1.0"
