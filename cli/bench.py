"""bench: what speculative decoding brings on this machine."""

import json as jsonlib
from collections.abc import Sequence
from dataclasses import asdict
from statistics import geometric_mean
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_mlx.cli.check import PROMPTS
from dflash_mlx.cli.engine import open_drafted
from dflash_mlx.cli.options import BriefDecodingOptions, Json, PairOptions, Prompts
from dflash_mlx.cli.render import Screen, table

if TYPE_CHECKING:
    from dflash_mlx.bench.compare import Result


def bench(
    ctx: typer.Context,
    prompts: Prompts = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each prompt; the median counts.")] = 3,
    json: Json = False,
    *,
    decoding: BriefDecodingOptions,
    pair: PairOptions,
) -> None:
    """Time speculative against plain decoding. Both run in one process, greedy and with the pair's own sampling."""
    from dflash_mlx.bench.compare import compare, samplings

    settings, engine, screen, found = decoding.settings(), ctx.obj(), Screen.standard(), []
    loaded = open_drafted(engine, screen, pair, settings)
    settings |= {"pair": loaded, "repeats": repeats}
    for one in compare(engine.generate, prompts or PROMPTS, samplings(loaded.sampling), **settings):
        found.append(one)
        screen.line(f"{len(found)} timed: {one.ratio:.2f}x at temperature {one.temperature:g}")
    results = [asdict(one) | {"ratio": one.ratio} for one in found]
    told = {"model": loaded.model_id, "draft": loaded.draft_id, "repeats": repeats, "results": results}
    print(jsonlib.dumps(told, ensure_ascii=False) if json else report(found, screen.width))


def report(results: "Sequence[Result]", width: int) -> str:
    """Return all results as a table, with a line that says which way is faster at each temperature."""
    rows = [("temperature", "plain tokens/s", "speculative", "ratio", "tau", "prompt")]
    for r in results:
        figures = (f"{r.temperature:g}", f"{r.plain_tokens_per_s:.1f}", f"{r.tokens_per_s:.1f}")
        rows.append((*figures, f"{r.ratio:.2f}x", f"{r.tau:.2f}", r.prompt))
    lines = [table(rows, width)]
    for temperature in dict.fromkeys(r.temperature for r in results):
        ratios = [r.ratio for r in results if r.temperature == temperature and r.ratio > 0]
        if not ratios:
            lines.append(f"temperature {temperature:g}: the answers are too short to be timed")
            continue
        mean = geometric_mean(ratios)
        which = "speculative" if mean > 1 else "plain"
        lines.append(f"temperature {temperature:g}: {mean:.2f}x, {which} is faster")
    differing = sum(r.equal is False for r in results)
    if differing:
        lines.append(f"{differing} greedy answers differ from plain decoding; `dflash-mlx check` tells why")
    return "\n".join(lines)
