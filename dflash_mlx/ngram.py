"""Prompt lookup: where the text repeats itself, as in an edit of a file, its own past is the draft."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.acceptance import Draft

SIZE = 3  # ids that must agree before the past is looked at
LEAST, MOST = 6, 48  # bounds of how many ids must agree before the past is believed without asking the draft
VOTES = 1  # leading ids of a draft that must agree with the past before it supplies the others


class Copy(NamedTuple):
    """Ids that followed the last time the text ended as it does now; `sure` where that alone is a good draft."""

    tokens: list[int]
    sure: bool


class Lookup:
    """The ids so far, and where each run of SIZE ids last ended.

    It learns how long an agreement must be before it is believed: longer after a bad guess, shorter after a good one.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.needed = LEAST
        self._ends: dict[tuple[int, ...], int] = {}
        self._before: int | None = None  # where the run that ends the text now ended before

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed ids."""
        for token in tokens:
            self.ids.append(token)
            run = tuple(self.ids[-SIZE:])
            self._before = self._ends.get(run)
            self._ends[run] = len(self.ids)

    def propose(self, width: int) -> Copy | None:
        """Return `width` ids, or None where the end of the text is new; a past that runs into the end repeats."""
        start = self._before
        if start is None:
            return None
        period = len(self.ids) - start
        tokens = [self.ids[start + i % period] for i in range(width)]
        return Copy(tokens, self._agreement(start) >= self.needed)

    def learn(self, proposed: int, accepted: int) -> None:
        """Take note of how many of the ids proposed without a draft were accepted."""
        if accepted == proposed:
            self.needed = max(LEAST, self.needed - 1)
        elif 2 * accepted < proposed:
            self.needed = min(MOST, 2 * self.needed)

    def _agreement(self, start: int) -> int:
        """Return how many ids before `start` equal those that end the text, counting no further than needed."""
        most = min(start, self.needed)
        return next((i for i in range(most) if self.ids[start - 1 - i] != self.ids[-1 - i]), most)


def blend(draft: Draft, copy: mx.array) -> Draft:
    """Return the draft [n] with the ids of `copy` [n] after its first VOTES proposals, where those agree with it.

    What follows the votes then depends on them alone, so each proposal still has the distribution that is stated.
    """
    agree = (draft.tokens[:VOTES] == copy[:VOTES]).all()
    late = agree & (mx.arange(copy.shape[0]) >= VOTES)
    tokens = mx.where(late, copy, draft.tokens)
    if draft.candidates is None or draft.probabilities is None:
        return Draft(tokens)
    certain = (mx.arange(draft.candidates.shape[1]) == 0).astype(draft.probabilities.dtype)
    return Draft(
        tokens,
        mx.where(late[:, None], copy[:, None], draft.candidates),
        mx.where(late[:, None], certain, draft.probabilities),
    )
