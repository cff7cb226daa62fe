"""The `qwen3_5` hybrid: gated-delta layers with full attention every few layers (Qwen3.5, 3.6 and 3.8, dense)."""

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk

from dflash_mlx.models.config import TargetConfig
from dflash_mlx.models.target import Target
from dflash_mlx.rollback import DeltaLayer, KVLayer, LayerState, State, Tape


class HybridTarget(Target):
    """A target with recurrent layers; these record a tape of the rows that may have to be forgotten."""

    def __init__(self, model: nn.Module, config: TargetConfig) -> None:
        super().__init__(model.language_model, config)

    def new_state(self) -> State:
        """Return the state of the empty sequence."""
        layers: list[LayerState] = [
            DeltaLayer(layer.linear_attn.conv_kernel_size - 1) if layer.is_linear else KVLayer()
            for layer in self.body.layers
        ]
        return State(layers)

    def layer(self, index: int, x: mx.array, state: State, tape: bool) -> mx.array:
        """Run layer `index` over x [1, L, D]."""
        layer, memory = self.body.layers[index], state.layers[index]
        normed = layer.input_layernorm(x)
        if layer.is_linear:
            h = x + _delta_net(layer.linear_attn, normed, cast(DeltaLayer, memory), tape)
        else:
            h = x + layer.self_attn(normed, None if x.shape[1] == 1 else "causal", memory)
        return h + layer.mlp(layer.post_attention_layernorm(h))


def _delta_net(net: Any, x: mx.array, memory: DeltaLayer, tape: bool) -> mx.array:
    B, L, _ = x.shape
    mixed = net.in_proj_qkv(x)
    inputs = mx.concatenate([memory.conv_state(mixed), mixed], axis=1)
    q, k, v = mx.split(nn.silu(net.conv1d(inputs)), [net.key_dim, 2 * net.key_dim], axis=-1)
    q, k = normalize_qk(
        q.reshape(B, L, net.num_k_heads, net.head_k_dim),
        k.reshape(B, L, net.num_k_heads, net.head_k_dim),
        inv_scale=net.head_k_dim**-0.5,
        eps=1e-6,  # mlx-lm's own constant for this family, not the config's rms_norm_eps
    )
    v = v.reshape(B, L, net.num_v_heads, net.head_v_dim)
    a, b = net.in_proj_a(x), net.in_proj_b(x)
    if tape:
        y = _recorded(q, k, v, compute_g(net.A_log, a, net.dt_bias), mx.sigmoid(b), inputs, memory)
    else:
        y, recurrent = gated_delta_update(q, k, v, a, b, net.A_log, net.dt_bias, memory.settled())
        memory.commit(recurrent, inputs, L)
    z = net.in_proj_z(x).reshape(B, L, net.num_v_heads, net.head_v_dim)
    return net.out_proj(net.norm(y, z).reshape(B, L, -1))


def _recorded(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, inputs: mx.array, memory: DeltaLayer
) -> mx.array:
    """Run the recurrence row by row, in the order of a one-row call, and leave the rows on the tape.

    Shapes: q, k [1, L, Hk, Dk]; v [1, L, Hv, Dv]; g, beta [1, L, Hv]; returns [1, L, Hv, Dv].
    """
    B, L, Hv, Dv = v.shape
    if (repeats := Hv // k.shape[2]) > 1:
        q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)
    before = memory.settled()
    if before is None:
        before = mx.zeros((B, Hv, Dv, k.shape[-1]), dtype=mx.float32)
    state, outs, deltas = before, [], []
    for row in range(L):
        key = k[:, row, :, None, :]
        state = state * g[:, row, :, None, None]
        delta = (v[:, row] - (state * key).sum(axis=-1)) * beta[:, row, :, None]
        state = state + key * delta[..., None]
        outs.append((state * q[:, row, :, None, :]).sum(axis=-1))
        deltas.append(delta)
    memory.record(before, inputs, Tape(k, g, mx.stack(deltas, axis=1)))
    return mx.stack(outs, axis=1).astype(q.dtype)
