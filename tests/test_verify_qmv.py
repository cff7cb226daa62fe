"""Quantized kernels in the emulator: against float64, against themselves row by row, and with parts taken out."""

import mlx.core as mx
import numpy as np
import pytest
from emulator import Mode, launcher, run, toolchain

from dflash_mlx.metal import linear
from dflash_mlx.metal.launch import BODIES, borrow
from dflash_mlx.metal.linear import Quantized

pytestmark = [pytest.mark.emulator, pytest.mark.skipif(bool(toolchain()), reason=str(toolchain()))]
TOLERANCE = {mx.bfloat16: 4e-3, mx.float16: 6e-4, mx.float32: 1e-6}
DTYPES = list(TOLERANCE)


def matrix(n, k, bits=4, group=64, dtype=mx.bfloat16, seed=0):
    """A quantized matrix drawn directly: any code, scales of both signs."""
    codes, scales, biases = mx.random.split(mx.random.key(seed), 3)
    # randint draws 31 bits at most; two draws fill the word.
    low, high = (
        mx.random.randint(0, 1 << 16, (n, k * bits // 32), mx.uint32, key) for key in mx.random.split(codes, 2)
    )
    s = mx.random.normal((n, k // group), key=scales) * 0.02
    b = mx.random.normal((n, k // group), key=biases) * 0.1
    return Quantized(low | (high << 16), s.astype(dtype), b.astype(dtype), group, bits)


def rows(m, k, dtype=mx.bfloat16, seed=1):
    return mx.random.normal((m, k), key=mx.random.key(seed)).astype(dtype)


def true_product(w, x):
    """x times w in float64, from the codes."""
    n, k = w.shape
    words = np.array(w.weight)
    shifts = np.arange(0, 32, w.bits, dtype=np.uint32)
    codes = ((words[..., None] >> shifts) & ((1 << w.bits) - 1)).reshape(n, k).astype(np.float64)
    s, b = (np.repeat(np.array(a.astype(mx.float32), np.float64), w.group_size, 1) for a in (w.scales, w.biases))
    return np.array(x.astype(mx.float32), np.float64) @ (codes * s + b).T


def error(y, want):
    return np.linalg.norm(np.array(y.astype(mx.float32), np.float64) - want) / np.linalg.norm(want)


def emulate(w, x, team=None, mode=Mode.CHECKED):
    with borrow(launcher(mode)):
        return linear._rows(w, x, team)


CASES = [
    (dtype, bits, group, m, n, k)
    for i, dtype in enumerate(DTYPES)
    for j, bits in enumerate((4, 8))
    for g, group in enumerate((32, 64, 128))
    # every M, ragged N, K that fills its last step and K that does not
    for m in [1 + (6 * i + 3 * j + g) % 8]
    for n, k in [(33 + 16 * g + m, 128 * (1 + (i + j + g) % 5) + group * (i % 2))]
]


@pytest.mark.parametrize(("dtype", "bits", "group", "m", "n", "k"), CASES, ids=str)
def test_numbers_against_float64(dtype, bits, group, m, n, k):
    k -= k % group
    w, x = matrix(n, k, bits, group, dtype), rows(m, k, dtype)
    assert error(emulate(w, x, team=1 + m % 3), true_product(w, x)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("scales", DTYPES, ids=str)
def test_scales_may_have_another_dtype_than_activations(scales):
    w, x = matrix(40, 256, dtype=scales), rows(3, 256, mx.float32)
    assert error(emulate(w, x), true_product(w, x)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    ("n", "k"), [(17408, 5120), (5120, 17408), (1024, 5120), (48, 5120), (10240, 5120), (5120, 6144)], ids=str
)
def test_real_shapes(n, k):
    w, x = matrix(n, k), rows(5, k)
    y = emulate(w, x, mode=Mode.BARE)
    some = np.unique(np.r_[0:64, n // 2 : n // 2 + 16, n - 64 : n].clip(0, n - 1))
    part = Quantized(*(a[mx.array(some)] for a in (w.weight, w.scales, w.biases)), 64, 4)
    assert error(y[:, mx.array(some)], true_product(part, x)) <= TOLERANCE[mx.bfloat16]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_bit_equal_in_every_company(bits):
    """M and R decide who computes a row, never how: the base of exact verification."""
    w, x = matrix(40, 640, bits), rows(8, 640)
    alone = mx.concatenate([emulate(w, x[i : i + 1], mode=Mode.BARE) for i in range(8)])
    for m in range(2, 9):
        for team in (1, 2, 4)[m % 2 :]:
            assert mx.array_equal(emulate(w, x[:m], team, Mode.BARE), alone[:m]), (m, team)


def test_both_decodings_are_bit_equal():
    """CUDA plants bits in a float's mantissa where Metal converts; loads ahead change nothing either."""
    w, x = matrix(40, 640), rows(3, 640)
    want = emulate(w, x)

    def cuda_way(body, inputs, template, groups, threads, outputs):
        flags = {"MAGIC": True, "AHEAD": True} if "MAGIC" in template else {}
        return launcher(Mode.CHECKED)(body, inputs, template | flags, groups, threads, outputs)

    with borrow(cuda_way):
        assert mx.array_equal(linear._rows(w, x), want)


@pytest.mark.parametrize("m", [1, 5, 8])
@pytest.mark.parametrize("n", [50, 1000])
def test_head_argmax_is_the_argmax_of_the_logits(n, m):
    w, x = matrix(n, 256), rows(m, 256)
    # Doubled rows make ties: every logit twice, the lower index must win.
    w = Quantized(*(mx.concatenate([a, a]) for a in (w.weight, w.scales, w.biases)), 64, 4)
    with borrow(launcher(Mode.CHECKED)):
        ids, logits = linear._best(w, x), linear._rows(w, x)
    assert ids.dtype == mx.uint32
    assert mx.array_equal(ids, mx.argmax(logits, axis=-1))
    assert mx.all(ids < n).item()


def test_the_head_of_the_flagship():
    w, x = matrix(248320, 64), rows(2, 64)
    with borrow(launcher(Mode.BARE)):
        ids, logits = linear._best(w, x), linear._rows(w, x)
    assert mx.array_equal(ids, mx.argmax(logits, axis=-1))
    assert (
        error(logits[:, -40:], true_product(Quantized(w.weight[-40:], w.scales[-40:], w.biases[-40:], 64, 4), x)) < 4e-3
    )


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
CUTS = [
    ("verify_qmm", BARRIER, "", 0, "race"),
    ("verify_qmm", "output < uint(N) ? output : N - 1", "output", 0, "out of bounds"),
    ("verify_qmm", "output < uint(N) && m < uint(M)", "output < uint(N)", 0, "out of bounds"),
    (
        "prepare_tiles",
        "m < uint(M) ? float(x[size_t(m) * K + chunk * CHUNK + j * PLACES + s]) : 0.0f",
        "float(x[m * K + chunk * CHUNK + j * PLACES + s])",
        0,
        "out",
    ),  # kernel, part, what to put there, which of its places, the fault that follows
    ("verify_qmv", BARRIER, "", 0, "race"),
    ("head_argmax", BARRIER, "", 0, "race"),
    ("head_argmax", BARRIER, "", 1, "race"),
    ("argmax_finish", BARRIER, "", 0, "race"),
    ("verify_qmv", "N % ROWS == 0 || row < uint(N) ? row : N - 1", "row", 0, "out of bounds"),
    ("verify_qmv", "K % STEP == 0 || k0 < uint(K) ? k0 : 0", "k0", 0, "out of bounds"),
    ("verify_qmv", "if (row < uint(N)) ", "", 0, "stored twice"),
    (
        "prepare",
        "k < uint(K) ? float(x[size_t(m) * K + k + q * 4 + i]) : 0.0f",
        "float(x[m * K + k + q * 4 + i])",
        0,
        "out",
    ),
    ("prepare", "if (index < uint(STEPS * M * 8)) ", "", 0, "out of bounds"),
]


@pytest.mark.parametrize(("name", "part", "instead", "which", "fault"), CUTS, ids=str)
def test_every_barrier_and_guard_is_needed(name, part, instead, which, fault):
    """Take one out and the emulator must object."""

    def cut(text):
        pieces = text.split(part)
        assert len(pieces) > which + 1, "no such part in the text"
        return part.join(pieces[: which + 1]) + instead + part.join(pieces[which + 1 :])

    assert found(name, str) == []
    assert any(fault in line for line in found(name, cut))


def found(name, edit):
    """Faults of one kernel in a pipeline that is sound otherwise."""
    w, x, faults = matrix(50, 160, group=32), rows(3, 160), []
    if name in ("verify_qmm", "prepare_tiles"):
        w, x = matrix(50, 192), rows(6, 192)

    def spy(body, inputs, template, groups, threads, outputs):
        change = edit if body.name == name else str
        report = run(body, inputs, template, groups, threads, outputs, edit=change)
        faults.extend(report.faults)
        return report.outputs

    with borrow(spy):
        mx.eval(linear._rows(w, x, 2), linear._best(w, x), linear._tile(w, x) if w.group_size == 64 else x)
    return faults


def test_bytes_and_operations():
    """Each weight is read once for all rows, and five rows cost at most 9.1 lane operations a weight."""
    for m in (1, 5, 8):
        w, x, seen = matrix(256, 2560), rows(m, 2560), {}  # long enough for a loop

        def spy(body, inputs, template, groups, threads, outputs, seen=seen):
            arguments = (body, inputs, template, groups, threads, outputs)
            seen[body.name] = run(*arguments, count=True), run(*arguments, mode=Mode.COUNTED)
            return seen[body.name][0].outputs

        with borrow(spy):
            linear._rows(w, x, 4 if m < 7 else 2)
        bytes_, counted = seen["verify_qmv"]
        assert bytes_.bytes["weight"]["requested"] == w.weight.nbytes
        assert bytes_.bytes["weight"]["once"] == w.weight.nbytes
        assert bytes_.bytes["scales"]["per_threadgroup"] == w.scales.nbytes
        assert m <= counted.operations["fma"] / (256 * 2560) <= m + 0.5  # one a weight and row, and a little for groups
        if m == 5:
            assert counted.operations["total"] / (256 * 2560) <= 9.1


def test_the_public_calls_run_the_kernels():
    w = matrix(64, 256)
    arrays = {"group_size": 64, "bits": 4}
    x = mx.random.normal((2, 6, 256), key=mx.random.key(5)).astype(mx.bfloat16)  # 12 rows: two tiles
    seen = []
    with borrow(launcher(Mode.BARE, seen)):
        y = linear.quantized_linear(x, w.weight, w.scales, w.biases, **arrays)
        ids = linear.head_argmax(x, w.weight, w.scales, w.biases, **arrays)
    assert {"prepare", "verify_qmv", "head_argmax", "argmax_finish"} <= set(seen)
    assert y.shape == (2, 6, 64)
    assert ids.shape == (2, 6)
    assert mx.array_equal(ids, mx.argmax(y, axis=-1))
    assert error(y, true_product(w, x)) <= TOLERANCE[mx.bfloat16]


def test_without_a_gpu_the_twins_are_the_stock_op():
    w, x = matrix(64, 256), rows(5, 256)
    arrays = {"group_size": 64, "bits": 4}
    assert mx.array_equal(linear.quantized_linear(x, w.weight, w.scales, w.biases, **arrays), w.stock(x))
    assert mx.array_equal(linear.head_argmax(x, w.weight, w.scales, w.biases, **arrays), mx.argmax(w.stock(x), axis=-1))
    assert set(BODIES) >= {"verify_qmv", "head_argmax"}


@pytest.mark.parametrize(
    ("dtype", "bits", "group", "m", "n", "k"),
    [
        (mx.bfloat16, 4, 64, 6, 40, 256),
        (mx.float16, 4, 128, 16, 33, 384),
        (mx.float32, 4, 64, 11, 70, 192),
        (mx.float32, 8, 32, 7, 32, 96),
        (mx.bfloat16, 8, 64, 12, 100, 320),
    ],
    ids=str,
)
def test_the_matrix_tile(dtype, bits, group, m, n, k):
    w, x, seen = matrix(n, k, bits, group, dtype), rows(m, k, dtype), []
    with borrow(launcher(Mode.CHECKED, seen)):
        y = linear.quantized_linear(x, w.weight, w.scales, w.biases, group_size=group, bits=bits, mode="fast")
    assert "verify_qmm" in seen
    assert error(y, true_product(w, x)) <= TOLERANCE[dtype]
