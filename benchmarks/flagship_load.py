"""The flagship at full size with random values: written to disk, loaded through the real path, and a whole answer made.

Needs about 21 GB of disk and 40 GB of memory. The speed says nothing about the real model: a random draft is rarely
accepted. What counts is that everything of the published shapes loads, at which cost, and runs.
"""

import argparse
import json
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import flagship_manifest as manifest
import mlx.core as mx
import numpy as np

import dflash_mlx
from dflash_mlx.loading import Pair

TOKENIZER = Path(__file__).parents[1] / "tests" / "data" / "checkpoints" / "t-hybrid-fp32"
POOL = 1 << 24  # values drawn once and written over and over


class Filler:
    """Writes random tensors at a trained model's scale: 4-bit words, scales, centring biases, dense values, norms."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.words = draw.integers(0, 2**32, POOL, dtype=np.uint32).tobytes()
        self.dense = _bf16(draw.standard_normal(POOL, dtype=np.float32) * 0.02)
        self.scales, self.biases, self.ones = (_bf16(np.full(POOL, value)) for value in (0.003, -0.0225, 1.0))

    def __call__(self, file: BinaryIO, name: str, spec: manifest.Spec) -> None:
        if spec.dtype == "U32":
            pool = self.words
        elif name.endswith((".scales", ".biases")):
            pool = self.scales if name.endswith(".scales") else self.biases
        else:
            pool = self.ones if "norm" in name or "base_kernel" in name else self.dense
        left = spec.size
        while left:
            left -= file.write(pool[: min(left, len(pool))])


def _bf16(values: Any) -> bytes:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def roomy() -> str:
    """Return the memory file system where it has room for the files, which a slow disk would take minutes to write."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 30e9 else "/var/tmp"


def write_pair(home: Path, layers: int, seed: int) -> None:
    """Write both checkpoints under `home`; the tokenizer is a small stand-in, since prompts are given as ids."""
    fill = Filler(seed)
    manifest.write_folder(home / "target", manifest.target_config(layers), manifest.target_tensors(layers), fill)
    manifest.write_folder(home / "draft", manifest.draft_config(layers), manifest.draft_tensors(), fill)
    (home / "target" / "generation_config.json").write_text(json.dumps(manifest.generation_config()))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, home / "target")


def timed_load(home: Path, draft_bits: int) -> tuple[Pair, dict[str, Any]]:
    """Load the pair and return it with seconds and bytes."""
    mx.reset_peak_memory()
    start = time.perf_counter()
    pair = dflash_mlx.load(model=str(home / "target"), draft=str(home / "draft"), draft_bits=draft_bits)
    seconds = time.perf_counter() - start
    facts = {"load_s": seconds, "load_peak_bytes": mx.get_peak_memory(), "resident_bytes": mx.get_active_memory()}
    return pair, facts | {"stop_ids": sorted(pair.stop_ids), "notices": list(pair.notices)}


def timed_answer(pair: Pair, prompt: int, tokens: int, seed: int) -> dict[str, Any]:
    """Generate from `prompt` random ids, once to warm up and once to count."""
    ids = [
        int(token) for token in np.random.default_rng(seed).integers(0, pair.target_config.vocab_size * 9 // 10, prompt)
    ]
    dflash_mlx.generate(ids[:64], pair=pair, max_tokens=min(8, tokens))
    stats = dflash_mlx.generate(ids, pair=pair, max_tokens=tokens).stats
    names = ("mode", "block_size", "prompt_tokens", "completion_tokens", "cycles", "tau", "prefill_s", "decode_s")
    return {name: getattr(stats, name) for name in (*names, "tokens_per_s", "peak_bytes")}


def main() -> None:
    """Write, load, generate, report, clean up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=manifest.LAYERS, help="target layers; fewer for a quick try")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="prompt length in tokens")
    parser.add_argument("--draft-bits", type=int, default=4, choices=(4, 8, 16))
    parser.add_argument("--folder", help="where the files are written and removed again (default: memory, else disk)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    info = mx.device_info()
    facts: dict[str, Any] = {"device": f"{mx.default_device()} {info.get('device_name', '')}".strip()}
    facts |= {"system": platform.platform(), "mlx": mx.__version__, "layers": options.layers, "seed": options.seed}
    with tempfile.TemporaryDirectory(dir=options.folder or roomy()) as home:
        start = time.perf_counter()
        write_pair(Path(home), options.layers, options.seed)
        facts |= {"write_s": time.perf_counter() - start}
        facts |= {"disk_bytes": sum(file.stat().st_size for file in Path(home).rglob("*") if file.is_file())}
        pair, loaded = timed_load(Path(home), options.draft_bits)
        facts |= loaded | timed_answer(pair, options.prompt, options.tokens, options.seed)
    lines = (f"{name:18} {value}" for name, value in facts.items())
    print(json.dumps(facts) if options.json else "\n".join(lines))


if __name__ == "__main__":
    main()
