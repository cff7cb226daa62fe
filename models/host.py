"""Linear layers on a CPU through numpy's BLAS: MLX's wheels for Linux carry an unoptimised one."""

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path
from threadpoolctl import ThreadpoolController

TILE = 8  # rows of every product for a block: one row alone and one among eight then round alike
BLOCK_ROWS = 16  # beyond that it is prefill, which goes as one product


class HostLinear(nn.Linear):
    """A float32 linear layer without bias; each call waits for its input."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__(1, 1, bias=False)
        self.weight = weight
        self._matrix: np.ndarray | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """Return [..., N] for x [..., K]."""
        if self._matrix is None:
            self._matrix = np.ascontiguousarray(np.array(self.weight, copy=False).T)
        rows = np.array(x, copy=False).reshape(-1, x.shape[-1])
        with _blas().limit(limits=1):
            return mx.array(_product(rows, self._matrix)).reshape(*x.shape[:-1], -1)


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries in use; products this small lose with threads, and lose badly on a busy machine."""
    return ThreadpoolController().select(user_api="blas")


def _product(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    count = rows.shape[0]
    if count > BLOCK_ROWS:
        return rows @ matrix
    padded = np.zeros((-(-count // TILE) * TILE, rows.shape[1]), np.float32)
    padded[:count] = rows
    if count <= TILE:
        return (padded @ matrix)[:count]
    return np.concatenate([padded[i : i + TILE] @ matrix for i in range(0, count, TILE)])[:count]


def rounds_alike(width: int, height: int) -> bool:
    """Tell whether a row's product with a [height, width] matrix is here the same at every place in a tile."""
    draw = np.random.default_rng(0)
    matrix = draw.standard_normal((width, height), np.float32)
    row, others = draw.standard_normal((1, width), np.float32), draw.standard_normal((TILE, width), np.float32)
    blocks = []
    for place in range(TILE):
        blocks.append(others.copy())
        blocks[-1][place] = row
    with _blas().limit(limits=1):
        wanted = _product(row, matrix)[0]
        return all(np.array_equal(_product(block, matrix)[i], wanted) for i, block in enumerate(blocks))


def to_host(model: nn.Module) -> bool:
    """Turn a model to float32, its linear layers to HostLinear; False, and untouched, where rows would round apart."""
    linears = {path: layer for path, layer in model.named_modules() if type(layer) is nn.Linear and "bias" not in layer}
    shapes = {layer.weight.shape for layer in linears.values()}
    if not all(rounds_alike(width, height) for height, width in shapes):
        return False
    model.set_dtype(mx.float32)
    leaves = {path: HostLinear(layer.weight) for path, layer in linears.items()}
    model.update_modules(
        tree_map_with_path(
            lambda path, layer: leaves.get(path, layer), model.leaf_modules(), is_leaf=nn.Module.is_module
        )
    )
    return True
