"""The lossless verdict: plain and speculative greedy decoding side by side, and what their first difference means."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import mlx.core as mx

from dflash_mlx.decode import decode
from dflash_mlx.models import DraftNet, Target
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Options

FULL_TIE, HALF_TIE = 1e-3, 0.125  # logit margins within which rounding decides: float32, and 16-bit activations


@dataclass(frozen=True, slots=True)
class Check:
    """One prompt's verdict: `position` is the first differing token's, None when there is none.

    `margin` is the plain token's logit less the speculative token's there, and `tie` whether rounding explains it.
    """

    prompt_tokens: int
    compared: int
    position: int | None = None
    plain_id: int | None = None
    speculative_id: int | None = None
    margin: float = 0.0
    tie: bool = False

    @property
    def ok(self) -> bool:
        """True unless the outputs differ by more than a tie."""
        return self.position is None or self.tie


def compare(
    target: Target, net: DraftNet, prompt: Sequence[int], options: Options, stop_ids: AbstractSet[int], block_size: int
) -> Check:
    """Decode greedily with and without the draft and judge the first difference by the target's own logits there."""
    plain = _tokens(target, None, prompt, options, stop_ids, 1)
    speculative = _tokens(target, net, prompt, options, stop_ids, block_size)
    compared = min(len(plain), len(speculative))
    verdict = Check(len(prompt), compared)
    position = next((i for i in range(compared) if plain[i] != speculative[i]), None)
    if position is None:
        if len(plain) == len(speculative):
            return verdict
        return replace(verdict, position=compared)
    ids = mx.array([[*prompt, *plain[:position]]])
    logits = target.unembed(target.forward(ids, target.new_state(), tape=False).hidden[0, -1])
    tie = FULL_TIE if logits.dtype == mx.float32 else HALF_TIE
    margin = float((logits[plain[position]] - logits[speculative[position]]).astype(mx.float32))
    return replace(
        verdict,
        position=position,
        plain_id=plain[position],
        speculative_id=speculative[position],
        margin=margin,
        tie=abs(margin) <= tie,
    )


def _tokens(
    target: Target,
    net: DraftNet | None,
    prompt: Sequence[int],
    options: Options,
    stop_ids: AbstractSet[int],
    block_size: int,
) -> list[int]:
    sampler = Sampler(options.sampling)
    cycles = decode(target, net, prompt, options, stop_ids, sampler, block_size)
    return [token for cycle in cycles for token in cycle.tokens]
