"""Milliseconds a cycle of the 27B shape: random 4-bit weights, greedy, one block size, everything in one process.

Rows: mlx-lm's own forward of one and of `block` rows; ours with stock kernels and with the verify kernels; the whole
cycle (draft, verify, judge, roll back) of ours and, where `--peer` names a folder that holds it, of dflash 0.1.0. The
weights are random, so nothing is accepted: a cycle's cost is what counts here.

    python benchmarks/cycle_27b.py --json --peer /path/to/site-packages
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import flagship_manifest as manifest
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models import qwen3_5
from peer import Peer

from dflash_mlx import metal
from dflash_mlx.decode import decode
from dflash_mlx.models import DraftConfig, DraftNet, Target, TargetConfig, build_target
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Options, Sampling

SMALL = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}  # fmt: skip


BEGAN = time.perf_counter()


def fill(model: nn.Module, seed: int) -> None:
    """Give every array random values at a trained model's scale, and evaluate them."""
    keys = iter(mx.random.split(mx.random.key(seed), 20_000))

    def value(path: str, array: mx.array) -> mx.array:
        if array.dtype == mx.uint32:
            words = mx.random.randint(0, 2**31 - 1, array.shape, key=next(keys)).astype(mx.uint32)
            return words * 2 + (words & 1)
        if path.endswith("scales"):
            return mx.full(array.shape, 0.003, mx.bfloat16)
        if path.endswith("biases"):
            return mx.full(array.shape, -0.0225, mx.bfloat16)
        if "norm" in path:
            return mx.ones(array.shape, mx.bfloat16)
        made = 0.02 * mx.random.normal(array.shape, key=next(keys))
        return made if path.endswith("A_log") else made.astype(mx.bfloat16)

    model.update(tree_map_with_path(value, model.parameters()))
    mx.eval(model.parameters())


def make_target(layers: int, small: bool) -> tuple[nn.Module, TargetConfig]:
    """Return mlx-lm's model of the flagship's shape, quantized to 4 bits, and what the engine reads of its config."""
    config = manifest.target_config(layers)
    if small:
        config["text_config"] |= SMALL
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=64, bits=4)
    fill(model, 1)
    return model, TargetConfig.from_json(config, "27B shape")


def draft_config(layers: int, small: bool) -> dict[str, Any]:
    """Return the flagship draft's config.json, its taps within `layers`."""
    config = manifest.draft_config(layers)
    if small:
        config |= {key: value for key, value in SMALL.items() if not key.startswith("linear")}
        config["dflash_config"] |= {"mask_token_id": 4000}
    return config


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the median time of evaluated calls, after two to warm up."""
    times = []
    for turn in range(repeats + 2):
        start = time.perf_counter()
        mx.eval(work())
        times += [time.perf_counter() - start] if turn > 1 else []
    print(f"  {1e3 * median(times):.2f} ms after {time.perf_counter() - BEGAN:.0f} s", file=sys.stderr, flush=True)
    return 1e3 * median(times)


def stock_rows(model: nn.Module, heights: tuple[int, ...], repeats: int) -> dict[str, float]:
    """mlx-lm's own forward, argmax included; its cache grows by the rows of each call."""
    made = {}
    for rows in heights:
        cache, ids = model.make_cache(), mx.arange(5, 5 + rows)[None]

        def forward(cache: Any = cache, ids: mx.array = ids) -> list[mx.array]:
            best = mx.argmax(model(ids, cache=cache), axis=-1)
            return [best, *(a for layer in cache for a in layer.state[:2] if isinstance(a, mx.array))]

        made[f"mlx-lm, {rows} rows"] = milliseconds(forward, repeats)
    return made


def our_rows(target: Target, label: str, heights: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Our forward, argmax, and all rows but the first forgotten."""
    made = {}
    for rows in heights:
        state, ids = target.new_state(), mx.arange(5, 5 + rows)[None]

        def forward(state: Any = state, ids: mx.array = ids) -> list[mx.array]:
            best = target.best(target.forward(ids, state).hidden)
            state.keep(state.length - ids.shape[1] + 1)
            return [best, *state.arrays()]

        made[f"ours, {label}, {rows} rows"] = milliseconds(forward, repeats)
    return made


def our_cycle(target: Target, net: DraftNet, label: str, block: int, cycles: int) -> dict[str, float]:
    """The decode loop's own record of its cycles."""
    options = Options(max_tokens=(cycles + 4) * block, sampling=Sampling())
    made = decode(target, net, [5, 6, 7, 8, 9, 10], options, set(), Sampler(options.sampling), block)
    times = [cycle.seconds for cycle, _ in zip(made, range(cycles + 3), strict=False)]
    return {f"ours, {label}, cycle": 1e3 * median(times[3:])}


def peer_cycle(model: nn.Module, config: dict[str, Any], block: int, cycles: int, folder: str) -> dict[str, float]:
    """dflash 0.1.0's own loop over the same target, its draft quantized to 4 bits like ours."""
    peer = Peer(folder)
    draft = peer.draft(config)
    nn.quantize(draft, group_size=64, bits=4)
    fill(draft, 2)
    times, last = [], 0.0
    made = peer.stream(model, draft, [5, 6, 7, 8, 9, 10], block, (cycles + 4) * block)
    for _ in zip(made, range(cycles + 3), strict=False):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return {"dflash 0.1.0, cycle": 1e3 * median(times[3:])}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=manifest.LAYERS)
    parser.add_argument("--small", action="store_true", help="narrow layers, to rehearse on a CPU")
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=24)
    parser.add_argument("--peer", help="folder that holds the package dflash, version 0.1.0")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    heights = (1, options.block)
    model, config = make_target(options.layers, options.small)
    rows = stock_rows(model, heights, options.cycles)
    target = build_target(model, config)
    mx.eval(model.parameters())
    mx.clear_cache()
    published = draft_config(options.layers, options.small)
    net = DraftNet(DraftConfig.from_json(published, "draft"))
    nn.quantize(net, group_size=64, bits=4)
    fill(net, 2)
    for label, on in (("stock kernels", False), ("verify kernels", True)):
        metal.enable(on)
        rows |= our_rows(target, label, heights, options.cycles)
        rows |= our_cycle(target, net, label, options.block, options.cycles)
    if options.peer:
        rows |= peer_cycle(model, published, options.block, options.cycles, options.peer)
    facts = {"device": str(mx.device_info().get("device_name", mx.default_device())), "system": platform.platform()}
    facts |= {"mlx": mx.__version__, "layers": options.layers, "block": options.block, "backend": metal.backend()}
    facts |= {"peak_bytes": mx.get_peak_memory(), "kernels": [str(line) for line in metal.report()]}
    if options.json:
        print(json.dumps(facts | {"milliseconds": rows}))
        return
    for name, value in [*facts.items(), *((name, f"{value:8.2f} ms") for name, value in rows.items())]:
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
