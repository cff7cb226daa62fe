"""The kernels' own text on an NVIDIA GPU through MLX's CUDA back end: parity, compute-sanitizer and speed.

python benchmarks/kernels_cuda.py [--json FILE] [--seconds S] [--skip warm,speed,forward,correct]

What it shows: that the text computes what it should on real hardware, and how its cost grows with rows there.
It says nothing about the speed of an Apple chip.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import mlx.core as mx
import numpy as np

from dflash_mlx.metal import gate, linear, recurrent
from dflash_mlx.metal.linear import Quantized

TOLERANCE = {mx.bfloat16: 4e-3, mx.float16: 6e-4, mx.float32: 1e-6}
BIG = [(17408, 5120), (5120, 17408), (248320, 5120)]
SMALL = [(5120, 6144), (1024, 5120)]
STACKED = [(16480, 5120), (14336, 5120), (34816, 5120)]
COLD_BYTES = 400 << 20  # several times the L2
LINKS = 24
TEAMS = (1, 2, 4, 8)


def matrix(n, k, bits=4, group=64, dtype=mx.bfloat16, seed=0):
    """A random quantized matrix whose rows keep the size of what they multiply."""
    keys = mx.random.split(mx.random.key(seed), 3)
    low, high = (mx.random.randint(0, 1 << 16, (n, k * bits // 32), mx.uint32, key=key) for key in keys[:2])
    s = mx.random.normal((n, k // group), key=keys[2]) / (k**0.5 * 2 ** (bits - 2))
    w = Quantized(low | (high << 16), s.astype(dtype), (-s * (2 ** (bits - 1) - 0.5)).astype(dtype), group, bits)
    mx.eval(w.weight, w.scales, w.biases)
    return w


def true_product(w, x):
    """x times w in float64 on the host."""
    n, k = w.shape
    shifts = np.arange(0, 32, w.bits, dtype=np.uint32)
    codes = ((np.array(w.weight)[..., None] >> shifts) & ((1 << w.bits) - 1)).reshape(n, k).astype(np.float64)
    s, b = (np.repeat(np.array(a.astype(mx.float32), np.float64), w.group_size, 1) for a in (w.scales, w.biases))
    return np.array(x.astype(mx.float32), np.float64) @ (codes * s + b).T


def error(y, want):
    return float(np.linalg.norm(np.array(y.astype(mx.float32), np.float64) - want) / np.linalg.norm(want))


def check_linear(draw, tile=True):
    """One random shape: numbers, row by row equality, argmax, the matrix tile where it fits; returns what failed."""
    dtype = list(TOLERANCE)[draw.integers(3)]
    bits, group = (4, 8)[draw.integers(2)], (32, 64, 128)[draw.integers(3)]
    m, n, k = int(draw.integers(1, 9)), int(draw.integers(8, 700)), group * int(draw.integers(1, 2560 // group))
    name, failed, team = f"{dtype} {bits}-bit/{group} m={m} {n}x{k}", [], (1, 2, 4)[draw.integers(3)]
    for seed in range(4):
        w = matrix(n, k, bits, group, dtype, seed=int(draw.integers(1 << 30)))
        x = mx.random.normal((m, k), key=mx.random.key(seed)).astype(dtype)
        y = linear._rows(w, x, team)
        if not error(y, true_product(w, x)) <= TOLERANCE[dtype]:
            failed.append(f"numbers: {name} {error(y, true_product(w, x)):.1e}")
        row = seed % m
        if not mx.array_equal(linear._rows(w, x[row : row + 1], team), y[row : row + 1]):
            failed.append(f"row {row} alone differs: {name}")
        if not mx.array_equal(linear._best(w, x), mx.argmax(y, axis=-1)):
            failed.append(f"argmax: {name}")
    chunk = 256 // bits
    if tile and group % chunk == 0 and m >= linear.TILE_FROM:
        product = linear._tile(w, x)
        if not error(product, true_product(w, x)) <= TOLERANCE[dtype]:
            failed.append(f"tile: {name}")
    return failed


def check_delta(draw):
    """One random gated delta block after a partly kept one, against the twin and against single rows."""
    hk, heads, dk, dv = int(draw.integers(1, 4)), int(draw.integers(1, 4)), (32, 64, 128)[draw.integers(3)], 16
    t, dtype = int(draw.integers(1, 9)), (mx.float32, mx.bfloat16)[draw.integers(2)]
    keep = int(draw.integers(0, t + 1))

    def rows(seed):
        keys = mx.random.split(mx.random.key(seed), 5)
        shapes = [(1, t, hk, dk)] * 2 + [(1, t, hk * heads, dv)] + [(1, t, hk * heads)] * 2
        a = [mx.random.normal(s, key=key) for s, key in zip(shapes, keys, strict=True)]
        q, k = (one / mx.linalg.norm(one, axis=-1, keepdims=True) for one in a[:2])
        g, beta = mx.sigmoid(a[3]), mx.sigmoid(a[4])
        return recurrent.Rows(q.astype(dtype), k.astype(dtype), a[2].astype(dtype), g, beta.astype(dtype))

    first, second = rows(int(draw.integers(1 << 30))), rows(int(draw.integers(1 << 30)))
    state = mx.random.normal((1, hk * heads, dv, dk))
    _, _, tape = recurrent.kernel(first, state)
    mine, true = recurrent.kernel(second, state, tape, keep), recurrent.twin(second, state, tape, keep)
    pairs = zip((*mine[:2], mine[2].delta), (*true[:2], true[2].delta), strict=True)
    worst = max(gate.relative_error(a, b) for a, b in pairs)
    failed = [] if worst <= 4 * TOLERANCE[dtype] else [f"delta {worst:.1e}: {hk}x{heads} {dk} t={t} {dtype}"]
    stepped = state
    for i in range(keep):
        one = recurrent.Rows(*(a[:, i : i + 1] for a in first))
        _, before, tape = recurrent.kernel(one, stepped)
        _, stepped, _ = recurrent.kernel(one, before, tape, 1)
    if not mx.array_equal(stepped, mine[1]):
        failed.append(f"replay differs from stepping: {hk}x{heads} {dk} keep={keep}")
    return failed


def parity(seed, budget_s):
    """Random checks in this process for so many seconds; prints what failed and the count."""
    draw, failed, cases, start = np.random.default_rng(seed), [], 0, time.monotonic()
    while time.monotonic() - start < budget_s:
        failed += (check_delta if cases % 6 == 5 else check_linear)(draw)
        cases += 1
    print(json.dumps({"cases": cases, "failed": failed}))


def spread(kind, workers, *arguments, before=()):
    """This script in several processes, since compiling is most of the work."""
    command = [*before, sys.executable, __file__, *arguments, f"--{kind}"]
    pipe = subprocess.PIPE
    return [subprocess.Popen([*command, str(i)], stdout=pipe, stderr=pipe, text=True) for i in range(workers)]


def correct(budget_s):
    """Parity over random shapes, and memcheck, racecheck and synccheck over a few, side by side."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    tools = ("memcheck", "racecheck", "synccheck") if tool else ()
    watched = [
        spread("parity", 1, "--seconds", "15", before=[tool, "--tool", t, "--error-exitcode", "9"])[0] for t in tools
    ]
    workers = spread("parity", max(1, (os.cpu_count() or 2) - 4), "--seconds", str(budget_s))
    results = [json.loads(p.communicate()[0].splitlines()[-1]) for p in workers]
    outcome = {"shapes": sum(r["cases"] for r in results), "failed": [f for r in results for f in r["failed"]]}
    for name, process in zip(tools, watched, strict=True):
        output, errors = process.communicate()
        lines = [line for line in output.splitlines() if "SUMMARY" in line or "cases" in line] or errors.splitlines()[
            -3:
        ]
        outcome[name] = {"exit": process.returncode, "lines": lines}
    return outcome


def jobs():
    """Every (shape, rows, outputs a team) that is timed."""
    for n, k in BIG:
        for m in (1, 5):
            yield from ((n, k, m, team) for team in TEAMS)
    for n, k in BIG + SMALL + STACKED:
        for m in range(1, 9) if (n, k) in BIG[:2] else (1, 5):
            yield n, k, m, linear._outputs_per_team(n, m)


def warm(index, workers):
    """Compile this worker's share of the timed kernels into MLX's cache on disk."""
    for i, (n, k, m, team) in enumerate(dict.fromkeys(jobs())):
        if i % workers == index:
            w = matrix(n, k)
            mx.eval(linear._rows(w, mx.ones((m, k), mx.bfloat16), team))
            if n == 248320 and team == linear._outputs_per_team(n, m):
                mx.eval(linear._best(w, mx.ones((m, k), mx.bfloat16)))


@mx.compile
def glue(x, y):
    """x again, but only once y is there."""
    return x + y[..., :1] * 0


def seconds(links, x, join=glue, turns=9):
    """Median seconds of a link in a chain of true dependencies; the clock runs while the device works."""

    def chain():
        y = x
        for i in range(LINKS):
            y = join(x, links[i % len(links)](y))
        start = time.perf_counter()
        mx.eval(y)
        return time.perf_counter() - start

    chain(), chain()
    return median(chain() for _ in range(turns)) / LINKS


def copies(n, k):
    return [matrix(n, k, seed=i) for i in range(max(2, -(-COLD_BYTES // (n * k // 2))))]


def speed():
    """Microseconds of a call, ours and stock: single shapes with the chain's glue, and feed-forward pairs without."""
    table = [{"glue alone": seconds([lambda y: y], mx.zeros((5, 5120), mx.bfloat16)) * 1e6}]
    for n, k in BIG + SMALL:
        weights = copies(n, k)
        for m in (1, 5):
            x, row = mx.random.normal((m, k)).astype(mx.bfloat16), {"shape": f"{n}x{k}", "rows": m}
            chosen = linear._outputs_per_team(n, m)
            for team in sorted({*TEAMS, chosen} if (n, k) in BIG else {chosen}):
                row[f"R{team}"] = seconds([partial(linear._rows, w, team=team) for w in weights], x) * 1e6
            row |= {"chosen": row[f"R{chosen}"], "stock": seconds([w.stock for w in weights], x, turns=3) * 1e6}
            table.append(row)
    ups, downs = copies(17408, 5120), copies(5120, 17408)
    for m in range(1, 9):
        x = mx.random.normal((m, 5120)).astype(mx.bfloat16)
        row = {"shape": "17408x5120 then 5120x17408", "rows": m}
        for name, product in (("ours", linear._rows), ("stock", Quantized.stock)):
            pairs = [lambda y, u=u, d=d, p=product: p(d, p(u, y)) for u, d in zip(ups, downs, strict=True)]
            row[name] = seconds(pairs, x, join=lambda _, y: y, turns=9 if name == "ours" else 3) * 1e6
        table.append(row)
    return table


class Layer:
    """The linears of one layer of the 27B shape, and what runs between them; attention itself is left out."""

    def __init__(self, recurrent_layer, shared):
        first = 16480 if recurrent_layer else 14336
        self.recurrent = recurrent_layer
        self.parts = [shared(first, 5120), shared(5120, 6144), shared(34816, 5120), shared(5120, 17408)]

    def __call__(self, x, product, state):
        m = x.shape[0]
        mixed = product(self.parts[0], mx.fast.rms_norm(x, None, 1e-6))
        if self.recurrent:
            q, k = (
                mx.fast.rms_norm(mixed[:, i * 2048 : i * 2048 + 2048].reshape(1, m, 16, 128), None, 1e-6)
                for i in (0, 1)
            )
            v = mixed[:, 4096:10240].reshape(1, m, 48, 128)
            beta, g = mx.sigmoid(mixed[:, -96:-48])[None], mx.sigmoid(mixed[:, -48:].astype(mx.float32))[None]
            y, _, _ = recurrent.kernel(recurrent.Rows(q * 0.01, k * 0.1, v, g, beta), state)
            mixed = y.reshape(m, 6144) * mixed[:, 10240:16384]
        x = x + product(self.parts[1], mixed[:, :6144])
        both = product(self.parts[2], mx.fast.rms_norm(x, None, 1e-6))
        return x + product(self.parts[3], both[:, :17408] * mx.sigmoid(both[:, :17408]) * both[:, 17408:])


def forward():
    """Milliseconds of a forward of the 27B shape (every weight its own memory), ours and stock, for 1 and 5 rows."""
    counter = iter(range(10000))
    layers = [Layer((i + 1) % 4 != 0, lambda n, k: matrix(n, k, seed=next(counter))) for i in range(64)]
    head = matrix(248320, 5120)
    state = mx.zeros((1, 48, 128, 128))

    def run(m, product, last):
        x = mx.ones((m, 5120), mx.bfloat16)
        for layer in layers:
            x = layer(x, product, state)
        mx.eval(last(head, x))

    ways = {"ours": (linear._rows, linear._best), "stock": (Quantized.stock, lambda w, x: mx.argmax(w.stock(x), -1))}
    result = {}
    for way, (product, last) in ways.items():
        for m in (1, 5):
            run(m, product, last)
            took = []
            for _ in range(5):
                start = time.perf_counter()
                run(m, product, last)
                took.append(time.perf_counter() - start)
            result[f"{way} m={m}"] = median(took) * 1e3
    return result


def show(result):
    """One table."""
    for row in result.get("speed", []):
        print(" ".join(f"{key}={v:.1f}" if isinstance(v, float) else f"{key}={v}" for key, v in row.items()))
    print("forward_ms", json.dumps(result.get("forward", "skipped")))
    print("correct", json.dumps(result.get("correct", "skipped"))[:3000])


def main():
    """Everything not skipped, one after another."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path)
    options.add_argument("--seconds", type=float, default=70)
    options.add_argument("--skip", default="")
    options.add_argument("--parity", type=int, help=argparse.SUPPRESS)
    options.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    workers = max(1, (os.cpu_count() or 2) - 2)
    if chosen.parity is not None:
        return parity(chosen.parity, chosen.seconds)
    if chosen.warm is not None:
        return warm(chosen.warm, workers)
    parts = {
        "warm": lambda: [p.communicate()[1][-300:] for p in spread("warm", workers)],
        "speed": speed,
        "forward": forward,
        "correct": lambda: correct(chosen.seconds),
    }
    result = {"device": str(mx.device_info()), "date": time.strftime("%Y-%m-%d")}
    for name, part in parts.items():
        if name not in chosen.skip.split(","):
            start = time.perf_counter()
            result[name] = part()
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps(result, indent=1))
    show(result)


if __name__ == "__main__":
    main()
