"""Ours against dflash 0.1.0 on small trained pairs, hybrid and dense, greedy, alternated in one process.

pip install --no-deps --target /tmp/peer dflash==0.1.0
python benchmarks/peers.py --json --peer /tmp/peer
"""

import argparse
import gzip
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model
from peer import Peer

import dflash_mlx
from dflash_mlx.decode import decode
from dflash_mlx.sampling import Sampler
from dflash_mlx.types import Options, Sampling

DATA = Path(__file__).parents[1] / "tests" / "data"
PAIRS = [("t-hybrid-fp32", "h-d2-slide"), ("t-hybrid-fp32", "h-d1-full"),
         ("t-dense-fp32", "n-d2-slide"), ("t-dense-fp32", "n-d1-full")]  # fmt: skip


def read(name: str) -> dict[str, Any]:
    """Return a checkpoint's config.json."""
    return json.loads((DATA / "checkpoints" / name / "config.json").read_text())


def compare(target_name: str, draft_name: str, peer: Peer, tokens: int, rounds: int) -> dict[str, Any]:
    """Return tokens a second of both, the ratio of the same round, and whether the tokens agree."""
    folder, config = DATA / "checkpoints" / draft_name, read(draft_name)
    runs = json.loads(gzip.decompress((DATA / "goldens" / f"runs-{target_name}.json.gz").read_bytes()))
    prompt, block = runs["greedy"]["p40"]["prompt"], config["dflash_config"]["block_size"]
    pair = dflash_mlx.load(model=str(DATA / "checkpoints" / target_name), draft=str(folder))
    target, net = pair.target, pair.draft
    model = load_model(DATA / "checkpoints" / target_name)[0]  # its own copy: the peer leaves hooks in it
    draft = peer.draft(config, dict(mx.load(str(folder / "model.safetensors"))))
    mine, other, rates = [], [], []
    for turn in range(rounds + 1):
        start = time.perf_counter()
        options = Options(max_tokens=tokens, sampling=Sampling())
        cycles = decode(target, net, prompt, options, set(), Sampler(options.sampling), block)
        mine = [token for cycle in cycles for token in cycle.tokens]
        middle = time.perf_counter()
        other = [token for response in peer.stream(model, draft, prompt, block, tokens) for token in response.tokens]
        end = time.perf_counter()
        rates += [(tokens / (middle - start), tokens / (end - middle))] if turn else []
    ours, theirs = (median(rate[i] for rate in rates) for i in (0, 1))
    ratio = median(a / b for a, b in rates)
    return {"ours": ours, "dflash 0.1.0": theirs, "ratio": ratio, "same tokens": mine == other}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="folder that holds the package dflash, version 0.1.0")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peer = Peer(options.peer)
    facts: dict[str, Any] = {"system": platform.platform(), "mlx": mx.__version__, "date": time.strftime("%Y-%m-%d")}
    facts["pairs"] = {
        f"{target} + {draft}": compare(target, draft, peer, options.tokens, options.rounds) for target, draft in PAIRS
    }
    print(json.dumps(facts, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
