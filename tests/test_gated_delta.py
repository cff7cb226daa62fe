"""The gated delta rule with a tape: the twin against mlx-lm, the kernel against the twin, replay against stepping."""

import mlx.core as mx
import pytest
from emulator import Mode, launcher, toolchain
from mlx_lm.models.gated_delta import gated_delta_ops

from dflash_mlx.metal import Tape, gated_delta, recurrent
from dflash_mlx.metal.launch import borrow

needs_clang = pytest.mark.skipif(bool(toolchain()), reason=str(toolchain()))
SHAPES = [(1, 2, 32, 16), (2, 4, 32, 32), (2, 6, 128, 32), (1, 3, 64, 16)]  # Hk, Hv, Dk, Dv


def same(a, b):
    """Bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.all(a == b))


def block(seed, rows, hk, hv, dk, dv, dtype=mx.float32, batch=1):
    keys = mx.random.split(mx.random.key(seed), 5)
    q, k = (mx.random.normal((batch, rows, hk, dk), key=key) for key in keys[:2])
    q, k = (a / mx.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    v = mx.random.normal((batch, rows, hv, dv), key=keys[2])
    g, beta = (mx.sigmoid(mx.random.normal((batch, rows, hv), key=key)) for key in keys[3:])
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta.astype(dtype)


def start(hv, dk, dv, batch=1):
    return mx.random.normal((batch, hv, dv, dk), key=mx.random.key(77))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_twin_is_mlx_lm_bit_for_bit(shape, dtype):
    hk, hv, dk, dv = shape
    inputs, state = block(1, 6, *shape, dtype, batch=2), start(hv, dk, dv, batch=2)
    y, committed, tape = gated_delta(*inputs, state)
    want, _ = gated_delta_ops(*inputs, state)
    assert same(y, want)
    assert same(committed, state)
    assert tape.delta.dtype == mx.float32


@pytest.mark.parametrize("keep", [0, 1, 3, 5])
def test_replaying_kept_rows_is_having_stepped(keep):
    shape = (2, 4, 32, 32)
    state = start(4, 32, 32)
    first, second = block(1, 5, *shape), block(2, 4, *shape)
    _, same_state, tape = gated_delta(*first, state)
    y, committed, _ = gated_delta(*second, same_state, tape, keep)
    stepped = state
    if keep:
        _, stepped = gated_delta_ops(*(a[:, :keep] for a in first), state)
    want, _ = gated_delta_ops(*second, stepped)
    assert same(committed, stepped)
    assert same(y, want)


def test_more_rows_than_the_tape_holds_are_refused():
    inputs, state = block(1, 2, 1, 2, 32, 16), start(2, 32, 16)
    _, _, tape = gated_delta(*inputs, state)
    with pytest.raises(ValueError, match="keep must be in 0..2"):
        gated_delta(*inputs, state, tape, 3)
    with pytest.raises(ValueError, match="keep must be in 0..0"):
        gated_delta(*inputs, state, None, 1)


@needs_clang
@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_agrees_with_the_twin(shape, dtype):
    hk, hv, dk, dv = shape
    seen = []
    state = start(hv, dk, dv, batch=2)
    first, second = (block(i, 3, *shape, dtype, batch=2) for i in (1, 2))
    _, _, tape = recurrent.twin(recurrent.Rows(*first), state)
    want = recurrent.twin(recurrent.Rows(*second), state, tape, 2)
    with borrow(launcher(Mode.CHECKED, seen)):
        got = recurrent.kernel(recurrent.Rows(*second), state, tape, 2)
    assert seen == ["gated_delta_verify"]
    tolerance = {mx.float32: 2e-6, mx.bfloat16: 4e-3, mx.float16: 6e-4}[dtype]
    for mine, true in zip((got[0], got[1], got[2].delta), (want[0], want[1], want[2].delta), strict=True):
        error = mx.linalg.norm((mine - true).astype(mx.float32)) / mx.linalg.norm(true.astype(mx.float32))
        assert error.item() <= tolerance


@needs_clang
@pytest.mark.emulator
def test_the_kernel_rounds_a_block_as_it_rounds_single_rows():
    """Rows of one call, and rows replayed from tape, are bit-equal to one call a row."""
    shape, dtype = (2, 4, 32, 32), mx.bfloat16
    state = start(4, 32, 32)
    rows, more = (recurrent.Rows(*block(i, 8 - i, *shape, dtype)) for i in (3, 5))
    with borrow(launcher()):
        y, untouched, tape = recurrent.kernel(rows, state)
        after, committed, _ = recurrent.kernel(more, state, tape, 3)
        singles, single_state, single_tape = [], state, None
        for t in range(5):
            one, single_state, single_tape = recurrent.kernel(
                recurrent.Rows(*(a[:, t : t + 1] for a in rows)), single_state, single_tape, int(t > 0)
            )
            singles.append(one)
            if t == 3:  # committed after rows 0..2
                assert same(committed, single_state)
    assert same(untouched, state)
    assert same(y, mx.concatenate(singles, axis=1))
    with borrow(launcher()):
        again, _, _ = recurrent.kernel(more, committed, Tape(*(a[:, :1] for a in tape)), 0)
    assert same(after, again)
