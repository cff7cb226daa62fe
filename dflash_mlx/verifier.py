"""Prefills a prompt, and checks a draft in one target forward."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.acceptance import Draft, Verdict, judge_greedy, judge_sampled
from dflash_mlx.models import Target
from dflash_mlx.rollback import State
from dflash_mlx.sampling import Sampler


class Checked(NamedTuple):
    """A judged draft: its ids, how many are kept, the bonus, and the features [1, n + 1, taps x D] of all its rows."""

    drafted: tuple[int, ...]
    accepted: int
    bonus: int
    features: mx.array | None


class Verifier:
    """The target's side of a cycle; `taps` are the layers whose outputs the drafter needs."""

    def __init__(self, target: Target, sampler: Sampler, taps: Sequence[int]) -> None:
        self.target, self.sampler, self.taps = target, sampler, taps

    def prefill(self, prompt: Sequence[int], state: State, chunk: int) -> Iterator[tuple[mx.array, mx.array | None]]:
        """Feed the prompt by chunks, yielding each chunk's last logits [1, V] and its features [1, chunk, taps x D]."""
        for start in range(0, len(prompt), chunk):
            ids = mx.array([list(prompt[start : start + chunk])])
            logits, features = self.target.forward(ids, state, self.taps, tape=False, last_only=True)
            yield logits[0], features
            mx.eval(state.arrays())
            mx.clear_cache()

    def check(self, anchor: int, draft: Draft | None, state: State) -> Checked:
        """Run [anchor, *draft] through the target and judge the draft: one forward, one host synchronisation."""
        ids = mx.array([anchor], dtype=mx.int32)
        if draft is not None:
            ids = mx.concatenate([ids, draft.tokens])
        logits, features = self.target.forward(ids[None], state, self.taps, tape=draft is not None)
        accepted, bonus = self._judge(draft, logits[0])
        mx.eval(accepted, bonus, ids, state.arrays(), *([] if features is None else [features]))
        return Checked(tuple(ids.tolist()[1:]), accepted.item(), bonus.item(), features)

    def _judge(self, draft: Draft | None, logits: mx.array) -> Verdict:
        if draft is None:
            return Verdict(mx.array(0), self.sampler.draw(logits)[0])
        if self.sampler.greedy:
            return judge_greedy(draft, logits)
        return judge_sampled(draft, self.sampler.probabilities(logits), self.sampler.key())
