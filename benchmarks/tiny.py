"""The embedded pair on this machine: speculative against plain decoding of this engine and of mlx-lm, in one run.

Every round decodes each prompt once in every way, in turn, so that a busy moment falls on all of them; figures are
medians over rounds, ratios are of the same round. Greedy and at the pair's own temperature 0.7.

    python benchmarks/tiny.py --json
"""

import argparse
import json
import platform
import time
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm import load as mlx_lm_load
from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_sampler

import dflash_mlx
from dflash_mlx.models.presets import package_folder
from dflash_mlx.types import Stats

PROMPTS = {
    "explain": "Explain in simple words how a rainbow forms.",
    "code": "Write a Python function that checks whether a word is a palindrome.",
    "list": "List five healthy breakfast ideas.",
    "story": "Write a short story about a robot who learns to paint.",
    "arithmetic": "A shop sells 3 apples for 2 dollars. How much do 12 apples cost?",
}


def ours(pair: dflash_mlx.Pair, prompt: str, tokens: int, temperature: float, block: int) -> Stats:
    """One answer of ours; block 1 is plain decoding."""
    sampling = dflash_mlx.Sampling(temperature, top_p=0.95 if temperature else 1.0, seed=1)
    return dflash_mlx.generate(prompt, pair=pair, max_tokens=tokens, sampling=sampling, block_size=block).stats


def theirs(model: Any, tokenizer: Any, prompt: str, tokens: int, temperature: float) -> float:
    """Tokens a second of mlx-lm's own plain decoding of the same answer length, prefill left out."""
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    mx.random.seed(1)
    sampler = make_sampler(temperature, top_p=0.95 if temperature else 0.0)
    stamps = [time.perf_counter() for _ in stream_generate(model, tokenizer, ids, tokens, sampler=sampler)]
    return (len(stamps) - 1) / (stamps[-1] - stamps[0])


def one_round(
    pair: Any, library: tuple[Any, Any], tokens: int, temperature: float, blocks: list[int]
) -> dict[str, Any]:
    """Return tokens a second of every way over all prompts, and tau by block and kind."""
    rates: dict[str, list[float]] = {}
    tau: dict[str, dict[str, float]] = {}
    for kind, prompt in PROMPTS.items():
        for block in [1, *blocks]:
            stats = ours(pair, prompt, tokens, temperature, block)
            rates.setdefault(f"block {block}" if block > 1 else "plain", []).append(1 / stats.tokens_per_s)
            if block > 1:
                tau.setdefault(f"block {block}", {})[kind] = stats.tau
        rates.setdefault("mlx-lm plain", []).append(1 / theirs(*library, prompt, tokens, temperature))
    return {"rates": {way: len(each) / sum(each) for way, each in rates.items()}, "tau": tau}


def report(rounds: list[dict[str, Any]], blocks: list[int]) -> dict[str, Any]:
    """Medians of the rates, and of the ratios within each round."""
    ways = rounds[0]["rates"]
    made: dict[str, Any] = {"tokens_per_s": {way: median(each["rates"][way] for each in rounds) for way in ways}}
    for base in ("plain", "mlx-lm plain"):
        made[f"ratio to {base}"] = {
            f"block {block}": median(each["rates"][f"block {block}"] / each["rates"][base] for each in rounds)
            for block in blocks
        }
    return made | {"tau": rounds[0]["tau"]}


def denoise(pair: Any, tokens: int) -> dict[str, float]:
    """Return the mean greedy tau at block 8 over the prompts, by number of draft passes."""
    made = {}
    for steps in (1, 2, 3):
        runs = [
            dflash_mlx.generate(prompt, pair=pair, max_tokens=tokens, block_size=8, denoise_steps=steps).stats
            for prompt in PROMPTS.values()
        ]
        made[f"{steps} passes"] = sum(run.completion_tokens - 1 for run in runs) / sum(run.cycles for run in runs)
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--blocks", type=int, nargs="+", default=[3, 4, 5, 6, 8])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pair = dflash_mlx.load("tiny")
    library = mlx_lm_load(str(package_folder("tiny/target")))
    facts: dict[str, Any] = {"system": platform.platform(), "device": str(mx.default_device()), "mlx": mx.__version__}
    facts |= {"date": time.strftime("%Y-%m-%d"), "rounds": options.rounds, "tokens": options.tokens}
    for name, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7)):
        one_round(pair, library, 16, temperature, options.blocks)
        rounds = [one_round(pair, library, options.tokens, temperature, options.blocks) for _ in range(options.rounds)]
        facts[name] = report(rounds, options.blocks)
    facts["greedy tau at block 8 by draft passes"] = denoise(pair, options.tokens)
    print(json.dumps(facts, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
