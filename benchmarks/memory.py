"""Peak memory of a long answer against what must be held: weights, the target's state and the draft's context.

python benchmarks/memory.py --json
"""

import argparse
import json
import platform
import time

import mlx.core as mx
from mlx.utils import tree_flatten

import dflash_mlx
from dflash_mlx.decode import decode
from dflash_mlx.models import Target
from dflash_mlx.rollback import State
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Options, Sampling


class Watched(Target):
    """The pair's target, remembering the state it hands out."""

    def __init__(self, inner: Target) -> None:
        self.__dict__.update(inner.__dict__)
        self.states: list[State] = []

    def new_state(self) -> State:
        """Return the state of the empty sequence."""
        self.states.append(super().new_state())
        return self.states[-1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    pair = dflash_mlx.load("tiny")
    arrays = {id(a): a for net in (pair.target.model, pair.draft) for _, a in tree_flatten(net.parameters())}
    weights = sum(array.nbytes for array in arrays.values())
    target, ids = Watched(pair.target), pair.tokenizer.encode_prompt("Write a long story about a robot.")
    options = Options(max_tokens=asked.tokens, sampling=Sampling(0.8, seed=1))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    made = sum(
        len(cycle.tokens)
        for cycle in decode(target, pair.draft, ids, options, set(), Sampler(options.sampling), asked.block)
    )
    peak, state = mx.get_peak_memory(), target.states[0].nbytes
    facts = {"system": platform.platform(), "mlx": mx.__version__, "date": time.strftime("%Y-%m-%d"), "tokens": made}
    facts |= {"weight_bytes": weights, "state_bytes": state, "loaded_bytes": before, "peak_bytes": peak}
    facts |= {"peak / (weights + state)": peak / (weights + state)}
    print(json.dumps(facts, indent=None if asked.json else 1))


if __name__ == "__main__":
    main()
