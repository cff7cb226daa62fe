"""What may change the target's logits before a token is judged or drawn: penalties, biases, grammars."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx


class Processor(Protocol):
    """One generation's changer of logits, which hears of every token exactly once and sees each row's own past."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Take note of the prompt's ids, before anything else."""

    def rows(self, drafted: Sequence[int], logits: mx.array) -> mx.array:
        """Return changed logits [n + 1, V] for n ids drafted after the committed ones: row i follows drafted[:i]."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Take note of ids that are now part of the answer."""
