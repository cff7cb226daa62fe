"""Linear layers through numpy's BLAS: right numbers, and a row that rounds the same alone and in a block."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.models.host import HostLinear, rounds_alike, to_host
from dflash_mlx.models.linear import Stack, project


def matrix(height: int, width: int) -> mx.array:
    return mx.random.normal((height, width), key=mx.random.key(height))


@pytest.mark.parametrize("height", [1, 64, 96, 200])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 40])
def test_products_are_those_of_float64(rows, height):
    weight, x = matrix(height, 64), mx.random.normal((1, rows, 64), key=mx.random.key(rows))
    made = HostLinear(weight)(x)
    wanted = np.array(x, np.float64) @ np.array(weight, np.float64).T
    assert made.shape == (1, rows, height) and made.dtype == mx.float32
    assert np.abs(np.array(made) - wanted).max() < 1e-4


def test_a_row_rounds_alike_alone_and_in_a_block():
    if not rounds_alike(64):  # then no model is turned over to this path: see the next test
        model = nn.Linear(64, 96, bias=False)
        assert to_host(model) is False
        return
    layer, x = HostLinear(matrix(96, 64)), mx.random.normal((16, 64), key=mx.random.key(3))
    alone = [layer(x[i : i + 1]) for i in range(16)]
    for rows in (2, 5, 8, 11, 16):
        block = layer(x[:rows])
        assert all(mx.array_equal(block[i], alone[i][0]) for i in range(rows)), rows


def test_joined_layers_round_as_each_alone_does():
    """The proof looks at one width only: a product's rounding depends on nothing that lies beside it."""
    layers, x = [HostLinear(matrix(n, 64)) for n in (96, 40, 256)], mx.random.normal((5, 64), key=mx.random.key(3))
    wanted = [HostLinear(layer.weight)(x) for layer in layers]
    assert all(map(mx.array_equal, Stack(*layers)(x), wanted))


def test_a_model_is_turned_over_whole_or_not_at_all(monkeypatch):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=True), nn.RMSNorm(32)]

    net = Net()
    net.set_dtype(mx.bfloat16)
    monkeypatch.setattr("dflash_mlx.models.host.rounds_alike", lambda width: False)
    assert not to_host(net) and type(net.layers[0]) is nn.Linear and net.layers[0].weight.dtype == mx.bfloat16
    monkeypatch.undo()
    x = mx.random.normal((3, 32), key=mx.random.key(1))
    wanted = net.layers[0](x.astype(mx.bfloat16))
    assert to_host(net) == rounds_alike(32)
    if rounds_alike(32):
        assert type(net.layers[0]) is HostLinear and type(net.layers[1]) is nn.Linear
        assert net.layers[2].weight.dtype == mx.float32
        assert mx.allclose(net.layers[0](x), wanted.astype(mx.float32), atol=0.05)


def test_stacked_layers_share_their_weights():
    layers = [HostLinear(matrix(n, 32)) for n in (8, 24)]
    x = mx.random.normal((5, 32), key=mx.random.key(2))
    wanted = [x @ layer.weight.T for layer in layers]
    stack = Stack(*layers)
    for made, own, want in zip(stack(x), [project(layer, x) for layer in layers], wanted, strict=True):
        assert mx.allclose(made, want, atol=1e-5) and mx.allclose(own, want, atol=1e-5)
