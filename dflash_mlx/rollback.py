"""Layer states that can forget their last rows: keys and values by trimming, recurrent layers by their tape."""

from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dflash_mlx.metal import Tape, replay


class LayerState(Protocol):
    """One layer's memory of the rows seen so far."""

    @property
    def length(self) -> int:
        """Rows held."""

    def keep(self, length: int) -> None:
        """Forget the rows from `length` on."""

    def arrays(self) -> list[mx.array]:
        """Return every array held, for evaluation and for sums of bytes."""


class KVLayer(KVCache):
    """mlx-lm's key/value cache; rows past `length` are stale and overwritten by the next forward."""

    @property
    def length(self) -> int:
        """Rows held."""
        return int(self.offset)

    def keep(self, length: int) -> None:
        """Forget the rows from `length` on; ValueError when they were never there."""
        if not 0 <= length <= self.offset:
            raise ValueError(f"keep({length}) of {self.offset} rows")
        self.trim(self.offset - length)

    def arrays(self) -> list[mx.array]:
        """Return keys and values, each [1, H, capacity, D]."""
        return [] if self.keys is None else [self.keys, self.values]


class DeltaLayer:
    """A gated-delta layer: the recurrent state of the first `base` rows and the tape of the rows after them.

    `keep` only records how many tape rows count; the next forward applies those rows first. So the state is read once
    and written once a cycle, and forgetting costs nothing.
    """

    def __init__(self, conv_rows: int) -> None:
        self.conv_rows = conv_rows  # inputs that the causal convolution looks back on: its kernel size - 1
        self.base = 0
        self.kept = 0
        self.inputs: mx.array | None = None  # [1, conv_rows + P, C]: the conv inputs before `base`, then the tape's
        self.recurrent: mx.array | None = None  # [1, Hv, Dv, Dk] float32 after `base` rows
        self.tape: Tape | None = None

    @property
    def length(self) -> int:
        """Rows held."""
        return self.base + self.kept

    def keep(self, length: int) -> None:
        """Forget the rows from `length` on; ValueError when they are no longer on the tape."""
        if not self.base <= length <= self.length:
            raise ValueError(f"keep({length}) of {self.length} rows, of which {self.base} are committed")
        self.kept = length - self.base

    def conv_state(self, like: mx.array) -> mx.array:
        """Return the conv inputs before the next row, [1, conv_rows, C]; zeros of `like`'s [1, L, C] at the start."""
        if self.inputs is None:
            return mx.zeros((like.shape[0], self.conv_rows, like.shape[-1]), dtype=like.dtype)
        return self.inputs[:, self.kept : self.kept + self.conv_rows]

    def settled(self, start: mx.array) -> mx.array:
        """Return the recurrent state after all `length` rows, [1, Hv, Dv, Dk] float32; `start` before the first row."""
        state = start if self.recurrent is None else self.recurrent
        return state if self.tape is None else replay(state, self.tape, self.kept)

    def commit(self, recurrent: mx.array, inputs: mx.array, rows: int) -> None:
        """Advance by `rows` rows that are never forgotten; `inputs` are the conv inputs including the conv state."""
        self.base, self.kept, self.tape = self.length + rows, 0, None
        self.recurrent, self.inputs = recurrent, mx.contiguous(inputs[:, -self.conv_rows :])

    def record(self, settled: mx.array, inputs: mx.array, tape: Tape) -> None:
        """Advance by the tape's rows, each of which may still be forgotten; `settled` is the state before them."""
        self.base, self.kept, self.tape = self.length, tape.g.shape[1], tape
        self.recurrent, self.inputs = settled, inputs

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        return [a for a in (self.inputs, self.recurrent, *(self.tape or ())) if a is not None]


class State:
    """A target's memory of one sequence: every layer's state, always of one length."""

    def __init__(self, layers: list[LayerState]) -> None:
        self.layers = layers

    @property
    def length(self) -> int:
        """Rows held."""
        return self.layers[0].length

    def keep(self, length: int) -> None:
        """Forget the rows from `length` on: the only way back; ValueError when they cannot be forgotten any more."""
        for layer in self.layers:
            layer.keep(length)

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        return [array for layer in self.layers for array in layer.arrays()]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays())
