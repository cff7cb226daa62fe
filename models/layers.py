"""The sublayers that all families share: attention over a key/value cache, and the gated feed-forward."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from dflash_mlx.models.linear import Stack, project
from dflash_mlx.rollback import KVLayer

# MLX's attention for few queries sums keys in another order from these key counts on, and takes other kernels above 32
# queries a key head. Where a block would cross such a border, its rows go one by one and so round as single rows do.
BORDERS = (1024, 4096, 8192, 32768, 65536)
MOST_QUERIES = 32
FEW_ROWS = 16


class Attention:
    """One attention layer of mlx-lm's, its three projections as one product."""

    def __init__(self, net: Any, heads: int, kv_heads: int) -> None:
        self.net, self.heads, self.kv_heads = net, heads, kv_heads
        self.qkv = Stack(net.q_proj, net.k_proj, net.v_proj)

    def memory(self) -> KVLayer:
        """Return the layer's memory of the empty sequence."""
        return KVLayer()

    def __call__(self, x: mx.array, memory: KVLayer, tape: bool) -> mx.array:
        """Return the layer's output [1, L, D] for normed rows x [1, L, D], whose keys and values join the memory.

        A key/value cache can always forget, so `tape` changes nothing.
        """
        B, L, _ = x.shape
        net = self.net
        q, k, v = self.qkv(x)
        q = q.reshape(B, L, self.heads, -1)
        gate = None
        if q.shape[-1] != (head_dim := k.shape[-1] // self.kv_heads):  # this family emits each head's output gate too
            q, gate = mx.split(q, [head_dim], axis=-1)
        k, v = (part.reshape(B, L, self.kv_heads, -1) for part in (k, v))
        if "q_norm" in net:
            q, k = net.q_norm(q), net.k_norm(k)
        offset = memory.offset
        q, k = (net.rope(part.transpose(0, 2, 1, 3), offset=offset) for part in (q, k))
        keys, values = memory.update_and_fetch(k, v.transpose(0, 2, 1, 3))
        out = _attend(q, keys, values, net.scale).transpose(0, 2, 1, 3).reshape(B, L, -1)
        return project(net.o_proj, out if gate is None else out * mx.sigmoid(gate.reshape(B, L, -1)))


def _attend(q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Return causal attention of queries [1, H, L, D] at the last L key positions, rounded as single rows would be."""
    rows, end = q.shape[2], keys.shape[2]
    start = end - rows
    crosses = any(start < border - 1 < end - 1 for border in BORDERS)
    if rows == 1 or rows > FEW_ROWS or not (crosses or rows * q.shape[1] // keys.shape[1] > MOST_QUERIES):
        mask = None if rows == 1 else "causal"
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)
    singles = [
        mx.fast.scaled_dot_product_attention(
            q[:, :, i : i + 1], keys[:, :, : start + i + 1], values[:, :, : start + i + 1], scale=scale
        )
        for i in range(rows)
    ]
    return mx.concatenate(singles, axis=2)


class FeedForward:
    """One gated feed-forward layer of mlx-lm's, gate and up as one product."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.gate_up = Stack(net.gate_proj, net.up_proj)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the layer's output [1, L, D] for normed rows x [1, L, D]."""
        gate, up = self.gate_up(x)
        return project(self.net.down_proj, swiglu(gate, up))
