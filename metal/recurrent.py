"""Gated delta rule over a block with a tape: gated_delta_verify and its twin."""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.metal import gate
from dflash_mlx.metal.launch import backend, launch, program


class Tape(NamedTuple):
    """What replays P rows on a committed state: k [B, P, Hk, Dk], g [B, P, Hv] and delta [B, P, Hv, Dv] (float32)."""

    k: mx.array
    g: mx.array
    delta: mx.array


class Rows(NamedTuple):
    """T rows: q, k [B, T, Hk, Dk] normalised, v [B, T, Hv, Dv], g [B, T, Hv] float32 and beta [B, T, Hv]."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


Result = tuple[mx.array, mx.array, Tape]


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: Tape | None = None,
    keep: int = 0,
) -> Result:
    """Apply the first `keep` tape rows to `state` [B, Hv, Dv, Dk] float32, then run T rows without committing them.

    Returns y [B, T, Hv, Dv] in q's dtype, the committed state after the kept rows, and the tape of the T rows.
    """
    have = tape.g.shape[1] if tape is not None else 0
    if not 0 <= keep <= have:
        raise ValueError(f"keep must be in 0..{have} (the rows of the tape), got {keep}")
    rows = Rows(q, k, v, g, beta)
    return (kernel if _serves(rows, state) else twin)(rows, state, tape, keep)


def twin(rows: Rows, state: mx.array, tape: Tape | None = None, keep: int = 0) -> Result:
    """`gated_delta` in plain ops: row by row, each row rounding as a call of one row does."""
    state = state if tape is None else replay(state, tape, keep)
    q, k = (_columns(_heads(a, rows.v.shape[2])[..., None, :]) for a in rows[:2])
    parts = (q, k, _columns(rows.v[..., None]), *(_columns(a[..., None, None]) for a in rows[3:]))
    now, ys, deltas = state[:, None], [], []
    for row in zip(*parts, strict=True):
        y, now, delta = _step()(*row, now)
        ys.append(y)
        deltas.append(delta)
    y, delta = (mx.concatenate(a, axis=1).squeeze(-1) for a in (ys, deltas))
    return y, state, Tape(rows.k, rows.g, delta)


def replay(state: mx.array, tape: Tape, keep: int) -> mx.array:
    """Return `state` [B, Hv, Dv, Dk] float32 after the first `keep` rows of a tape, as the rows themselves left it."""
    k = _heads(tape.k, tape.g.shape[2])[..., None, :]
    state = state[:, None]
    for g, k_row, delta in list(zip(*map(_columns, (tape.g[..., None, None], k, tape.delta[..., None])), strict=True))[
        :keep
    ]:
        state = state * g
        state = state + k_row * delta
    return state[:, 0]


def _heads(a: mx.array, heads: int) -> mx.array:
    """Return a [B, T, H, D] with each head as often as `heads` of them need it."""
    repeats = heads // a.shape[2]
    return mx.repeat(a, repeats, -2) if repeats > 1 else a


def _columns(a: mx.array) -> list[mx.array]:
    """Return a [B, T, ...] as T arrays [B, 1, ...]: with its axes left as they are, a row costs no op of its own."""
    return list(mx.split(a, a.shape[1], axis=1))


@cache
def _step() -> Any:
    """One row: q, k [B, 1, H, 1, Dk], v [B, 1, H, Dv, 1], g, beta [B, 1, H, 1, 1], state [B, 1, H, Dv, Dk].

    Returns y and delta [B, 1, H, Dv, 1], the state between them.
    """

    def step(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        state = state * g
        known = (state * k).sum(axis=-1, keepdims=True)
        delta = (v - known) * beta
        state = state + k * delta
        return (state * q).sum(axis=-1, keepdims=True).astype(q.dtype), state, delta

    return mx.compile(step)


def _serves(rows: Rows, state: mx.array) -> bool:
    key = ("gated_delta_verify", rows.q.shape[2:], rows.v.shape[2:], rows.q.dtype, rows.beta.dtype, state.dtype)
    return bool(gate.settled(key, lambda: _proved(rows, state)))


def _proved(rows: Rows, state: mx.array) -> bool:
    (hk, dk), (hv, dv) = rows.q.shape[2:], rows.v.shape[2:]
    fits = dk % 32 == 0 and dk <= 256 and dv % 16 == 0 and rows.g.ndim == 3 and hv % hk == 0
    plain = state.dtype == mx.float32 == rows.g.dtype
    if not (fits and plain and gate.enabled()) or backend() is None:
        return False
    shape = f"{hk}/{hv} heads of {dk}x{dv} {str(rows.q.dtype).removeprefix('mlx.core.')}"
    return gate.agrees("gated_delta_verify", shape, lambda: _proof(rows))


def kernel(rows: Rows, state: mx.array, tape: Tape | None = None, keep: int = 0) -> Result:
    """`gated_delta` in one launch."""
    b, t, hk, dk = rows.q.shape
    hv, dv = rows.v.shape[2:]
    if tape is None:
        tape = Tape(mx.zeros((b, 1, hk, dk), rows.k.dtype), mx.zeros((b, 1, hv)), mx.zeros((b, 1, hv, dv)))
    # Row counts change from cycle to cycle, so they are data and not template arguments: one compilation serves all.
    counts = mx.array([t, tape.g.shape[1], keep], mx.int32)
    made = program("gated_delta_verify", _steps)(*rows, state, *tape, counts)
    return made[0], made[1], Tape(rows.k, rows.g, made[2])


def _steps(*arrays: mx.array) -> tuple[mx.array, ...]:
    q, beta, state = arrays[0], arrays[4], arrays[5]
    (b, t, hk, dk), (hv, dv) = q.shape, arrays[2].shape[2:]
    made = launch(
        "gated_delta_verify",
        arrays,
        {"X": q.dtype, "Y": beta.dtype, "HK": hk, "HV": hv, "DK": dk, "DV": dv},
        groups=b * hv * dv // 16,
        threads=128,
        outputs=[((b, t, hv, dv), q.dtype), (state.shape, mx.float32), ((b, t, hv, dv), mx.float32)],
    )
    return tuple(made)


def _proof(like: Rows) -> float:
    """Largest relative error of y, state and tape against the twin, over a block after a partly kept one."""
    keys = iter(mx.random.split(mx.random.key(0), 16))

    def block() -> Rows:
        drawn = [mx.random.normal((1, 5, *a.shape[2:]), key=next(keys)) for a in like]
        q, k = (a / mx.linalg.norm(a, axis=-1, keepdims=True) for a in drawn[:2])
        parts = (q, k, drawn[2], mx.sigmoid(drawn[3]), mx.sigmoid(drawn[4]))
        return Rows(*(a.astype(b.dtype) for a, b in zip(parts, like, strict=True)))

    state = mx.random.normal((1, *like.v.shape[2:], like.q.shape[3]), key=next(keys))
    _, state, tape = twin(block(), state)
    rows = block()
    mine, true = kernel(rows, state, tape, 3), twin(rows, state, tape, 3)
    pairs = [*zip(mine[:2], true[:2], strict=True), (mine[2].delta, true[2].delta)]
    return max(gate.relative_error(a, b) for a, b in pairs)
