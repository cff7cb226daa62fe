"""Quantized linears for few rows: verify_qmv, the fused argmax head, and their twins."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import mlx.core as mx

from dflash_mlx.metal import gate
from dflash_mlx.metal.launch import backend, composed, launch, program

TILE = 8  # rows that one launch serves
MOST_ROWS = 2 * TILE  # the widest block; beyond are prompts, which the stock kernels do well
ACCUMULATORS = 24  # sums a lane may hold: R * M
TILE_FROM = 6  # rows from which the matrix kernel may pay
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Quantized:
    """An affine-quantized matrix: weight [N, K*bits/32] uint32, scales and biases [N, K/group_size]."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): outputs and inputs."""
        return self.weight.shape[0], self.weight.shape[1] * 32 // self.bits

    def fits(self, x: mx.array) -> bool:
        """Whether the kernels cover this matrix and these activations."""
        # MLX passes arrays of fewer than 8 elements in another address space, which the vector loads cannot read.
        return (
            self.weight.ndim == 2
            and self.bits in (4, 8)
            and self.group_size in (32, 64, 128)
            and self.scales.size >= 8
            and self.scales.dtype in FLOATS
            and x.dtype in FLOATS
            and x.shape[-1] == self.shape[1]
            and 0 < x.size // x.shape[-1] <= MOST_ROWS
        )

    def stock(self, x: mx.array) -> mx.array:
        """MLX's own product x [..., K] -> [..., N]."""
        return mx.quantized_matmul(
            x, self.weight, self.scales, self.biases, transpose=True, group_size=self.group_size, bits=self.bits
        )


Kernel = Callable[[Quantized, mx.array], mx.array]
Plan = Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]  # x, weight, scales, biases -> result


def quantized_linear(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    mode: str = "exact",
) -> mx.array:
    """x [..., K] times the quantized weight [N, K] -> [..., N] in x's dtype; `mode` is "exact" or "fast"."""
    return _plan(mode, x, weight, scales, biases, group_size, bits)(x, weight, scales, biases)


def head_argmax(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """The index of each row's largest logit, x [..., K] -> uint32 [...]: mx.argmax of `quantized_linear`."""
    return _plan("argmax", x, weight, scales, biases, group_size, bits)(x, weight, scales, biases)


def _plan(
    mode: str, x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> Plan:
    """What to do with such arrays: decided and composed once, so that later calls cost the host one look-up."""
    shape = x.shape
    if x.size > MOST_ROWS * shape[-1]:  # prompts come in any length: nothing to keep
        shape = (0, shape[-1])
    key = (mode, shape, x.dtype, weight.shape, scales.dtype, group_size, bits)
    plan: Plan = gate.settled(key, lambda: _choose(mode, Quantized(weight, scales, biases, group_size, bits), x))
    return plan


def _choose(mode: str, matrix: Quantized, x: mx.array) -> Plan:
    if mode not in ("exact", "fast", "argmax"):
        raise ValueError(f"mode must be 'exact' or 'fast', got {mode!r}")
    group, bits = matrix.group_size, matrix.bits
    steps = _kernel_steps(mode, matrix, x)

    def plan(x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        matrix = Quantized(weight, scales, biases, group, bits)
        if steps is not None:
            return steps(matrix, x)
        return mx.argmax(matrix.stock(x), axis=-1) if mode == "argmax" else matrix.stock(x)

    made: Plan = plan if steps is None else composed(plan)
    return made


def _kernel_steps(mode: str, matrix: Quantized, x: mx.array) -> Kernel | None:
    """The launches that serve x [..., K] with this matrix, or None where the stock op does."""
    if not gate.enabled() or backend() is None or not matrix.fits(x):
        return None
    rows, dtype = x.size // x.shape[-1], x.dtype
    if not _proved(matrix, dtype, rows):
        return None
    if mode == "fast" and _proved_tile(matrix, dtype, rows):
        return lambda matrix, x: _tile_steps(matrix, x.reshape(rows, -1)).reshape(*x.shape[:-1], -1)
    step: Kernel = _rows_steps
    if mode == "argmax":
        fused = gate.agrees("head_argmax", _key(matrix, dtype), partial(_head_proof, matrix, dtype))
        step = _best_steps if fused else _best_of_rows

    def tiled(matrix: Quantized, x: mx.array) -> mx.array:
        flat = x.reshape(rows, -1)
        made = [step(matrix, flat[i : i + TILE]) for i in range(0, rows, TILE)]
        y = mx.concatenate(made) if len(made) > 1 else made[0]
        return y.reshape(*x.shape[:-1], *y.shape[1:])

    return tiled


def _proved(matrix: Quantized, dtype: mx.Dtype, rows: int) -> bool:
    key = _key(matrix, dtype)
    if not gate.wins("verify_qmv", key, lambda: _race(matrix, dtype, BLOCKINGS, (1, 5))):
        return False
    heights = {min(rows, TILE), rows % TILE or TILE}
    return all(gate.agrees("verify_qmv", key, partial(_proof, matrix, dtype, m, _rows), rows=m) for m in heights)


def _proved_tile(matrix: Quantized, dtype: mx.Dtype, m: int) -> bool:
    chunk = 256 // matrix.bits
    if m < TILE_FROM or matrix.shape[1] % chunk or matrix.group_size % chunk or gate.matrix_units_are_unproved():
        return False
    key, proof = _key(matrix, dtype), partial(_proof, matrix, dtype, m, _tile)
    won = gate.wins("verify_qmm", key, lambda: _race(matrix, dtype, {1: _tile}, (8, 16)))
    return won and gate.agrees("verify_qmm", key, proof, rows=m)


def _key(matrix: Quantized, dtype: mx.Dtype) -> str:
    n, k = matrix.shape
    scales, x = (str(kind).removeprefix("mlx.core.") for kind in (matrix.scales.dtype, dtype))
    return f"{n}x{k} {matrix.bits}-bit/{matrix.group_size} {scales}->{x}"


def _outputs_per_team(n: int, m: int, raced: int | None = None) -> int:
    """R: what won the race or a guess, within the registers that m rows leave; it moves work, never a rounding."""
    wanted = raced or (4 if n > 8192 else 2 if n > 2048 else 1)
    return next(team for team in (8, 4, 2, 1) if team <= wanted and team * m <= ACCUMULATORS)


def _dot(name: str, matrix: Quantized, x: mx.array, team: int) -> tuple[mx.array, ...]:
    """Prepare x [M, K] and run a body that starts with qmv_dot, with `team` outputs a team."""
    n, k = matrix.shape
    m = x.shape[0]
    span = 128 // matrix.bits
    steps = ceil(k / (8 * span))
    shared = {"BITS": matrix.bits, "K": k, "M": m}
    xs, xsum = launch(
        "prepare",
        [x],
        {"X": x.dtype, **shared},
        groups=ceil(steps * m * 8 / 64),
        threads=64,
        outputs=[((steps * 8 * span * m,), mx.float32), ((steps * m * 8,), mx.float32)],
    )
    groups = ceil(n / (4 * team))
    cuda = backend() == "cuda"
    best = [((m, groups), mx.float32), ((m, groups), mx.uint32)]
    made = launch(
        name,
        [matrix.weight, matrix.scales, matrix.biases, xs, xsum],
        {"T": matrix.scales.dtype, "O": x.dtype, "GROUP": matrix.group_size, "N": n, "R": team}
        | shared
        | {"MAGIC": cuda, "AHEAD": cuda},
        groups=groups,
        threads=128,
        outputs=best if name == "head_argmax" else [((m, n), x.dtype)],
    )
    return tuple(made)


def _run(name: str, steps: Kernel, matrix: Quantized, x: mx.array) -> mx.array:
    """Run steps over a matrix as a program that is composed once."""
    bits, group = matrix.bits, matrix.group_size
    made = program(
        (name, bits, group), lambda x, weight, scales, biases: steps(Quantized(weight, scales, biases, group, bits), x)
    )
    y: mx.array = made(x, matrix.weight, matrix.scales, matrix.biases)
    return y


def _team(matrix: Quantized, x: mx.array) -> int:
    m = x.shape[0]
    return _outputs_per_team(matrix.shape[0], m, gate.choice("verify_qmv", _key(matrix, x.dtype), m))


def _rows(matrix: Quantized, x: mx.array, team: int | None = None) -> mx.array:
    return _run(f"verify_qmv {team}", partial(_rows_steps, team=team), matrix, x)


def _rows_steps(matrix: Quantized, x: mx.array, team: int | None = None) -> mx.array:
    return _dot("verify_qmv", matrix, x, team or _team(matrix, x))[0]


BLOCKINGS: dict[int, Kernel] = {team: partial(_rows, team=team) for team in (2, 4)}


def _tile(matrix: Quantized, x: mx.array) -> mx.array:
    return _run("verify_qmm", _tile_steps, matrix, x)


def _tile_steps(matrix: Quantized, x: mx.array) -> mx.array:
    n, k = matrix.shape
    m = x.shape[0]
    rows = ceil(m / 8) * 8
    shared = {"BITS": matrix.bits, "K": k, "M": m}
    xt, xsum = launch(
        "prepare_tiles",
        [x],
        {"X": x.dtype, **shared},
        groups=ceil(k * matrix.bits // 256 * rows / 64),
        threads=64,
        outputs=[((k * rows,), mx.float32), ((k * matrix.bits // 256 * rows,), mx.float32)],
    )
    return launch(
        "verify_qmm",
        [matrix.weight, matrix.scales, matrix.biases, xt, xsum],
        {"T": matrix.scales.dtype, "O": x.dtype, "GROUP": matrix.group_size, "N": n, **shared},
        groups=ceil(n / 32),
        threads=128,
        outputs=[((m, n), x.dtype)],
    )[0]


def _best(matrix: Quantized, x: mx.array) -> mx.array:
    return _run("head_argmax", _best_steps, matrix, x)


def _best_of_rows(matrix: Quantized, x: mx.array) -> mx.array:
    return mx.argmax(_rows_steps(matrix, x), axis=-1)


def _best_steps(matrix: Quantized, x: mx.array) -> mx.array:
    value, place = _dot("head_argmax", matrix, x, _team(matrix, x))
    m, groups = value.shape
    outputs = [((m,), mx.uint32)]
    return launch("argmax_finish", [value, place], {"GROUPS": groups}, groups=m, threads=256, outputs=outputs)[0]


def _activations(matrix: Quantized, dtype: mx.Dtype, m: int) -> mx.array:
    return mx.random.normal((m, matrix.shape[1]), key=mx.random.key(m)).astype(dtype)


def _proof(matrix: Quantized, dtype: mx.Dtype, m: int, kernel: Kernel) -> float:
    """Relative error of m rows against the stock product of the same numbers in float32."""
    x = _activations(matrix, dtype, m)
    scales, biases = matrix.scales.astype(mx.float32), matrix.biases.astype(mx.float32)
    exact = Quantized(matrix.weight, scales, biases, matrix.group_size, matrix.bits).stock(x.astype(mx.float32))
    return gate.relative_error(kernel(matrix, x), exact)


def _head_proof(matrix: Quantized, dtype: mx.Dtype) -> float:
    """Share of rows whose fused argmax is not the argmax of the kernel's own logits."""
    x = _activations(matrix, dtype, 5)
    return float(mx.mean(mx.argmax(_rows(matrix, x), axis=-1) != _best(matrix, x)))


def _race(
    matrix: Quantized, dtype: mx.Dtype, kernels: dict[int, Kernel], heights: tuple[int, ...]
) -> dict[int, tuple[float, float, int]]:
    """Seconds a call (ours, stock) by number of rows, in chains over copies of the weights that no cache holds.

    `kernels` are ours by blocking; the fastest counts, and its blocking is told.
    """
    copies = [matrix]
    while matrix.weight.nbytes * len(copies) < gate.RACE_BYTES:
        weight, scales, biases = matrix.weight + 0, matrix.scales + 0, matrix.biases + 0
        mx.eval(weight, scales, biases)
        copies.append(Quantized(weight, scales, biases, matrix.group_size, matrix.bits))
    times = {}
    for m in heights:
        x = _activations(matrix, dtype, m)
        fits = {team: kernel for team, kernel in kernels.items() if team * m <= ACCUMULATORS}
        ours = {team: gate.chain_seconds([partial(kernel, c) for c in copies], x) for team, kernel in fits.items()}
        winner = min(ours, key=ours.__getitem__)
        times[m] = ours[winner], gate.chain_seconds([c.stock for c in copies], x), winner
    return times
