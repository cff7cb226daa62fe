"""Prefills a prompt, and checks a draft in one target forward."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from dflash_mlx.acceptance import Draft, Verdict, judge_greedy, judge_sampled
from dflash_mlx.models import Target
from dflash_mlx.processors import Processor
from dflash_mlx.rollback import State
from dflash_mlx.sampling import Sampler


class Checked(NamedTuple):
    """A judged draft: its ids, how many are kept, the bonus, and the features [1, n + 1, taps x D] of all its rows."""

    drafted: tuple[int, ...]
    accepted: int
    bonus: int
    features: mx.array | None


def host_ids(ids: mx.array) -> list[int]:
    """Return ids [n] as Python ints, waiting for them."""
    return cast(list[int], ids.tolist())


class Verifier:
    """The target's side of a cycle; `taps` are the layers whose outputs the drafter needs.

    `processors` change the logits, in turn, of every row that is judged or drawn from.
    """

    def __init__(
        self, target: Target, sampler: Sampler, taps: Sequence[int], processors: Sequence[Processor] = ()
    ) -> None:
        self.target, self.sampler, self.taps, self.processors = target, sampler, taps, processors

    def prefill(self, prompt: Sequence[int], state: State, chunk: int) -> Iterator[tuple[mx.array, mx.array | None]]:
        """Feed the prompt by chunks, yielding each chunk's last hidden row [1, D] and its features [1, L, taps x D]."""
        for start in range(0, len(prompt), chunk):
            ids = mx.array([list(prompt[start : start + chunk])])
            hidden, features = self.target.forward(ids, state, self.taps, tape=False)
            yield hidden[0, -1:], features
            mx.eval(state.arrays())
            mx.clear_cache()

    def check(self, anchor: int, draft: Draft | None, state: State) -> Checked:
        """Run [anchor, *draft] through the target and judge the draft: one forward, one host synchronisation.

        Processors need the draft's ids on the host, and wait for them while the forward runs.
        """
        ids = mx.array([anchor], dtype=mx.int32)
        if draft is not None:
            ids = mx.concatenate([ids, draft.tokens])
        hidden, features = self.target.forward(ids[None], state, self.taps)
        accepted, bonus = self._judge(draft, hidden[0])
        outcome = mx.stack([accepted.astype(mx.int32), bonus.astype(mx.int32)])
        mx.eval(outcome, ids, state.arrays(), *([] if features is None else [features]))
        kept, token = host_ids(outcome)
        return Checked(tuple(host_ids(ids)[1:]), kept, token, features)

    def first(self, hidden: mx.array) -> mx.array:
        """Return the id that follows a final-normed hidden row [1, D], as an array of one."""
        if self.sampler.greedy and not self.processors:
            return self.target.best(hidden)
        logits = self._logits(None, hidden)
        return mx.argmax(logits, axis=-1) if self.sampler.greedy else self.sampler.draw(logits)

    def commit(self, tokens: Sequence[int]) -> None:
        """Tell the processors which ids are now part of the answer."""
        for processor in self.processors:
            processor.commit(tokens)

    def _judge(self, draft: Draft | None, hidden: mx.array) -> Verdict:
        if draft is None:
            return Verdict(mx.array(0), self.first(hidden)[0])
        if self.sampler.greedy and not self.processors:
            return judge_greedy(draft, self.target.best(hidden))
        logits = self._logits(draft, hidden)
        if self.sampler.greedy:
            return judge_greedy(draft, mx.argmax(logits, axis=-1))
        return judge_sampled(draft, self.sampler.probabilities(logits), self.sampler.key())

    def _logits(self, draft: Draft | None, hidden: mx.array) -> mx.array:
        """Return the processed logits [n + 1, V] of hidden rows [n + 1, D]."""
        logits = self.target.unembed(hidden)
        if self.processors:
            mx.async_eval(logits)
            drafted = [] if draft is None else host_ids(draft.tokens)
            for processor in self.processors:
                logits = processor.rows(drafted, logits)
        return logits
