"""What the engine asks of a target; the families share everything but their layers' memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.models.config import TargetConfig
from dflash_mlx.rollback import State


class Forward(NamedTuple):
    """One pass over L rows: logits [1, L, V] (or [1, 1, V] of the last row) and features [1, L, taps x D]."""

    logits: mx.array
    features: mx.array | None


class Target:
    """A language model as an explicit forward over mlx-lm's own layer modules; batch size is always 1.

    A family says how its layers remember (`new_state`) and how one of them runs (`layer`).
    """

    def __init__(self, model: nn.Module, config: TargetConfig) -> None:
        self.config = config
        self.model = model
        self.body: Any = model.model
        self.head: Any = None if "lm_head" not in model else model.lm_head

    def new_state(self) -> State:
        """Return the state of the empty sequence."""
        raise NotImplementedError

    def layer(self, index: int, x: mx.array, state: State, tape: bool) -> mx.array:
        """Run layer `index` over x [1, L, D], advancing its state; with `tape` the rows can be forgotten again."""
        raise NotImplementedError

    def embed(self, ids: mx.array) -> mx.array:
        """Return the embeddings [1, L, D] of `ids` [1, L]."""
        return self.body.embed_tokens(ids)

    def unembed(self, hidden: mx.array) -> mx.array:
        """Return logits [..., V] of final-normed hidden rows [..., D]."""
        return self.body.embed_tokens.as_linear(hidden) if self.head is None else self.head(hidden)

    def forward(
        self, ids: mx.array, state: State, taps: Sequence[int] = (), *, tape: bool = True, last_only: bool = False
    ) -> Forward:
        """Advance `state` by `ids` [1, L] and return their logits and the tapped layer outputs, side by side.

        Without `tape` the rows are committed for good, as in prefill; `last_only` unembeds the last row alone.
        """
        h, tapped = self.embed(ids), {}
        for index in range(self.config.num_layers):
            h = self.layer(index, h, state, tape)
            if index in taps:
                tapped[index] = h
        features = mx.concatenate([tapped[index] for index in taps], axis=-1) if taps else None
        h = self.body.norm(h[:, -1:] if last_only else h)
        return Forward(self.unembed(h), features)
