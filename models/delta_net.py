"""The gated-delta layers of the `qwen3_5` hybrids: a recurrent state instead of keys and values."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk

from dflash_mlx import metal
from dflash_mlx.models.linear import Stack, project
from dflash_mlx.rollback import DeltaLayer


class DeltaNet:
    """One gated-delta layer of mlx-lm's, its four input projections as one product."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.inputs = Stack(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)

    def memory(self) -> DeltaLayer:
        """Return the layer's memory of the empty sequence."""
        return DeltaLayer(self.net.conv_kernel_size - 1)

    def __call__(self, x: mx.array, memory: DeltaLayer, tape: bool) -> mx.array:
        """Return the layer's output [1, L, D] for normed rows x [1, L, D]; with `tape` they can be forgotten again."""
        net, (B, L, _) = self.net, x.shape
        mixed, z, b, a = self.inputs(x)
        rows = mx.concatenate([memory.conv_state(mixed), mixed], axis=1)
        q, k, v = mx.split(nn.silu(net.conv1d(rows)), [net.key_dim, 2 * net.key_dim], axis=-1)
        q, k = normalize_qk(
            q.reshape(B, L, net.num_k_heads, net.head_k_dim),
            k.reshape(B, L, net.num_k_heads, net.head_k_dim),
            inv_scale=net.head_k_dim**-0.5,
            eps=1e-6,  # mlx-lm's own constant for this family, not the config's rms_norm_eps
        )
        v = v.reshape(B, L, net.num_v_heads, net.head_v_dim)
        state = memory.recurrent
        if state is None:
            state = mx.zeros((B, net.num_v_heads, net.head_v_dim, net.head_k_dim), dtype=mx.float32)
        if tape:
            g, beta = compute_g(net.A_log, a, net.dt_bias), mx.sigmoid(b)
            y, settled, made = metal.gated_delta(q, k, v, g, beta, state, memory.tape, memory.kept)
            memory.record(settled, rows, made)
        else:
            y, state = gated_delta_update(q, k, v, a, b, net.A_log, net.dt_bias, memory.settled(state))
            memory.commit(state, rows, L)
        z = z.reshape(B, L, net.num_v_heads, net.head_v_dim)
        return project(net.out_proj, net.norm(y, z).reshape(B, L, -1))
