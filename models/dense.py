"""Dense targets, attention in every layer: `qwen3` and `llama`."""

import mlx.core as mx

from dflash_mlx.models.target import Target
from dflash_mlx.rollback import KVLayer, State


class DenseTarget(Target):
    """A target whose every layer is full attention; forgetting rows is a trim."""

    def new_state(self) -> State:
        """Return the state of the empty sequence."""
        return State([KVLayer() for _ in range(self.config.num_layers)])

    def layer(self, index: int, x: mx.array, state: State, tape: bool) -> mx.array:
        """Run layer `index` over x [1, L, D]; a key/value cache can always forget, so `tape` changes nothing."""
        return self.body.layers[index](x, None if x.shape[1] == 1 else "causal", state.layers[index])
