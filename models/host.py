"""Linear layers on a CPU through numpy's BLAS: MLX's wheels for Linux carry an unoptimised one."""

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path
from threadpoolctl import ThreadpoolController

TILE = 8  # rows of every product for a block: one row alone and one among eight then round alike
BLOCK_ROWS = 16  # beyond that it is prefill, which goes as one product
COLUMNS = 64  # of every product: OpenBLAS multiplies matrices this small without repacking the weights each time


class HostLinear(nn.Linear):
    """A float32 linear layer without bias; each call waits for its input."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__(1, 1, bias=False)
        self.weight = weight
        self._tiles: np.ndarray | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """Return [..., N] for x [..., K]."""
        if self._tiles is None:
            self._tiles = _tiles(np.array(self.weight, copy=False))
        rows = np.array(x, copy=False).reshape(-1, x.shape[-1])
        with _blas().limit(limits=1):
            return mx.array(_product(rows, self._tiles)[:, : self.weight.shape[0]]).reshape(*x.shape[:-1], -1)


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries in use; products this small lose with threads, and lose badly on a busy machine."""
    return ThreadpoolController().select(user_api="blas")


def _tiles(weight: np.ndarray) -> np.ndarray:
    """Return a weight [N, K] as [tiles, K, COLUMNS], the last tile filled up with zeros."""
    height, width = weight.shape
    padded = np.pad(weight, [(0, -height % COLUMNS), (0, 0)])
    return np.ascontiguousarray(padded.reshape(-1, COLUMNS, width).transpose(0, 2, 1))


def _product(rows: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """Return rows [n, K] times a matrix as `_tiles` lays it: [n, tiles x COLUMNS]."""
    count = rows.shape[0]
    if count > BLOCK_ROWS:
        return _multiplied(rows, tiles)
    padded = np.zeros((-(-count // TILE) * TILE, rows.shape[1]), np.float32)
    padded[:count] = rows
    if count <= TILE:
        return _multiplied(padded, tiles)[:count]
    return np.concatenate([_multiplied(padded[i : i + TILE], tiles) for i in range(0, count, TILE)])[:count]


def _multiplied(rows: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    made = np.empty((rows.shape[0], tiles.shape[0], COLUMNS), np.float32)
    np.matmul(rows, tiles, out=made.transpose(1, 0, 2))
    return made.reshape(rows.shape[0], -1)


def rounds_alike(width: int) -> bool:
    """Tell whether a row's product with a matrix of this width is here the same at every place in a tile."""
    draw = np.random.default_rng(0)
    tiles = _tiles(draw.standard_normal((2 * COLUMNS, width), np.float32))
    row, others = draw.standard_normal((1, width), np.float32), draw.standard_normal((TILE, width), np.float32)
    blocks = []
    for place in range(TILE):
        blocks.append(others.copy())
        blocks[-1][place] = row
    with _blas().limit(limits=1):
        wanted = _product(row, tiles)[0]
        return all(np.array_equal(_product(block, tiles)[i], wanted) for i, block in enumerate(blocks))


def to_host(model: nn.Module) -> bool:
    """Turn a model to float32, its linear layers to HostLinear; False, and untouched, where rows would round apart."""
    linears = {path: layer for path, layer in model.named_modules() if type(layer) is nn.Linear and "bias" not in layer}
    if not all(map(rounds_alike, {layer.weight.shape[1] for layer in linears.values()})):
        return False
    model.set_dtype(mx.float32)
    leaves = {path: HostLinear(layer.weight) for path, layer in linears.items()}
    model.update_modules(
        tree_map_with_path(
            lambda path, layer: leaves.get(path, layer), model.leaf_modules(), is_leaf=nn.Module.is_module
        )
    )
    return True
