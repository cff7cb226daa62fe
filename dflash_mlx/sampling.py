"""Logits to distribution to token, with mlx-lm's own filters in mlx-lm's own order."""

import random
import secrets

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from dflash_mlx.types import Sampling


class Sampler:
    """One generation's way from logits to tokens; its randomness depends on its seed alone.

    `seed` is the one given, or one drawn from the system; greedy decoding has none.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.greedy = sampling.temperature == 0.0 or sampling.top_k == 1
        drawn = sampling.seed if sampling.seed is not None else secrets.randbits(32)
        self.seed = None if self.greedy else drawn
        self._keys = random.Random(drawn)

    @property
    def temperature(self) -> float:
        """The temperature in use: 0 whenever decoding is greedy."""
        return 0.0 if self.greedy else self.sampling.temperature

    def key(self) -> mx.array:
        """Return the next random key."""
        return mx.random.key(self._keys.getrandbits(64))

    def probabilities(self, logits: mx.array) -> mx.array:
        """Return the distribution [n, V] float32 that tokens are drawn from, given logits [n, V].

        Filters see the untempered distribution, top-p first, then min-p, then top-k; temperature comes last.
        """
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        wanted = self.sampling
        if 0.0 < wanted.top_p < 1.0:
            logprobs = apply_top_p(logprobs, float(wanted.top_p))
        if wanted.min_p:
            logprobs = apply_min_p(logprobs, float(wanted.min_p))
        if 0 < wanted.top_k < logits.shape[-1]:
            logprobs = apply_top_k(logprobs, wanted.top_k)
        return mx.softmax(logprobs * (1.0 / wanted.temperature), axis=-1)

    def draw(self, logits: mx.array) -> mx.array:
        """Return a token id for each row of logits [n, V], drawn at this temperature."""
        return draw(self.probabilities(logits), self.key())


def draw(probabilities: mx.array, key: mx.array) -> mx.array:
    """Return an id drawn from each row of probabilities [..., V], which need not sum to 1."""
    return mx.random.categorical(mx.log(probabilities), key=key)
