"""Gated delta rule over a block with a tape: gated_delta_verify and its twin."""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.metal import gate
from dflash_mlx.metal.launch import backend, launch


class Tape(NamedTuple):
    """What replays P rows on a committed state: k [B, P, Hk, Dk], g [B, P, Hv] and delta [B, P, Hv, Dv] (float32)."""

    k: mx.array
    g: mx.array
    delta: mx.array


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: Tape | None = None,
    keep: int = 0,
) -> tuple[mx.array, mx.array, Tape]:
    """Apply the first `keep` tape rows to `state`, then run T new rows from there without committing them.

    q, k [B, T, Hk, Dk] normalised, v [B, T, Hv, Dv], g [B, T, Hv] float32, beta [B, T, Hv], state [B, Hv, Dv, Dk] float32
    -> y [B, T, Hv, Dv] in q's dtype, the committed state after the kept rows, the tape of the T new rows.
    """
    have = tape.g.shape[1] if tape is not None else 0
    if not 0 <= keep <= have:
        raise ValueError(f"keep must be in 0..{have} (the rows of the tape), got {keep}")
    if not _serves(q, v, g, state):
        return twin(q, k, v, g, beta, state, tape, keep)
    return _kernel(q, k, v, g, beta, state, tape, keep)


def twin(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: Tape | None,
    keep: int,
) -> tuple[mx.array, mx.array, Tape]:
    """`gated_delta` in plain ops: row by row, each row rounding as a call of one row does."""
    repeats = v.shape[2] // k.shape[2]
    if tape is not None:
        replay = mx.repeat(tape.k, repeats, -2) if repeats > 1 else tape.k
        for t in range(keep):
            state = _add(state * tape.g[:, t, :, None, None], replay[:, t], tape.delta[:, t])
    queries, keys = (mx.repeat(a, repeats, -2) if repeats > 1 else a for a in (q, k))
    committed, rows, deltas = state, [], []
    for t in range(q.shape[1]):
        y, state, delta = _step()(queries[:, t], keys[:, t], v[:, t], g[:, t], beta[:, t], state)
        rows.append(y)
        deltas.append(delta)
    return mx.stack(rows, axis=1), committed, Tape(k, g, mx.stack(deltas, axis=1))


@cache
def _step() -> Any:
    """One row: q, k [B, H, Dk], v [B, H, Dv], g, beta [B, H], state [B, H, Dv, Dk] -> y, state, delta."""

    def step(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        state = state * g[..., None, None]
        known = (state * k[..., None, :]).sum(axis=-1)
        delta = (v - known) * beta[..., None]
        state = state + k[..., None, :] * delta[..., None]
        return (state * q[..., None, :]).sum(axis=-1).astype(q.dtype), state, delta

    return mx.compile(step)


def _add(state: mx.array, k: mx.array, delta: mx.array) -> mx.array:
    return state + k[..., None, :] * delta[..., None]


def _serves(q: mx.array, v: mx.array, g: mx.array, state: mx.array) -> bool:
    _, _, hk, dk = q.shape
    hv, dv = v.shape[2:]
    fits = dk % 32 == 0 and dk <= 256 and dv % 16 == 0 and g.ndim == 3 and hv % hk == 0
    if not fits or state.dtype != mx.float32 or g.dtype != mx.float32 or not gate.enabled() or backend() is None:
        return False
    shape = f"{hk}/{hv} heads of {dk}x{dv} {str(q.dtype)[10:]}"
    return gate.agrees("gated_delta_verify", shape, lambda: _proof(q.dtype, hk, hv, dk, dv))


def _kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: Tape | None,
    keep: int,
) -> tuple[mx.array, mx.array, Tape]:
    b, t, hk, dk = q.shape
    hv, dv = v.shape[2:]
    if tape is None:
        tape = Tape(mx.zeros((b, 1, hk, dk), q.dtype), mx.zeros((b, 1, hv)), mx.zeros((b, 1, hv, dv)))
    sizes = {"T": t, "P": tape.g.shape[1], "HK": hk, "HV": hv, "DK": dk, "DV": dv}
    y, committed, delta = launch(
        "gated_delta_verify",
        [q, k, v, g, beta, state, *tape, mx.array([keep], mx.int32)],
        {"X": q.dtype, "Y": beta.dtype, **sizes},
        groups=b * hv * dv // 16,
        threads=128,
        outputs=[((b, t, hv, dv), q.dtype), (state.shape, mx.float32), ((b, t, hv, dv), mx.float32)],
    )
    return y, committed, Tape(k, g, delta)


def _proof(dtype: mx.Dtype, hk: int, hv: int, dk: int, dv: int) -> float:
    """Largest relative error of y, state and tape against the twin, over a block after a partly kept one."""

    def draw(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed))

    def block(seed: int, t: int) -> list[mx.array]:
        q, k = (draw(seed + i, 1, t, hk, dk) for i in range(2))
        q, k = (a / mx.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
        g, beta = (mx.sigmoid(draw(seed + 2 + i, 1, t, hv)) for i in range(2))
        return [q.astype(dtype), k.astype(dtype), draw(seed + 4, 1, t, hv, dv).astype(dtype), g, beta.astype(dtype)]

    state = draw(99, 1, hv, dv, dk)
    _, state, tape = twin(*block(0, 5), state, None, 0)
    mine, true = (run(*block(10, 5), state, tape, 3) for run in (_kernel, twin))
    pairs = zip((*mine[:2], mine[2].delta), (*true[:2], true[2].delta), strict=True)
    return max(float(mx.linalg.norm((a - b).astype(mx.float32)) / mx.linalg.norm(b.astype(mx.float32))) for a, b in pairs)
