"""Linear layers as the engine runs them: quantized ones through the verify kernels, those with one input as one."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx import metal
from dflash_mlx.models.host import HostLinear


def project(layer: nn.Module, x: mx.array) -> mx.array:
    """Return a linear layer's (or a tied embedding's) output [..., N] for x [..., K]."""
    if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding) and layer.mode == "affine":
        y = metal.quantized_linear(x, *_affine(layer), group_size=layer.group_size, bits=layer.bits)
        return y + layer.bias if "bias" in layer else y
    return layer.as_linear(x) if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding) else layer(x)


def best(layer: nn.Module, x: mx.array) -> mx.array:
    """Return the index of the largest output of each row, the first among equals: [...] for x [..., K]."""
    quantized = isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding) and layer.mode == "affine"
    if quantized and "bias" not in layer:
        return metal.head_argmax(x, *_affine(layer), group_size=layer.group_size, bits=layer.bits)
    return mx.argmax(project(layer, x), axis=-1)


def _affine(layer: Any) -> tuple[mx.array, mx.array, mx.array]:
    return layer.weight, layer.scales, layer.biases


class Stack:
    """Linear layers with one input, run as one product.

    Their weights are laid end to end, and each layer keeps its own as a view of them: nothing is stored twice, and the
    model still runs without the stack. Layers that do not fit together run one by one.
    """

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers
        first = layers[0]
        self.ends: list[int] = []
        self.joined: nn.Module | None = None
        if any(_kind(layer) != _kind(first) or "bias" in layer for layer in layers):
            return
        heights = [layer.weight.shape[0] for layer in layers]
        self.ends = [sum(heights[: i + 1]) for i in range(len(heights))]
        self.joined = _like(first)
        for name in first.parameters():
            whole = mx.concatenate([layer[name] for layer in layers])
            self.joined[name] = whole
            for layer, end, height in zip(layers, self.ends, heights, strict=True):
                layer[name] = whole[end - height : end]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """Return each layer's output for x [..., K]."""
        if self.joined is None:
            return [project(layer, x) for layer in self.layers]
        return list(mx.split(project(self.joined, x), self.ends[:-1], axis=-1))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    quantized = isinstance(layer, nn.QuantizedLinear)
    how = (layer.group_size, layer.bits, layer.mode, layer.scales.dtype) if quantized else ()
    return type(layer), layer.weight.dtype, layer.weight.shape[1], *how


def _like(layer: nn.Module) -> nn.Module:
    """Return a layer of the same kind, its weights still to be set."""
    if isinstance(layer, nn.QuantizedLinear):
        return nn.QuantizedLinear(layer.group_size, 1, False, layer.group_size, layer.bits, layer.mode)
    return HostLinear(layer.weight) if isinstance(layer, HostLinear) else nn.Linear(1, 1, bias=False)
