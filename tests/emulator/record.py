"""The exact text that MLX composes for a kernel: recorded while exporting, which needs no Metal."""

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from dflash_mlx.metal.launch import Body, Outputs, Template, call, metal_kernel


def metal_text(body: Body, inputs: Sequence[mx.array], template: Template, outputs: Outputs) -> str:
    """What MLX prints for this call: header, generated signature, body and instantiation."""
    kernel = metal_kernel(body)

    def traced(*arrays: mx.array) -> list[mx.array]:
        return call(kernel, arrays, template, 1, 32, outputs, verbose=True, stream=mx.gpu)

    with tempfile.TemporaryDirectory() as folder:
        # Only shapes and dtypes are looked at.
        stand_ins = [mx.zeros(a.shape, a.dtype) for a in inputs]
        printed = _printed(lambda: mx.export_function(f"{folder}/kernel", traced, *stand_ins), f"{folder}/text")
    return printed.split("```\n")[1]


def _printed(work: Any, path: str) -> str:
    """Standard output of `work`, which writes from C++."""
    kept = os.dup(1)
    target = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(target, 1)
    try:
        work()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(target)
    with open(path, encoding="utf-8") as file:
        return file.read()
