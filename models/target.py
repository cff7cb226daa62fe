"""A target as an explicit forward over mlx-lm's own layer modules, with taps for the drafter."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.models.config import TargetConfig
from dflash_mlx.models.delta_net import DeltaNet
from dflash_mlx.models.layers import Attention, FeedForward
from dflash_mlx.models.linear import best, project
from dflash_mlx.rollback import State


class Forward(NamedTuple):
    """One pass over L rows: final-normed hidden rows [1, L, D] and features [1, L, taps x D]."""

    hidden: mx.array
    features: mx.array | None


class Target:
    """A language model, batch size always 1; families differ in how their layers mix rows, and so in what they keep."""

    def __init__(self, model: nn.Module, config: TargetConfig, mixers: Sequence[Attention | DeltaNet]) -> None:
        self.config = config
        self.model = model
        self.body: Any = model.model
        self.head: nn.Module = model.lm_head if "lm_head" in model else self.body.embed_tokens
        self.mixers = mixers
        self.feed_forward = [FeedForward(layer.mlp) for layer in self.body.layers]

    def new_state(self) -> State:
        """Return the state of the empty sequence."""
        return State([mixer.memory() for mixer in self.mixers])

    def embed(self, ids: mx.array) -> mx.array:
        """Return the embeddings [1, L, D] of `ids` [1, L]."""
        return self.body.embed_tokens(ids)

    def unembed(self, hidden: mx.array) -> mx.array:
        """Return logits [..., V] of final-normed hidden rows [..., D]."""
        return project(self.head, hidden)

    def best(self, hidden: mx.array) -> mx.array:
        """Return the likeliest id after each of the final-normed hidden rows [..., D]: [...]."""
        return best(self.head, hidden)

    def forward(self, ids: mx.array, state: State, taps: Sequence[int] = (), *, tape: bool = True) -> Forward:
        """Advance `state` by `ids` [1, L] and return their hidden rows and the tapped layer outputs, side by side.

        Without `tape` the rows are committed for good, as in prefill.
        """
        h, tapped = self.embed(ids), {}
        parts = zip(self.body.layers, self.mixers, self.feed_forward, state.layers, strict=True)
        for index, (layer, mixer, feed_forward, memory) in enumerate(parts):
            h = h + mixer(layer.input_layernorm(h), memory, tape)  # type: ignore[arg-type]
            h = h + feed_forward(layer.post_attention_layernorm(h))
            if index in taps:
                tapped[index] = h
        features = mx.concatenate([tapped[index] for index in taps], axis=-1) if taps else None
        return Forward(self.body.norm(h), features)


def build_target(model: nn.Module, config: TargetConfig) -> Target:
    """Wrap a model loaded by mlx-lm; `config.family` was checked when it was read."""
    if config.family == "qwen3_5":
        text = model.language_model
        return Target(text, config, [_hybrid_mixer(layer) for layer in text.model.layers])
    nets = [layer.self_attn for layer in model.model.layers]
    return Target(model, config, [Attention(net, net.n_heads, net.n_kv_heads) for net in nets])


def _hybrid_mixer(layer: Any) -> Attention | DeltaNet:
    if layer.is_linear:
        return DeltaNet(layer.linear_attn)
    return Attention(layer.self_attn, layer.self_attn.num_attention_heads, layer.self_attn.num_key_value_heads)
