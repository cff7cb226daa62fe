"""The draft's view of the text so far: projected target features, always in time order."""

from collections.abc import Sequence

import mlx.core as mx

STEP = 256  # rows by which a buffer grows, and after which a window's rows are moved to its front


class ContextLayer:
    """Keys and values of one drafter layer's context: the last `window - 1` rows, or all when `window` is 0.

    They end a buffer's used part, in time order; a block's own rows are written after them and not counted.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.length = 0  # rows ever appended: the absolute position of the next row
        self.end = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def held(self) -> int:
        """Rows that a query right after the context can see."""
        return self.held_after(0)

    def held_after(self, fresh: int) -> int:
        """Return what `held` will be once `fresh` rows are appended."""
        end = self.end + fresh
        return min(end, self.window - 1) if self.window else end

    def skip(self, rows: int) -> None:
        """Advance by rows that no later query can see; only rows that `window` hides may be left out."""
        self.length += rows

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append context rows, keys and values [1, H, n, D] each."""
        if self.window and (hidden := keys.shape[2] - self.window + 1) > 0:
            self.skip(hidden)
            keys, values = keys[:, :, hidden:], values[:, :, hidden:]
        self.extend(keys, values, keys.shape[2])

    def extend(self, keys: mx.array, values: mx.array, fresh: int) -> tuple[mx.array, mx.array]:
        """Append the first `fresh` rows; return the context followed by the others, a block that is not kept."""
        self._write(keys, values)
        assert self.keys is not None and self.values is not None
        last = self.end + keys.shape[2]
        self.end += fresh
        self.length += fresh
        rows = slice(self.end - self.held, last)
        return self.keys[:, :, rows], self.values[:, :, rows]

    def _write(self, keys: mx.array, values: mx.array) -> None:
        rows = keys.shape[2]
        if self.keys is None or self.end + rows > self.keys.shape[2]:
            self._make_room(keys, values)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, self.end : self.end + rows] = keys
        self.values[:, :, self.end : self.end + rows] = values

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        held = self.held
        room = -(-(held + keys.shape[2]) // STEP) * STEP + STEP - held
        for name, rows in (("keys", keys), ("values", values)):
            old = getattr(self, name)
            space = mx.zeros((*rows.shape[:2], room, rows.shape[3]), dtype=rows.dtype)
            kept = [] if old is None else [old[:, :, self.end - held : self.end]]
            setattr(self, name, mx.concatenate([*kept, space], axis=2))
        self.end = held


class Context:
    """The context of every drafter layer, all of one length, and the rows that the next pass will add to it.

    `fresh` holds the projected features [1, n, D] of those rows: a block's pass makes keys of them with its own.
    """

    def __init__(self, windows: Sequence[int]) -> None:
        self.layers = [ContextLayer(window) for window in windows]
        self.fresh: mx.array | None = None

    @property
    def length(self) -> int:
        """Rows seen: the absolute position of the next anchor."""
        return self.layers[0].length + (0 if self.fresh is None else self.fresh.shape[1])

    def skip(self, rows: int) -> None:
        """Advance by rows that no layer's later queries can see."""
        for layer in self.layers:
            layer.skip(rows)

    def take_fresh(self) -> mx.array | None:
        """Return the rows still to be added, once."""
        fresh, self.fresh = self.fresh, None
        return fresh

    def masks(self, rows: int, causal: Sequence[bool], fresh: int = 0) -> list[mx.array | None]:
        """Return each layer's mask [rows, held + rows] for a block of `rows` rows, None where all is seen.

        `held` counts `fresh` rows that are yet to be added. Row j stands j rows after the anchor: it sees context no
        further back than its window, and of the block all rows, or only those up to itself where the layer is causal.
        """
        made: dict[tuple[int, bool, int], mx.array | None] = {}
        keys = [(layer.window, flag, layer.held_after(fresh)) for layer, flag in zip(self.layers, causal, strict=True)]
        for key in keys:
            if key not in made:
                made[key] = _mask(rows, *key)
        return [made[key] for key in keys]

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        held = [a for layer in self.layers for a in (layer.keys, layer.values)]
        return [a for a in (*held, self.fresh) if a is not None]


def _mask(rows: int, window: int, causal: bool, context: int) -> mx.array | None:
    if not causal and (not window or context + rows - 1 < window):
        return None
    query, key = mx.arange(rows)[:, None], mx.arange(-context, rows)[None]
    seen = (key <= query) if causal else (key < rows)
    return seen & ((key >= 0) | (query - key < window)) if window else seen
