"""Proposes a block from an anchor and the target's features."""

import mlx.core as mx

from dflash_mlx.acceptance import Draft
from dflash_mlx.models import Context, DraftNet, Target
from dflash_mlx.models.draft import softcapped, top_ids
from dflash_mlx.sampling import Sampler


class Drafter:
    """A drafter net reading and writing through its target's embedding and head."""

    def __init__(self, net: DraftNet, target: Target) -> None:
        self.net, self.target, self.config = net, target, net.config

    def absorb(self, features: mx.array, context: Context, last: int) -> None:
        """Append features [1, L, taps x D] to the context, leaving out rows too old to be seen from position `last`."""
        rows = self.config.context_rows
        hidden = 0 if rows is None else min(max(last - rows - context.length, 0), features.shape[1])
        context.skip(hidden)
        if hidden < features.shape[1]:
            self.net.absorb(features[:, hidden:], context)

    def propose(self, anchor: int, width: int, context: Context, sampler: Sampler, denoise_steps: int = 1) -> Draft:
        """Return `width` proposals for the positions after the anchor, which stands right after the context.

        With `denoise_steps` above 1 the most confident masks are replaced by their tokens and the rest drafted again,
        that many passes in all.
        """
        fixed: mx.array | None = None  # [width] ids settled by earlier passes, -1 where still masked
        for left in range(min(denoise_steps, width), 1, -1):  # each pass settles at least one mask
            logits, hidden = self._pass(anchor, width, context, fixed)
            tokens = self._select(anchor, logits, hidden, fixed, None).tokens
            fixed = _settle(tokens, logits, fixed, left)
        logits, hidden = self._pass(anchor, width, context, fixed)
        return self._select(anchor, logits, hidden, fixed, None if sampler.greedy else sampler)

    def _pass(self, anchor: int, width: int, context: Context, fixed: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return head logits [width, V] and hidden rows [1, width, D] of one draft pass."""
        masks = mx.full((width,), self.config.mask_token_id, dtype=mx.int32)
        body = masks if fixed is None else mx.where(fixed < 0, masks, fixed)
        ids = mx.concatenate([mx.array([anchor], dtype=mx.int32), body])
        hidden = self.net(self.target.embed(ids[None]), context)[:, 1:]
        return softcapped(self.target.unembed(hidden)[0].astype(mx.float32), self.config), hidden

    def _select(
        self, anchor: int, logits: mx.array, hidden: mx.array, fixed: mx.array | None, sampler: Sampler | None
    ) -> Draft:
        if self.config.version == 1:  # positions drawn apart from each other rarely fit together: propose the best
            best = mx.argmax(logits, axis=-1).astype(mx.int32)
            return Draft(best if fixed is None else mx.where(fixed < 0, best, fixed))
        candidates = top_ids(logits[:, : self.config.selector_vocab], self.config.selector_top_k).astype(mx.int32)
        if fixed is not None:
            candidates = mx.where((fixed < 0)[:, None], candidates, fixed[:, None])
        pairs = self.net.candidate_selector(hidden, mx.array([anchor], dtype=mx.int32), candidates)
        scores = pairs.astype(mx.float32) + mx.take_along_axis(logits, candidates, axis=-1)[:, None]
        if fixed is not None:  # a settled row holds its token k times: leave one
            spare = (fixed >= 0)[:, None, None] & (mx.arange(candidates.shape[1]) > 0)
            scores = mx.where(spare, -mx.inf, scores)
        return _walk(scores, candidates, sampler)


def _walk(scores: mx.array, candidates: mx.array, sampler: Sampler | None) -> Draft:
    """Choose a candidate of each row in turn, given the one before: pair scores [n, k, k], candidates [n, k]."""
    rows, k = candidates.shape
    lines, at = scores.reshape(rows * k, k), mx.array(0)
    best = mx.argmax(lines, axis=-1)
    chosen, probabilities = [], []
    for first in range(0, rows * k, k):
        if sampler is None:
            at = mx.take(best, at + first)
        else:
            line = mx.take(lines, at + first, axis=0) * (1.0 / sampler.temperature)
            at = mx.random.categorical(line, key=sampler.key())
            probabilities.append(mx.softmax(line))
        chosen.append(at)
    tokens = mx.take_along_axis(candidates, mx.stack(chosen)[:, None].astype(mx.int32), axis=-1)[:, 0]
    return Draft(tokens) if sampler is None else Draft(tokens, candidates, mx.stack(probabilities))


def _settle(tokens: mx.array, logits: mx.array, fixed: mx.array | None, left: int) -> mx.array:
    """Return ids [n] with a share of the masked rows settled, the most confident first; `left` counts this pass."""
    rows = tokens.shape[0]
    masked = mx.ones(rows, dtype=mx.bool_) if fixed is None else fixed < 0
    at_token = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    confidence = mx.where(masked, at_token - mx.logsumexp(logits, axis=-1), -mx.inf)
    rank = mx.argsort(mx.argsort(-confidence))
    count = -(-masked.sum() // left)
    return mx.where(masked & (rank < count), tokens, -1 if fixed is None else fixed)
