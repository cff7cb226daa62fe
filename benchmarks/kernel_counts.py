"""What the kernels ask of a machine, counted in the emulator: bytes, lane operations, barriers; and what that predicts.

python benchmarks/kernel_counts.py [--json FILE]

Counts are exact for the text that Metal gets, compiled by clang; they do not depend on the machine. The prediction is
arithmetic from them and from published figures of each chip (bandwidth, cores, clock), and nobody has measured it.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import mlx.core as mx
from emulator import Mode, run

from dflash_mlx.metal import linear, recurrent
from dflash_mlx.metal.launch import borrow
from dflash_mlx.metal.linear import Quantized

N, K, WIDE = 256, 5120, 17408
# Lane operations a chip can do while one 4-bit weight arrives: cores * 128 lanes * clock * 0.5625 bytes / bandwidth.
BUDGET = {
    "M1": 10.8,
    "M1 Pro/Max/Ultra": 7.5,
    "M2 Pro/Max/Ultra": 9.6,
    "M3 Pro": 11.9,
    "M3 Max/Ultra": 9.7,
    "M4": 8.8,
    "M4 Pro/Max": 8.3,
    "M5 family": 7.4,
}


def counted(work):
    """Run `work` in the emulator; by kernel: bytes and operations."""
    seen = {}

    def spy(body, inputs, template, groups, threads, outputs):
        arguments = (body, inputs, template, groups, threads, outputs)
        bytes_, operations = run(*arguments, count=True), run(*arguments, mode=Mode.COUNTED)
        if bytes_.faults:
            raise SystemExit("\n".join(bytes_.faults))
        seen[body.name] = bytes_, operations.operations, groups
        return bytes_.outputs

    with borrow(spy):
        work()
    return seen


def linears():
    """Rows for the quantized kernels: per weight of a 256x5120 slice, blocked as the 17408x5120 matrix would be."""
    w = Quantized(
        mx.random.randint(0, 1 << 30, (N, K // 8)).astype(mx.uint32),
        *(mx.random.normal((N, K // 64)).astype(mx.bfloat16) for _ in range(2)),
        64,
        4,
    )
    for m in range(1, 17):
        x = mx.random.normal((m, K)).astype(mx.bfloat16)
        if m <= linear.TILE:
            team = linear._outputs_per_team(WIDE, m)
            yield row("verify_qmv", m, counted(lambda x=x, t=team: linear._rows(w, x, t)), {"outputs_per_team": team})
        if m >= linear.TILE_FROM and m % 2 == 0:
            yield row("verify_qmm", m, counted(lambda x=x: linear._tile(w, x)), {})


def row(name, m, seen, more):
    """One line of the table."""
    bytes_, operations, groups = seen[name]
    activations = bytes_.bytes["xs" if name == "verify_qmv" else "xt"]
    weight = bytes_.bytes["weight"]["requested"]
    return {
        "kernel": name,
        "rows": m,
        **more,
        "weight_bytes_over_ideal": weight / (N * K // 2),
        "activation_bytes_over_weight_bytes": activations["per_simdgroup"] / weight,
        "lane_operations_per_weight": operations["total"] / (N * K),
        "by_class": {key: round(v / (N * K), 3) for key, v in sorted(operations.items()) if key != "total"},
        "barriers_per_threadgroup": bytes_.barriers / groups,
        "threadgroup_bytes": bytes_.threadgroup_bytes,
        "matrix_fma_per_weight": bytes_.meetings * 512 / (N * K) if name == "verify_qmm" else 0,
    }


def deltas():
    """Rows for the gated delta kernel: state bytes over one read and one write."""
    for t, keep in ((1, 1), (5, 0), (5, 3), (8, 8)):
        q, v, g = mx.zeros((1, t, 1, 128)), mx.zeros((1, t, 3, 128)), mx.zeros((1, t, 3))
        half = [a.astype(mx.bfloat16) for a in (q, q, v)]
        tape = recurrent.Tape(half[0], g, v)
        rows, state = recurrent.Rows(*half, g, g.astype(mx.bfloat16)), mx.zeros((1, 3, 128, 128))
        seen = counted(lambda r=rows, s=state, p=tape, n=keep: recurrent.kernel(r, s, p, n))
        bytes_, operations, _ = seen["gated_delta_verify"]
        yield {
            "kernel": "gated_delta_verify",
            "rows": t,
            "kept": keep,
            "state_bytes_over_ideal": (
                (bytes_.bytes["state"]["requested"] + bytes_.bytes["committed"]["requested"]) / (2 * state.nbytes)
            ),
            "lane_operations_per_state_element": operations["total"] / state.size,
        }


def predictions(rows):
    """Cost of M rows over one row by chip: the larger of memory and lane time, both from counts."""
    cost = {r["rows"]: r["lane_operations_per_weight"] for r in rows if r["kernel"] == "verify_qmv"}
    return {
        chip: {m: round(max(budget, cost[m]) / max(budget, cost[1]), 2) for m in cost}
        for chip, budget in BUDGET.items()
    }


def main():
    """Print one table, and write JSON where asked."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    rows = [*linears(), *deltas()]
    result = {"rows": rows, "predicted_cost_over_one_row": predictions(rows)}
    for one in rows:
        print(
            " ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in one.items() if k != "by_class")
        )
    for chip, costs in result["predicted_cost_over_one_row"].items():
        print(f"predicted, {chip}: " + " ".join(f"{m}:{c}" for m, c in costs.items()))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
