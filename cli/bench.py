"""bench: what speculative decoding brings on this machine."""

import json as jsonlib
from collections.abc import Sequence
from dataclasses import asdict
from statistics import geometric_mean
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_mlx.cli.check import PROMPTS
from dflash_mlx.cli.options import BriefDecodingOptions, Json, PairOptions
from dflash_mlx.cli.render import Screen, table
from dflash_mlx.cli.start import open_pair
from dflash_mlx.errors import OptionError

if TYPE_CHECKING:
    from dflash_mlx.bench import Result


def bench(
    ctx: typer.Context,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Without any, five built-in ones.")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each prompt; the median counts.")] = 3,
    json: Json = False,
    *,
    decoding: BriefDecodingOptions,
    pair: PairOptions,
) -> None:
    """Time speculative against plain decoding. Both run in one process, greedy and with the pair's own sampling."""
    from dflash_mlx.bench import compare, samplings

    settings = decoding.settings()
    screen, engine = Screen.standard(), ctx.obj()
    loaded, plan = open_pair(engine, screen, pair, settings, show=True)
    if plan[0] == "plain":
        raise OptionError(
            "there is nothing to compare: this would be plain decoding (give a draft and a block above 1)"
        )
    questions = prompts or PROMPTS
    found = []
    for result in compare(
        engine.generate, questions, samplings(loaded.sampling), repeats=repeats, pair=loaded, **settings
    ):
        found.append(result)
        screen.line(f"{len(found)} timed: {result.ratio:.2f}x at temperature {result.temperature:g}")
    if json:
        print(jsonlib.dumps([asdict(one) | {"ratio": one.ratio} for one in found], ensure_ascii=False))
    else:
        print(report(found, screen.width))


def report(results: "Sequence[Result]", width: int) -> str:
    """Return all results as a table, with a line that says which way is faster at each temperature."""
    head = ("temperature", "plain tokens/s", "speculative", "ratio", "tau", "prompt")
    rows = [
        (
            f"{r.temperature:g}",
            f"{r.plain_tokens_per_s:.1f}",
            f"{r.tokens_per_s:.1f}",
            f"{r.ratio:.2f}x",
            f"{r.tau:.2f}",
            r.prompt,
        )
        for r in results
    ]
    lines = [table([head, *rows], width)]
    for temperature in dict.fromkeys(r.temperature for r in results):
        mean = geometric_mean(r.ratio for r in results if r.temperature == temperature)
        which = "speculative is faster" if mean > 1 else "plain is faster"
        lines.append(f"temperature {temperature:g}: {mean:.2f}x, {which}")
    return "\n".join(lines)
