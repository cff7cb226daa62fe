"""Judges a draft against the target: greedy match, or rejection sampling that keeps the target's distribution."""

from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.sampling import draw


class Draft(NamedTuple):
    """Proposed ids [n], and what each was drawn from: probabilities [n, k] over candidates [n, k].

    Without `probabilities` the proposals were certain (a one-hot distribution).
    """

    tokens: mx.array
    candidates: mx.array | None = None
    probabilities: mx.array | None = None


class Verdict(NamedTuple):
    """How many leading proposals are kept, and the target's own token after them; both lazy scalars."""

    accepted: mx.array
    bonus: mx.array


def judge_greedy(draft: Draft, best: mx.array) -> Verdict:
    """Keep proposals while they are the target's likeliest ids; `best` [n + 1] follow the anchor and each proposal."""
    accepted = _leading(draft.tokens == best[:-1])
    return Verdict(accepted, best[accepted])


def judge_sampled(draft: Draft, target: mx.array, key: mx.array) -> Verdict:
    """Keep proposal x with probability min(1, p(x) / q(x)), else draw from what p has over q.

    `target` [n + 1, V] float32 holds p after the anchor and after each proposal.
    """
    chance, redraw = mx.random.split(key)
    p = mx.take_along_axis(target[:-1], draft.tokens[:, None], axis=-1)[:, 0]
    candidates, q = _proposal(draft)
    q_drawn = mx.where(candidates == draft.tokens[:, None], q, 0.0).sum(axis=-1)
    accepted = _leading(mx.random.uniform(shape=p.shape, key=chance) * q_drawn < p)
    # The row after the last proposal has nothing to subtract: its q is all zeros.
    candidates = mx.concatenate([candidates, candidates[:1]])[accepted]
    q = mx.concatenate([q, mx.zeros_like(q[:1])])[accepted]
    row = target[accepted]
    residual = mx.maximum(row.at[candidates].subtract(q), 0.0)
    # Where p and q agree to the last bit, nothing is left but rounding: the target's own row is then the answer.
    return Verdict(accepted, draw(mx.where(residual.sum() > 0.0, residual, row), redraw))


def _proposal(draft: Draft) -> tuple[mx.array, mx.array]:
    if draft.candidates is None or draft.probabilities is None:
        return draft.tokens[:, None], mx.ones((draft.tokens.shape[0], 1))
    return draft.candidates, draft.probabilities


def _leading(kept: mx.array) -> mx.array:
    return mx.cumprod(kept.astype(mx.int32)).sum()
