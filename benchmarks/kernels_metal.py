"""The kernels on this Mac: are they right, and what does each row cost? Paste the output into an issue.

python benchmarks/kernels_metal.py
"""

import platform

import mlx.core as mx
import numpy as np
from kernels_cuda import BIG, COLD_BYTES, check_delta, check_linear, matrix, seconds

from dflash_mlx.metal import backend, gate, linear


def rows(n, k):
    """Microseconds of a call by number of rows, ours and stock, for a shape of the flagship."""
    weights = [matrix(n, k, seed=i) for i in range(max(2, -(-COLD_BYTES // (n * k // 2))))]
    for m in (1, 2, 3, 4, 5, 6, 8, 12, 16):
        x = mx.random.normal((m, k)).astype(mx.bfloat16)
        ways = {"stock": [w.stock for w in weights]}
        if m <= linear.TILE:
            for team in (2, 4):
                ways[f"qmv R={team}"] = [lambda y, w=w, t=team: linear._rows(w, y, t) for w in weights]
        if m >= linear.TILE_FROM and not gate.matrix_units_are_unproved():
            ways["qmm"] = [lambda y, w=w: linear._tile(w, y) for w in weights]
        times = {way: seconds(links, x) * 1e6 for way, links in ways.items()}
        print(f"{n}x{k} rows={m} " + " ".join(f"{way}={us:.0f}us" for way, us in times.items()), flush=True)


def main():
    """Checks first, then costs."""
    if backend() != "metal":
        raise SystemExit("this needs an Apple GPU (and MLX's default device must be it)")
    info = mx.device_info()
    print(info.get("device_name"), info.get("architecture"), platform.mac_ver()[0], gate._machine())
    tile = not gate.matrix_units_are_unproved()
    failed = [f for seed in range(24) for f in check_linear(np.random.default_rng(seed), tile=tile)]
    failed += [f for seed in range(12) for f in check_delta(np.random.default_rng(seed))]
    print("checks: all passed" if not failed else "\n".join(failed), flush=True)
    for n, k in BIG:
        rows(n, k)


if __name__ == "__main__":
    main()
